"""Results of runs and of ablations as a person reads them."""
