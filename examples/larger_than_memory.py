"""Trains a table that is larger than the memory this process may use, with its rows in a file.

    python examples/larger_than_memory.py

The process first limits its own memory, so that a plain `nn.EmbeddingBag` of this size cannot be
made. It runs on Linux, and takes 2 GiB of disk while it runs: the rows, and the state of Adagrad.
"""

from __future__ import annotations

import re
import resource
import tempfile
from pathlib import Path

import torch
from torch import nn

from recsys.embeddings import Adagrad, HotColdEmbeddingBag

MIB = 2**20
DIM, BATCH_SIZE, IDS_PER_BAG = 64, 256, 4


def memory_bytes(field: str) -> int:
    """A figure of this process: "RssAnon" is the memory in use, "VmData" what it has asked for."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1])


def build(num_rows: int, budget_bytes: int, folder: Path) -> HotColdEmbeddingBag:
    """A table with all rows in `folder`, of which those in frequent use are in memory."""
    return HotColdEmbeddingBag(
        num_rows,
        DIM,
        mode="sum",
        optimizer=Adagrad(lr=0.02),
        budget=budget_bytes,
        cold_tier="file",
        cold_path=folder,
    )


def train(bag: HotColdEmbeddingBag, num_steps: int) -> int:
    """Make so many steps; returns the most memory that was in use after a step, in bytes."""
    torch.manual_seed(0)
    most = 0
    for step in range(1, num_steps + 1):
        drawn = torch.rand(BATCH_SIZE, IDS_PER_BAG)
        loss = (
            bag((bag.num_embeddings * drawn**8).long()).square().mean()
        )  # a few rows are frequent
        loss.backward()  # updates the rows
        most = max(most, memory_bytes("RssAnon"))
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    return most


def main(num_rows: int = 4 * MIB, num_steps: int = 500, limit_bytes: int = 256 * MIB) -> None:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        train(build(2000, MIB, Path(folder, "small")), 2)  # compiling kernels takes memory, too
        limit = memory_bytes("VmData") + limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        before = memory_bytes("RssAnon")
        try:
            nn.EmbeddingBag(num_rows, DIM)
        except RuntimeError as error:
            print(f"nn.EmbeddingBag: {str(error).splitlines()[0]}")

        bag = build(num_rows, limit_bytes // 4, Path(folder, "large"))
        peak = train(bag, num_steps) - before
    print(f"{bag.hit_rates.lookups:.0%} of the lookups found their row in memory")
    print(f"{num_rows * DIM * 4 / MIB:,.0f} MiB of rows, and as much of state, are in files")
    print(f"{peak / MIB:,.0f} MiB of memory were used for them, {limit_bytes / MIB:,.0f} allowed")


if __name__ == "__main__":
    main()
