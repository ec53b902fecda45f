"""Launches Triton kernels on a GPU that is not there, and prints which compiled kernels ran.

Compiled kernels only write down that they were launched. Prints a JSON list of pairs: the launch as
Triton makes it, and as `Launched` makes it when it knows the kernel already. A small kernel is
launched with arguments of many kinds.

Run in a process of its own, without TRITON_INTERPRET: Triton reads it when a kernel is decorated.
"""

import json
import signal
from itertools import product

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from recsys._support.cuda.triton_launches import Launched, launched

# The last one, as of an IntEnum, is not of the type int itself.
INTEGERS = 0, 1, True, 2, 16, 17, -5, 2**31 - 1, 2**31, 2**40 + 16, -(2**31) - 1, signal.SIGTERM

_launches = []


class NoGpu:
    """A driver of a GPU that is not there."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def _written_down(kernel):
    """In place of `CompiledKernel.run`: the function that launches the kernel."""

    def run(*arguments):
        grid, kernel_arguments = arguments[:3], arguments[9:]
        _launches.append([kernel.hash, grid, [_described(each) for each in kernel_arguments]])

    return run


def _described(argument):
    if isinstance(argument, torch.Tensor):  # results have another address in every call
        return [str(argument.dtype), argument.shape, argument.data_ptr() % 16]
    return str(argument)


def pairs_of(launch):
    """Its launches by Triton, and those of a second call of it by `Launched`."""
    return [_launches_of(launch, _through_triton, 1), _launches_of(launch, _by_launched, 2)]


def _launches_of(launch, way, times):
    Launched._launch = way
    for _ in range(times):
        _launches.clear()
        launch()
    return _launches.copy()


_by_launched = Launched._launch


def _through_triton(self, num_programs, *arguments, **named):
    self.kernel[num_programs,](*arguments, **named)


@launched
@triton.jit(do_not_specialize=["size"])
def kernel(source, more, target, number, size, BLOCK: tl.constexpr, IS_DOUBLED: tl.constexpr):
    at = tl.arange(0, BLOCK)
    found = tl.load(source + at, at < size) + number
    if more is not None:
        found += tl.load(more + at, at < size)
    tl.store(target + at, found * 2 if IS_DOUBLED else found, at < size)


def kinds():
    numbers = torch.zeros(64)
    tensors = numbers, numbers[1:], numbers.double(), numbers.int()
    for (source, more), number in product(product(tensors, (None, *tensors[:2])), (1, 3, 16)):
        yield (source, more, numbers, number, 5), {"BLOCK": 32, "IS_DOUBLED": False}
    for number, size in product(INTEGERS, INTEGERS):
        yield (numbers, None, numbers, number, size), {"BLOCK": 32, "IS_DOUBLED": True}
    for num_warps, block in product((2, 4), (16, 64)):
        named = {"IS_DOUBLED": True, "num_warps": num_warps, "BLOCK": block}
        yield (numbers, None, numbers, 3, 5), named


if __name__ == "__main__":
    CompiledKernel._init_handles = lambda self: None
    CompiledKernel.run = property(_written_down)
    driver.set_active(NoGpu())
    print(json.dumps([pairs_of(lambda a=a, n=n: kernel[3,](*a, **n)) for a, n in kinds()]))
