"""The CPU kernels written with torch operations, for tables on a CUDA device.

Each function keeps the contract of the numba kernel of the same name; a Triton kernel will replace
it. They run on tensors of any device, so tests on a CPU cover them.

    row_space       several tables as one array; row = first row of the table + id
    bags            the input of a lookup, and the row of each of its values
    pooled_lookup   sums the rows of every bag; computes the gradient of per-sample weights
    row_update      sums the gradients of equal rows, and updates each row once
    rounding        rounds rows to 16 bits
    slots           gives rows slots, and evicts rows
    queued_claims   the same, for claims that the host does not wait for
    slot_rows       reads rows from slots, or from either tier
    errors          raises errors of an input on a later call

These functions do not wait for the device. So no array's size may depend on values: a list of
distinct rows has a place for every lookup, and the places left over repeat another one. Sums are
made by sorting, then run by run in lookup order, because `index_add_` on CUDA adds in any order.
"""
