"""What tests of `recsys.distributed` share: processes that are the ranks of a process group."""

import io
import time

import pytest
import torch
from ranks_serve import serve

from tests.forks import server_of_forks

LIMIT = 60  # seconds for one case, and for the collectives in it


class Ranks:
    """Processes that run cases of `ranks_serve.py`: forks of one that has imported, no more.

    A case that raises ends its rank's process; the next case starts all ranks again.
    """

    def __init__(self, world, folder):
        self.world, self.folder = world, folder
        self.processes, self.connections, self.num_starts = [], [], 0

    def start(self):
        self.end()
        self.num_starts += 1
        store = str(self.folder / f"store-{self.world}-{self.num_starts}")
        context = server_of_forks()
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            arguments = rank, self.world, store, theirs, LIMIT
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        for connection in self.connections:
            assert connection.poll(5 * LIMIT), "a rank has not started"
            connection.recv()

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.connections = [], []

    def send(self, function, arguments):
        if not self.processes or not all(process.is_alive() for process in self.processes):
            self.start()
        for connection in self.connections:
            connection.send((function, arguments))

    def run(self, function, **arguments):
        """What the case returns on each rank; a rank that raises fails the test."""
        found = self.ended(function, arguments)
        if any(error for error, _, _ in found):
            shown = [f"rank {rank}:\n{error[-3000:]}" for rank, (error, *_) in enumerate(found)]
            pytest.fail(f"{function}: " + "\n".join(shown))
        return [result for _, result, _ in found]

    def ended(self, function, arguments):
        """How each rank ends: its error or "", what it returned, and after how many seconds."""
        self.send(function, arguments)
        begin, found = time.monotonic(), {}
        while len(found) < self.world and time.monotonic() < begin + LIMIT:
            for rank, connection in enumerate(self.connections):
                if rank not in found and connection.poll(0.02):
                    found[rank] = *_receive(connection), time.monotonic() - begin
        if len(found) < self.world or any(error for error, _, _ in found.values()):
            self.end()
        return [found.get(rank, ("it did not end", None, LIMIT)) for rank in range(self.world)]


def _receive(connection):
    try:
        return torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
    except EOFError:
        return "the process has ended", None


@pytest.fixture(scope="session")
def _all_ranks(tmp_path_factory):
    pools = {}

    def of(world):
        if world not in pools:
            pools[world] = Ranks(world, tmp_path_factory.mktemp("ranks"))
        return pools[world]

    yield of
    for pool in pools.values():
        pool.end()


@pytest.fixture
def ranks(_all_ranks):
    """Runs a case on every rank, by default on two; returns what each rank returned."""

    def run(function, world=2, **arguments):
        return _all_ranks(world).run(function, **arguments)

    return run


@pytest.fixture
def failing_ranks(_all_ranks):
    """Runs a case that fails; returns each rank's error, and after how many seconds."""

    def run(function, world=2, **arguments):
        ended = _all_ranks(world).ended(function, arguments)
        return [(error, seconds) for error, _, seconds in ended]

    return run


@pytest.fixture(autouse=True)
def one_thread():
    """The runs in one process, with which ranks are compared, have one thread, as ranks have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
