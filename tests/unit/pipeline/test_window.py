import pytest
import torch

from recsys.pipeline.window import Window


class Moved:
    """A mini-batch that fails to be moved so many times."""

    def __init__(self, number, num_failures):
        self.number, self.num_failures = number, num_failures

    def to(self, device, non_blocking=False):
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(f"{self.number} cannot be moved")
        return self


def test_a_mini_batch_that_cannot_be_moved_is_an_error_in_its_turn():
    window, seen = Window(), []
    iterator = iter([Moved(0, 0), Moved(1, 9), Moved(2, 0), Moved(3, 1)])

    for _ in range(4):
        window.fill(iterator, 2, torch.device("cpu"))
        try:
            seen.append(window.pop(iterator, torch.device("cpu")).batch.number)
        except OSError as error:
            seen.append(str(error))

    assert seen == [0, "1 cannot be moved", 2, 3]


class Sent:
    """Tables that are divided among processes; notes which mini-batches were sent."""

    def __init__(self):
        self.divided, self.sent = [self], []

    def send(self, batch):
        self.sent.append(batch)


def test_ids_of_a_mini_batch_are_sent_once_and_none_after_a_read_error():
    def read():
        yield from range(6)
        raise OSError("cannot be read")

    window, tables, iterator = Window(), Sent(), read()

    def step():
        window.fill(iterator, 2, None)
        window.send(window.pop(iterator, None), tables)

    for _ in range(4):
        step()
    with pytest.raises(OSError, match="cannot be read"):
        step()

    assert tables.sent == [0, 1, 2, 3, 4, 5]
