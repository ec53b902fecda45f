"""Cold stores: every row and its state, in slower memory."""
