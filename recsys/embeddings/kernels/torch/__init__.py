"""What `kernels` does for the CPU, in operations of torch: for tables on a CUDA device.

Each function here stands in for a kernel of numba's and keeps its contract; a Triton kernel will
stand in for it in turn. They run on tensors of any device, so the CPU tests them.

    row_space       several tables as one array; row = first row of the table + id
    bags            the input of a lookup; where each of its values is looked up
    pooled_lookup   rows of every bag, added up; the gradient of bags' weights
    row_update      gradients of equal rows added up, each row moved once
    rounding        rows of 16 bits
    slots           rows to slots, and which have to go
    slot_rows       rows in slots, and rows wherever they are
    errors          what is wrong with an input, said later

None waits for the device. So no array's size may depend on values: where a list of distinct rows
would have one, it has a place for every lookup, and what is left over repeats another place. And
sums are made by sorting, then run by run in lookup order: `index_add_` on CUDA adds in whatever
order threads come.
"""
