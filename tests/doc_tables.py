"""Reads tables as the scripts of docs/benchmarks write them."""


def cells_of(table):
    """The caption, and the cells of the header and of each line."""
    caption, _, header, _, *lines = table.strip().split("\n")
    cells = [[part.strip() for part in line.strip("|").split("|")] for line in (header, *lines)]
    return caption, *cells
