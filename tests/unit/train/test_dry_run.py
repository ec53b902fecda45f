"""What a dry run says is what the run then takes; a dry run allocates and writes nothing."""

import os
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recsys.train import train
from recsys.train.trials import dry_run

OBSERVED = ("skip.observe.staleness.max_rows=20", "batch_size=8", "cold_tier=file")
TABLES = "synthetic.table_sizes=[900, 700, 1, 800]"


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor in memory that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        found = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        sizes = [each.nbytes for each in found if not each.is_meta]
        self.num_bytes = max([self.num_bytes, *sizes])
        return result


@pytest.mark.filterwarnings("ignore:staleness")
@pytest.mark.parametrize(
    ("settings", "fits", "in_files"),
    [
        (("budget=30KiB",), False, False),
        (("budget=30KiB", "cold_tier=file", "optimizer.name=adam"), False, True),
        (("budget=1MiB", "cold_tier=file"), False, True),
        (("budget=1MiB", "optimizer.name=rowwise_adagrad"), True, False),
        (("budget=30KiB", "schedule=fae"), False, False),
        (("budget=60KiB", "skip.observe.staleness.window=33", *OBSERVED), False, True),
        (("budget=30KiB", "model.name=dcn_v2"), False, False),
        (("embeddings=torch", "optimizer.name=adagrad"), True, False),
    ],
    ids=str,
)
def test_the_figures_are_those_of_the_run(small_config, tmp_path, settings, fits, in_files):
    config = small_config(TABLES, "checkpoint.every_steps=5", *settings)

    found = dry_run(config, tmp_path / "run")
    assert not list(tmp_path.iterdir())
    is_warned = fits and config.budget
    with pytest.warns(UserWarning, match="no cold tier") if is_warned else nullcontext():
        tiers = train(config, tmp_path / "run", show_progress=False)["tiers"]

    assert found.all_fits == (tiers is None) == fits
    assert found.disk_bytes == (found.everything_bytes if in_files else 0)
    if fits:
        assert found.fast_bytes == found.everything_bytes
    else:
        figures = found.num_slots, found.fast_bytes, found.num_rows
        assert figures == (tiers["num_slots"], tiers["hot_bytes"], tiers["num_rows"])


def test_a_terabyte_of_synthetic_tables_is_sized_without_its_memory(
    small_config, tmp_path, monkeypatch
):
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: type(real)((*real[:4], 2**50, *real[5:])))
    sizes = [80_000_000] * 26
    config = small_config(
        f"synthetic.table_sizes={sizes}",
        "model.embedding_dim=128",
        "model.dense_arch=[8, 128]",
        "budget=9GiB",
        "cold_tier=file",
        "optimizer.name=rowwise_adagrad",
    )

    with LargestTensor() as largest:
        found = dry_run(config, tmp_path / "run")

    assert found.everything_bytes == sum(sizes) * (128 * 4 + 4) == found.disk_bytes
    assert found.fast_bytes <= 9 * 2**30 < found.fast_bytes + 1024
    assert largest.num_bytes < 2**24
    assert not list(tmp_path.iterdir())
