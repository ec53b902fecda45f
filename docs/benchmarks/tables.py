"""Makes the tables and curves in the docs from the JSON that commands wrote; see `make tables`.

A table is between two comments, `<!-- table: NAME -->` and `<!-- end -->`. NAME is a key of
`TABLES`. A test fails if a table differs from its JSON.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from table_cells import RECORDS
from tables_of_benches import (
    count_table,
    facebook_table,
    generator_table,
    lookup_headline_table,
    lookup_summary_table,
    lookup_table,
    models_table,
    prepare_table,
    step_table,
)
from tables_of_distributed import (
    distributed_collectives_table,
    distributed_model_table,
    distributed_table,
    processes_table,
)
from tables_of_frameworks import frameworks_table
from tables_of_fuzz import fuzz_table
from tables_of_gpu import gpu_table, host_rows_table
from tables_of_hotline import hotline_table
from tables_of_models import compared_table, days_table, quantized_table
from tables_of_own_data import (
    clicks_table,
    predict_table,
    rankings_table,
    table_prepare_table,
)
from tables_of_reliability import checkpoints_table, crash_table, threads_table
from tables_of_runs import (
    ablate_table,
    last_batch_table,
    reached_table,
    reference_table,
    schedules_table,
    synthetic_table,
)
from tables_of_samples import continuation_table, coverage_table, planted_table, rand_em_table
from tables_of_slipstream import (
    bytes_table,
    following_table,
    late_table,
    popular_table,
    random_table,
    seeds_table,
    skipping_table,
    write_policies,
)
from tables_of_tiers import tiers_file_table, tiers_table

from recsys.bench.parts.tiers_curve import write_curve

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CURVES", "DOCUMENTS", "TABLES", "with_tables"]

_ROOT = RECORDS.parent.parent
DOCUMENTS = (
    "README.md",
    "docs/ablation.md",
    "docs/benchmarks.md",
    "docs/distributed.md",
    "docs/frameworks.md",
    "docs/models.md",
    "docs/popularity.md",
    "docs/reliability.md",
    "docs/schedules.md",
    "docs/slipstream.md",
    "docs/synthetic.md",
    "docs/tables.md",
)
CURVES = ("tiers.json",)
# Files of results of skipping: whether nothing ran beside their cells, so that times compare.
SKIPPING = {
    "slipstream_goal": True,
    "slipstream_goal_35": True,
    "slipstream_synthetic": True,
    "slipstream_drift": False,
    "slipstream_real": False,
}
_NOT_MEASURED = "Not measured yet.\n"
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """Replace the tables of a document by new ones; a table without its JSON says so."""
    return _PLACE.sub(lambda place: place[1] + _table(place[2]) + place[3], text)


def _table(name: str) -> str:
    try:
        return TABLES[name]()
    except FileNotFoundError:
        return _NOT_MEASURED


TABLES: dict[str, Callable[[], str]] = {
    "ablate_embeddings": partial(ablate_table, "ablate_embeddings.json"),
    "checkpoints": partial(checkpoints_table, "checkpoints.json"),
    "crash": partial(crash_table, "crash.json"),
    "threads": partial(threads_table, "threads.json"),
    "count": partial(count_table, "count.json"),
    "rand_em": partial(rand_em_table, "rand_em.json"),
    "ablate_precision": partial(ablate_table, "ablate_precision.json"),
    "ablate_schedules": partial(schedules_table, "ablate_schedules.json"),
    "distributed": partial(distributed_table, "distributed.json"),
    "distributed_collectives": partial(distributed_collectives_table, "distributed.json"),
    "distributed_model": partial(distributed_model_table, "distributed.json"),
    "frameworks": frameworks_table,
    "fuzz": fuzz_table,
    "generator": partial(generator_table, "generator.json"),
    "gpu": partial(gpu_table, "gpu.json"),
    "gpu_first": partial(gpu_table, "gpu_first.json"),
    "gpu_h200": partial(gpu_table, "gpu_h200.json"),
    "gpu_rows": partial(host_rows_table, "gpu_shares.json"),
    "gpu_shares": partial(gpu_table, "gpu_shares.json"),
    "hotline": partial(hotline_table, "hotline.json"),
    "last_batch": partial(last_batch_table, "last_batch.json"),
    "lookup": partial(lookup_table, "lookup.json"),
    "models": partial(models_table, "models.json"),
    "models_budget": partial(models_table, "models_budget.json"),
    "models_gpu": partial(models_table, "models_gpu.json"),
    "models_evaluation": partial(models_table, "models_evaluation.json"),
    "models_real": partial(compared_table, "models_real.json"),
    "models_drift": partial(compared_table, "models_drift.json"),
    "models_drift_days": partial(days_table, "models_drift.json"),
    "several_processes": partial(processes_table, "several_processes.json"),
    "quantized": partial(quantized_table, "quantized.json"),
    "sequences": partial(compared_table, "sequences.json"),
    "sequences_real": partial(compared_table, "sequences_real.json", metric="recall_at_k"),
    "facebook_dlrm": partial(facebook_table, "facebook_dlrm.json"),
    "lookup_headline": partial(lookup_headline_table, "lookup.json"),
    "lookup_summary": partial(lookup_summary_table, "lookup.json"),
    "prepare": partial(prepare_table, "prepare.json"),
    "prepare_kaggle_size": partial(prepare_table, "prepare_kaggle_size.json"),
    "prepare_table": partial(table_prepare_table, "prepare_table.json"),
    "predict": partial(predict_table, "predict.json"),
    "clicks": partial(clicks_table, "own_data.json"),
    "rankings": partial(rankings_table, "own_data.json"),
    "reference": partial(reference_table, "reference"),
    "step": partial(step_table, "step.json"),
    "synthetic": partial(synthetic_table, "synthetic.json"),
    "tiers": partial(tiers_table, "tiers.json"),
    "tiers_file": partial(tiers_file_table, "tiers_file.json"),
    "coverage": partial(coverage_table, "synthetic_coverage.json"),
    "continuation": partial(continuation_table, "synthetic_coverage.json"),
    "planted": partial(planted_table, "synthetic_coverage.json"),
    "reached": partial(reached_table, "synthetic_reached.json"),
    "skipping": partial(following_table, "skipping.json"),
    **{
        name: partial(skipping_table, f"{name}.json", has_times=has_times)
        for name, has_times in SKIPPING.items()
    },
    **{
        f"{name}_random": partial(random_table, f"{name}.json", has_times=has_times)
        for name, has_times in SKIPPING.items()
    },
    **{f"{name}_popular": partial(popular_table, f"{name}.json") for name in SKIPPING},
    "slipstream_goal_seeds": partial(seeds_table, "slipstream_goal.json", without=(14,)),
    "slipstream_goal_35_seeds": partial(seeds_table, "slipstream_goal_35.json", without=(22,)),
    "slipstream_bytes": partial(bytes_table, "slipstream_bytes.json"),
    "slipstream_preferences": partial(late_table, "slipstream_preferences.json"),
}


if __name__ == "__main__":
    for name in DOCUMENTS:
        document = _ROOT / name
        document.write_text(with_tables(document.read_text()))
    for name in CURVES:
        write_curve(RECORDS / name)
    for name, has_times in SKIPPING.items():
        if has_times and (RECORDS / f"{name}.json").is_file():
            write_policies(RECORDS / f"{name}.json")
