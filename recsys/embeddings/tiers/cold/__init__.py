"""Cold stores: slower memory that holds every row and its state."""
