"""What travels between ranks for row-wise tables: distinct rows, or parts of pooled vectors.

row_wise         the sharding, with one of the two
distinct_rows    sends each distinct id once, and its row back once
received_rows    pools the rows that came back
row_lookups      looks up the rows that other ranks ask for
"""
