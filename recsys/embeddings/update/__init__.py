"""Updates: rows are updated by a ledger of gradients and the settings of an optimizer."""
