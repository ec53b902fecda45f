"""Updates: from a ledger and settings to updated rows."""
