"""Compiles the Triton kernels for devices that are not there, and prints what they take.

    python compiling.py 90 80 [--all | --once]

Every `launches_*.py` beside this file has a function `launches(is_all)` that yields a name and a
call of one of our functions. The call runs with a driver that claims to be a GPU of the named
compute capability and launches nothing. So what is compiled is what the call would have launched:
the same dtypes, block sizes and alignments. Without `--all`, every device but the first named gets
each kernel once, as its first launch needs it; with `--once`, the first named does, too. Prints a
JSON list of `Compiled`, one for each.

Run in a process of its own, without TRITON_INTERPRET: Triton reads it when a kernel is decorated.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HERE = Path(__file__).parent
_dumped = {}  # by kernel, since several launches are of one


class Compiled(NamedTuple):
    """One kernel for one device.

    Attributes:
        launch: Name of the launch.
        kernel: Name of the kernel.
        capability: 80 for sm_80, and so on.
        registers: Per thread.
        spilled_bytes: Of local memory per thread; not zero if registers were spilled.
        shared_bytes: Shared memory per program.
        threads: Per program.
        widest_load: Bits that the widest load from global memory reads at once, per thread.
        widest_store: The same of stores.
        num_fused: Instructions that multiply and add with one rounding; None if not counted.
        waits: Whether there is a barrier between each load of single numbers and the next store of
            some; loads and stores of several numbers at once are not considered.
        key: Differs from that of every other kernel, dtype and block size.
    """

    launch: str
    kernel: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    threads: int
    widest_load: int
    widest_store: int
    num_fused: int | None
    waits: bool
    key: str


class NoGpu:
    """A driver of a GPU that is not there."""

    def __init__(self, capability):
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return self._target.arch  # Triton keeps compiled kernels by device

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def compile_for(capabilities, *, is_all, is_once=False):
    found, compiled, known = [], [], set()
    run = JITFunction.run
    compiles_again = True

    def compile_only(self, *args, grid, warmup=False, **options):
        if compiles_again or self not in known:
            known.add(self)
            compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    for number, capability in enumerate(capabilities):
        compiles_again = not is_once and (is_all or not number)
        known.clear()
        driver.set_active(NoGpu(capability))
        for path in sorted(HERE.glob("launches_*.py")):
            for name, launch in _load(path).launches(is_all):
                compiled.clear()
                launch()
                assert compiled or not compiles_again, f"{name} launched no kernel"
                found += [_measure(name, capability, kernel) for kernel in compiled]
    return found


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _measure(launch, capability, kernel):
    usage, num_fused = _dump(kernel.hash, kernel.asm["cubin"], is_read="unfused" in launch)
    taken = {key: int(number) for key, number in re.findall(r"(\w+):(\d+)", usage)}
    return Compiled(
        launch,
        kernel.metadata.name,
        capability,
        taken["REG"],
        taken["STACK"] + taken["LOCAL"],
        kernel.metadata.shared,
        kernel.metadata.num_warps * 32,
        _widest(kernel.asm["ptx"], "ld"),
        _widest(kernel.asm["ptx"], "st"),
        num_fused,
        not re.search(r"l(?=s)", _order(kernel.asm["ptx"])),
        kernel.hash,
    )


def _dump(key, cubin, *, is_read):
    """What a kernel takes, and how many fused multiply-adds it has if its code is read."""
    if (key, is_read) not in _dumped:
        _dumped[key, is_read] = _dump_anew(cubin, is_read=is_read)
    return _dumped[key, is_read]


def _dump_anew(cubin, *, is_read):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin/cuobjdump"
        command = [tool, "-res-usage", *(["-sass"] if is_read else []), file.name]
        dumped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [usage] = re.findall(r"REG:.*", dumped)
    return usage, len(re.findall(r"\b[DFH]FMA", dumped)) if is_read else None


def _order(ptx):
    """Loads (l) and stores (s) of single numbers in global memory, and barriers (b), in order."""
    found = re.findall(r"\b(?:(ld|st)\.global\.(?!v\d)|(bar\.sync))", ptx)
    return "".join((access or "b")[0] for access, _ in found)


def _widest(ptx, operation):
    """Bits of the widest access to global memory in PTX such as `ld.global.v4.b32`."""
    pattern = rf"\b{operation}\.(?:\w+\.)*?global\.(?:\w+::\w+\.|\w+\.)*?(?:v(\d)\.)?[a-z](\d+)\b"
    found = [int(number or 1) * int(bits) for number, bits in re.findall(pattern, ptx)]
    return max(found, default=0)


if __name__ == "__main__":
    chosen = [int(word) for word in sys.argv[1:] if word.isdigit()]
    kernels = compile_for(chosen, is_all="--all" in sys.argv, is_once="--once" in sys.argv)
    print(json.dumps([kernel._asdict() for kernel in kernels]))
