"""Parts of `recsys bench distributed`: processes that share tables, and what they send."""
