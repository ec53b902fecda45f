"""The engine: the row map says where each row is, lookups and updates ask it when they run.

It grows beside `recsys.embeddings`, which it will replace; nothing of it is public yet.

    lookup/     ids -> pooled vectors, and the ledger entries of their backward
    rows/       tables, bags of ids, ledgers
    update/     ledgers -> rows, one call a step
    kernels/    what all of them run
"""
