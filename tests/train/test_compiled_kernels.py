"""No kernel is compiled, or loaded, while the clock of a run is on."""

import json
import os

import pytest

from tests.forks import Fork
from tests.train.compiled_kernels import print_needed
from tests.train.test_table_stores import RUNS
from tests.train.test_table_stores import SETTINGS as STORE_SETTINGS

SETTINGS = ("synthetic.table_sizes=[9, 7, 1, 12]", "batch_size=32", "optimizer.name=adagrad")
POLICIES = {
    "freeze_rows": (
        "skip.share=0.4",
        "skip.staleness.window=34",
        "skip.staleness.min_updates=2",
        "skip.staleness.patience=1",
        "skip.staleness.count_every=1",
    ),
    "importance": ("skip.share=0.4", "skip.importance.warm_up=0"),
}


CASES = {
    **{
        f"skip.policy={policy}": (*SETTINGS, "epochs=2", f"skip.policy={policy}", *more)
        for policy, more in POLICIES.items()
    },
    **{f"bags, {case}": (*STORE_SETTINGS, *RUNS[case]) for case in ("resident", "freeze_rows")},
    **{precision: (*SETTINGS, f"precision={precision}") for precision in ("fp32", "bf16")},
}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.in_ci("skip.policy=importance", "bags, freeze_rows", "bf16")
@pytest.mark.parametrize("case", CASES)
def test_the_first_step_compiles_no_kernel(small_settings, table_store, tmp_path, case):
    settings = [*small_settings[1::2], *CASES[case]]
    if "bags" in case:
        settings.append(f'data="{table_store()}"')

    fork = Fork(print_needed, str(tmp_path / "run"), *settings)
    printed, said = fork.end()

    assert fork.process.exitcode == 0, said
    assert json.loads(printed.splitlines()[-1]) == []
    if case.startswith("skip"):
        record = json.loads((tmp_path / "run" / "run.json").read_text())
        skipped = record["skipped"]
        assert skipped["num_skipped"] + skipped["num_lookups_left_out"] > 0
