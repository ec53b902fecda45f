"""What kernels of a device work on, and the operations of torch around Triton kernels.

    row_space       several tables as one array, row = first row of the table + id; rows in slots
    bags            the input of a lookup, and the row of each of its values
    joined_entries  joins the ledger entries of a pass, for one launch
    slots           what slots hold, the base class of their map, and claims that are queued
    pooled_lookup   sums the rows of every bag where some are copies of rows in files
    errors          raises errors of an input on a later call

These functions do not wait for the device. So no array's size may depend on values: a list of
distinct rows has a place for every lookup.
"""
