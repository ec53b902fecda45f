"""Triton kernels for tables on a CUDA device; each stem is that of a numba kernel.

    lookup     pools rows wherever they are, checks the input, and copies its ids for the update
    row_sort   sorts the lookups of a ledger by row
    row_sums   sums the gradients of each row
    update     updates each row once, by its sum
    claim      marks the slots of a mini-batch, and gives its other rows slots
    move       copies rows between slots and tables
    memory     where rows are, and the record of an error

A CPU machine needs no triton: only `rows.device_tables` and `tiers.device_fetch` import these
modules, and only groups on CUDA import those.

Rules. A kernel waits for nothing on the host, and its grid depends on sizes that the host knows.
Sizes that follow from a model are `tl.constexpr`; those that change with a mini-batch are not, so
that they compile nothing anew. Row numbers become int64 before they are multiplied. Sums have an
order that depends on lookups alone, so they repeat to the bit. In a sum or difference of a tensor
and a constant of the module the tensor comes first: Triton's interpreter wants it. The host
launches kernels by `_support.cuda.triton_launches`.
"""
