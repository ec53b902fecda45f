"""Triton kernels for tables on a CUDA device.

Each function keeps the contract of the numba kernel of the same name, on what `kernels.torch` has.
Only `kernels.choice` imports these modules, and only for tables on CUDA: a CPU machine needs no
triton.

    pooled_lookup   sums the rows of every bag; computes the gradient of per-sample weights
    row_runs        sorts lookups by row
    row_sums        sums the gradients of each row
    row_update      updates each row once, by its sum
    slots           the map of the slots
    claims          gives the rows of a mini-batch slots, and evicts rows
    claim_kernels   the kernels of a claim
    transfers       copies rows between slots and page-locked host memory, by lists on the device

Rules. A kernel waits for nothing on the host, and its grid depends on sizes that the host knows.
Sizes that follow from a model are `tl.constexpr`; those that change with a mini-batch are not, so
that they compile nothing anew. Row numbers become int64 before they are multiplied. Sums have an
order that depends on lookups alone, so they repeat to the bit. In a sum or difference of a tensor
and a constant of the module the tensor comes first: in Triton's interpreter a constant that comes
first makes the result a constant, which Triton 3.8 and later refuse as a tensor. The host launches
kernels by `_support.cuda.triton_launches`.
"""
