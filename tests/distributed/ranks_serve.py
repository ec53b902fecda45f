"""One rank of the tests: runs functions of the three modules of cases."""

import io
import traceback
import warnings
from datetime import timedelta

import torch


def serve(rank, world, store, connection, limit):
    torch.set_num_threads(1)
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

    cases = vars(ranks_cases) | vars(ranks_exchange) | vars(ranks_sequence)
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
