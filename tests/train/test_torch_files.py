import errno
import io
import sys
from pathlib import Path

import pytest
import torch

from recsys.train.exports.torch_files import opened_for_torch
from tests.forks import Fork

needs_full_disk = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")


class Failing(io.RawIOBase):
    """A file that raises an error in the first write after some bytes."""

    def __init__(self, num_bytes, error):
        self.left, self.error, self.num_after = num_bytes, error, 0

    def open(self, mode, buffering):
        return self

    def writable(self):
        return True

    def write(self, data):
        self.num_after += self.left < 0
        self.left -= len(data)
        if self.left < 0 and not self.num_after:
            raise self.error
        return len(data)


@pytest.mark.parametrize("num_bytes", [0, 10_000, 50_000])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_the_first_error_of_a_write_is_raised_and_what_follows_is_dropped(num_bytes, error):
    file = Failing(num_bytes, error)

    with pytest.raises(type(error)) as raised, opened_for_torch(file) as stream:
        torch.save({"weight": torch.zeros(20_000)}, stream)

    assert raised.value is error
    assert file.num_after <= 1  # what was buffered before, when the file is closed


def test_without_an_error_the_file_is_what_torch_would_write(tmp_path):
    state = {"weight": torch.arange(1000.0)}

    with opened_for_torch(tmp_path / "model.pt") as stream:
        torch.save(state, stream)

    assert torch.equal(torch.load(tmp_path / "model.pt")["weight"], state["weight"])


def save_on_a_full_disk():
    program = torch.export.export(torch.nn.Linear(200, 200), (torch.ones(1, 200),))
    try:
        with opened_for_torch(Path("/dev/full")) as stream:
            torch.export.save(program, stream)  # without this stream, C++ ends the process here
    except OSError as error:
        sys.stdout.write(f"{error.errno}\n")


@pytest.mark.outside_ci
@needs_full_disk
def test_a_program_on_a_full_disk_raises_and_does_not_end_the_process():
    fork = Fork(save_on_a_full_disk)
    printed, said = fork.end()

    assert fork.process.exitcode == 0, said
    assert printed.split() == [str(errno.ENOSPC)]
    assert "Expect archive file" not in said
