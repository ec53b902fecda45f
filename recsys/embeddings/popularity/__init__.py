"""How often each row is looked up, and which rows stay hot."""

__all__ = ["RANKINGS"]

# The names of the rankings; see `plan_hot_rows`.
RANKINGS = ("lookups_per_byte", "global_topk", "per_table_threshold")
