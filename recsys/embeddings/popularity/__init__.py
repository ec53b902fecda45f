"""How often each row is looked up, and which rows stay hot."""
