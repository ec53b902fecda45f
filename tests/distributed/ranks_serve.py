"""One rank of the tests: runs functions of `ranks_cases.py` and the files beside it."""

import gc
import io
import os
import traceback
import warnings
from datetime import timedelta

import torch

from tests.compiling import compile_once


def serve(rank, world, store, connection, limit):
    torch.set_num_threads(1)
    compile_once()
    os.fsync = os.fstat  # as in the process of the tests: `no_waiting_for_the_disk`
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=limit),
    )
    import ranks_cases
    import ranks_exchange
    import ranks_sequence
    import ranks_train

    gc.collect()
    gc.freeze()  # as in the process of the tests: `garbage_of_others_is_let_be`
    modules = ranks_cases, ranks_exchange, ranks_sequence, ranks_train
    cases = {name: case for module in modules for name, case in vars(module).items()}
    connection.send("ready")
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return  # the tests have ended
        try:
            found = "", cases[function](rank, world, **arguments)
        except Exception:
            found = traceback.format_exc(), None
        result = io.BytesIO()
        torch.save(found, result)
        connection.send_bytes(result.getvalue())
        if found[0]:
            return
