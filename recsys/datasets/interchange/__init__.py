"""Arrays in files of other programs, and stores made from them."""
