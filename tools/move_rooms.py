"""Move the modules of recsys, and their tests, to the rooms of the architecture.

    python tools/move_rooms.py --check   say what would move and what is wrong; change nothing
    python tools/move_rooms.py           move

`MODULES` says where each module goes. Tests follow the modules they are named after; `TESTS` lists
the others. The script moves files with `git mv`, then rewrites every place that names a module:
import statements, strings such as `monkeypatch.setattr("recsys.x.y.name", ...)`, paths such as
`recsys/x/y.py` in code, docs and settings. At the end it sorts imports and formats with ruff.

A module that is neither in `MODULES` nor in `STAYS` is an error: add it to the map. A module of the
map that does not exist is skipped with a note. Run it on a clean tree, once: it does not understand
a tree that it has moved.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# From old to new, without the leading "recsys.".
MODULES = {
    # Helpers that know nothing of recommendation models.
    "files": "_support.files",
    "sizes": "_support.sizes",
    "machine": "_support.machine",
    "hashing": "_support.hashing",
    "auc": "_support.auc",
    "jit": "_support.jit",
    "config_fields": "_support.config_fields",
    "embeddings.interrupts": "_support.interrupts",
    "embeddings.memory": "_support.memory",
    "embeddings.tracing": "_support.tracing",
    # Embeddings: the rows of tables, and what a lookup of them is given.
    "embeddings.row_space": "embeddings.rows.row_space",
    "embeddings.lookups": "embeddings.rows.lookups",
    "embeddings.rounding": "embeddings.rows.rounding",
    "embeddings.kernels.ledger": "embeddings.rows.ledger",
    "embeddings.bag_input": "embeddings.rows.bag_input",
    "embeddings.table_parameter": "embeddings.rows.table_parameter",
    "embeddings.table_versions": "embeddings.rows.table_versions",
    "embeddings.exchanged_tables": "embeddings.rows.exchanged_tables",
    "embeddings.stand_in": "embeddings.rows.stand_in",
    # Kernels.
    "embeddings.kernel_choice": "embeddings.kernels.choice",
    "embeddings.kernels": "embeddings.kernels.cpu",
    "embeddings.kernels.counting": "embeddings.kernels.cpu.counting",
    "embeddings.kernels.file_moves": "embeddings.kernels.cpu.file_moves",
    "embeddings.kernels.miniature": "embeddings.kernels.cpu.miniature",
    "embeddings.kernels.one_table": "embeddings.kernels.cpu.one_table",
    "embeddings.kernels.pooled_lookup": "embeddings.kernels.cpu.pooled_lookup",
    "embeddings.kernels.rounding": "embeddings.kernels.cpu.rounding",
    "embeddings.kernels.row_moves": "embeddings.kernels.cpu.row_moves",
    "embeddings.kernels.row_sort": "embeddings.kernels.cpu.row_sort",
    "embeddings.kernels.row_update": "embeddings.kernels.cpu.row_update",
    "embeddings.kernels.slots": "embeddings.kernels.cpu.slots",
    "embeddings.kernels.tiered_lookup": "embeddings.kernels.cpu.tiered_lookup",
    "embeddings.kernels.addresses": "embeddings.kernels.cpu.intrinsics.addresses",
    "embeddings.kernels.copying": "embeddings.kernels.cpu.intrinsics.copying",
    "embeddings.kernels.prefetch": "embeddings.kernels.cpu.intrinsics.prefetch",
    "embeddings.kernels.turns": "embeddings.kernels.cpu.intrinsics.turns",
    "embeddings.torch_kernels": "embeddings.kernels.torch",
    "embeddings.torch_kernels.bags": "embeddings.kernels.torch.bags",
    "embeddings.torch_kernels.errors": "embeddings.kernels.torch.errors",
    "embeddings.torch_kernels.pooled_lookup": "embeddings.kernels.torch.pooled_lookup",
    "embeddings.torch_kernels.rounding": "embeddings.kernels.torch.rounding",
    "embeddings.torch_kernels.row_space": "embeddings.kernels.torch.row_space",
    "embeddings.torch_kernels.row_update": "embeddings.kernels.torch.row_update",
    "embeddings.torch_kernels.slot_rows": "embeddings.kernels.torch.slot_rows",
    "embeddings.torch_kernels.slots": "embeddings.kernels.torch.slots",
    # Tiers.
    "embeddings.tiers": "embeddings.tiers.table_tiers",
    "embeddings.residency": "embeddings.tiers.residency",
    "embeddings.ahead": "embeddings.tiers.ahead",
    "embeddings.claimed_ids": "embeddings.tiers.claimed_ids",
    "embeddings.budget": "embeddings.tiers.budget",
    "embeddings.slots": "embeddings.tiers.slots",
    "embeddings.slot_map": "embeddings.tiers.slot_map",
    "embeddings.hot_tier": "embeddings.tiers.hot_tier",
    "embeddings.device_slots": "embeddings.tiers.device_slots",
    "embeddings.forecast": "embeddings.tiers.forecast",
    "embeddings.transfers": "embeddings.tiers.transfers",
    "embeddings.transfer_clock": "embeddings.tiers.transfer_clock",
    "embeddings.cold_store": "embeddings.tiers.cold.host_store",
    "embeddings.file_store": "embeddings.tiers.cold.file_store",
    "embeddings.cold_files": "embeddings.tiers.cold.cold_files",
    "embeddings.staging": "embeddings.tiers.cold.staging",
    # From a ledger to updated rows.
    "embeddings.row_updater": "embeddings.update.row_updater",
    "embeddings.group_updater": "embeddings.update.group_updater",
    "embeddings.update": "embeddings.update.update",
    "embeddings.tiering": "embeddings.update.tiering",
    "embeddings.state_arrays": "embeddings.update.state_arrays",
    "embeddings.fused_optimizer": "embeddings.update.fused_optimizer",
    "embeddings.in_backward": "embeddings.update.in_backward",
    "embeddings.translate": "embeddings.update.translate",
    "embeddings.translation": "embeddings.update.translation",
    # Lookups.
    "embeddings.abstract": "embeddings.lookup.abstract",
    "embeddings.table_group": "embeddings.lookup.table_group",
    "embeddings.fused_lookup": "embeddings.lookup.fused_lookup",
    "embeddings.bag_calls": "embeddings.lookup.bag_calls",
    "embeddings.bag_lookup": "embeddings.lookup.bag_lookup",
    "embeddings.sparse_gradients": "embeddings.lookup.sparse_gradients",
    "embeddings.collection_input": "embeddings.lookup.collection_input",
    "embeddings.collection_layout": "embeddings.lookup.collection_layout",
    "embeddings.device_tables": "embeddings.lookup.device_tables",
    "embeddings.found": "embeddings.lookup.found",
    # Popularity.
    "embeddings.popularity": "embeddings.popularity.profile",
    "embeddings.profile_file": "embeddings.popularity.profile_file",
    "embeddings.row_counts": "embeddings.popularity.row_counts",
    "embeddings.lookup_blocks": "embeddings.popularity.lookup_blocks",
    "embeddings.coverage": "embeddings.popularity.coverage",
    "embeddings.rand_em": "embeddings.popularity.rand_em",
    "embeddings.plan": "embeddings.popularity.plan",
    # Data sets.
    "datasets.criteo": "datasets.criteo.kaggle",
    "datasets.criteo_days": "datasets.criteo.days",
    "datasets.criteo_flow": "datasets.criteo.flow",
    "datasets.criteo_parse": "datasets.criteo.parse",
    "datasets.criteo_shape": "datasets.criteo.shape",
    "datasets.criteo_text": "datasets.criteo.text",
    "datasets.growing_folder": "datasets.criteo.growing_folder",
    "datasets.row_numbers": "datasets.criteo.row_numbers",
    "datasets.synthetic": "datasets.synthetic.samples",
    "datasets.synthetic_config": "datasets.synthetic.config",
    "datasets.synthetic_kernel": "datasets.synthetic.kernel",
    "datasets.synthetic_parameters": "datasets.synthetic.parameters",
    "datasets.synthetic_split": "datasets.synthetic.split",
    "datasets.npy_blocks": "datasets.interchange.npy_blocks",
    "datasets.npy_store": "datasets.interchange.npy_store",
    "convert": "datasets.convert",
    # Schedules.
    "pipeline.popular_split": "pipeline.hotline.popular_split",
    "pipeline.loss_parts": "pipeline.hotline.loss_parts",
    "pipeline.hot_cold_loader": "pipeline.fae.hot_cold_loader",
    "pipeline.hot_samples": "pipeline.fae.hot_samples",
    "pipeline.shuffle_scheduler": "pipeline.fae.shuffle_scheduler",
    # Models that exist already.
    "accelerate": "conversion.accelerate",
    "accelerated": "conversion.accelerated",
    "exchange": "conversion.exchange",
    "left_alone": "conversion.left_alone",
    "embeddings.model_plan": "conversion.model_plan",
    "verify": "conversion.verify",
    # Training runs.
    "build": "train.build",
    "curves": "train.curves",
    "export": "train.export",
    "metrics": "train.metrics",
    "progress": "train.progress",
    "run_folder": "train.run_folder",
    "trainer": "train.trainer",
    "trainer_process": "train.trainer_process",
    "verify_tiers": "train.verify_tiers",
    "embeddings.providers": "train.providers",
    "embeddings.tier_report": "train.tier_report",
    # What is made of runs.
    "report": "report.summary",
    "report_page": "report.page",
    "ablate_table": "report.ablation_table",
    "ablate": "ablate.run",
    "ablate_config": "ablate.config",
    "cli": "cli.commands",
    "cli_data": "cli.data",
    "cli_popularity": "cli.popularity",
    # Benchmarks: each of them one file; in `parts`, what they are made of.
    "bench.bare_kernels": "bench.parts.bare_kernels",
    "bench.disk": "bench.parts.disk",
    "bench.file_tier_rows": "bench.parts.file_tier_rows",
    "bench.harness": "bench.parts.harness",
    "bench.plain_models": "bench.parts.plain_models",
    "bench.scheduled": "bench.parts.scheduled",
    "bench.tiers_curve": "bench.parts.tiers_curve",
    "bench.touched_rows": "bench.parts.touched_rows",
    "bench.worker": "bench.parts.worker",
}

# Every module of these packages has to be in `MODULES` or in `STAYS`.
OLD_ROOMS = {
    "recsys",
    "recsys.bench",
    "recsys.datasets",
    "recsys.embeddings",
    "recsys.embeddings.kernels",
    "recsys.embeddings.torch_kernels",
    "recsys.models",
    "recsys.pipeline",
}
STAYS = {
    "",
    "_support",
    "_version",
    "batch",
    "config",
    "config_schedule",
    "errors",
    "bench",
    "bench.counting",
    "bench.file_tier",
    "bench.lookup",
    "bench.models",
    "bench.prepare",
    "bench.rand_em",
    "bench.step",
    "bench.synthetic",
    "bench.tiers",
    "datasets",
    "datasets.classic_npz",
    "datasets.iteration",
    "datasets.loader",
    "datasets.read_ahead",
    "datasets.source",
    "datasets.store",
    "datasets.torchrec_npy",
    "embeddings",
    "embeddings.attach",
    "embeddings.bag",
    "embeddings.baselines",
    "embeddings.collection",
    "embeddings.embedding",
    "embeddings.embedding_collection",
    "embeddings.optimizer",
    "embeddings.table",
    "embeddings.table_module",
    "models",
    "models.convert",
    "models.dlrm",
    "models.interaction",
    "models.linear",
    "pipeline",
    "pipeline.auto",
    "pipeline.inputs",
    "pipeline.micro_batches",
    "pipeline.schedule",
    "pipeline.stalls",
    "pipeline.suggestions",
    "pipeline.timeline",
    "pipeline.train_pipeline",
    "pipeline.ways_out",
    "pipeline.window",
}

# Files beside modules.
DATA = {
    "recsys/py.typed": "recsys/py.typed",
    "recsys/report_page.html": "recsys/report/page.html",
}

# Definitions that leave a module for a new one, whose old name is the key: the file they leave,
# their names in it and in the new module, and the new module's docstring. `NAMES` and `EDITS` see
# to imports of them. A new module that exists already is left as it is.
DEFINITIONS = {
    "auc": (
        "recsys/metrics.py",
        {
            "auc": "auc",
            "_count_by_score": "count_by_score",
            "_area": "area_under_curve",
            "_twice_below": "twice_below",
            "_sum_of_products": "sum_of_products",
            "_is_positive": "are_positive",
            "_require_same_length": "require_same_length",
        },
        '''"""The exact area under the ROC curve.

Samples are counted by score, and pairs of samples in integers.
"""''',
    ),
    "embeddings.lookups": (
        "recsys/embeddings/kernels/pooled_lookup.py",
        {name: name for name in ("Lookups", "Bags", "counts_up")},
        '''"""Input of a lookup: which feature is looked up in which table, and ids as bags.

The kernels of every kind of device take these.

Letters: B samples, F features, L lookups (a feature in a table), N rows looked up, W columns of the
output.
"""''',
    ),
    "embeddings.rounding": (
        "recsys/embeddings/kernels/rounding.py",
        {
            "_MASK": "_MASK",
            "_GOLDEN": "GOLDEN",
            "_FACTOR1": "FACTOR1",
            "_FACTOR2": "FACTOR2",
            "_INFINITY": "INFINITY",
            "_LARGEST_BFLOAT16": "LARGEST_BFLOAT16",
            "_LARGEST_FLOAT16": "LARGEST_FLOAT16",
            "_NORMAL_FLOAT16": "NORMAL_FLOAT16",
            "_REBIAS": "REBIAS",
            "table_key": "table_key",
            "fold": "fold",
            "round_reference": "round_reference",
            "round_by": "round_by",
        },
        '''"""Rounding to 16 bits: a reference in plain PyTorch, and the hash that draws.

The kernel and the rule are in `recsys.embeddings.kernels.rounding`.
"""''',
    ),
    "datasets.synthetic_config": (
        "recsys/config.py",
        {
            "_SYNTHETIC_SPLITS": "_SPLITS",
            "_MAX_DRIFT": "_MAX_DRIFT",
            "SyntheticConfig": "SyntheticConfig",
        },
        '"""The keys of `synthetic`: the shape of synthetic data."""',
    ),
}

# Names that left a module by `DEFINITIONS` and that it no longer offers: every import of them goes
# to the module that has them now.
NAMES = {
    "embeddings.kernels.pooled_lookup": {
        "Bags": "embeddings.rows.lookups",
        "Lookups": "embeddings.rows.lookups",
        "counts_up": "embeddings.rows.lookups",
    },
    "embeddings.kernels.rounding": {
        "fold": "embeddings.rows.rounding",
        "round_by": "embeddings.rows.rounding",
        "round_reference": "embeddings.rows.rounding",
        "table_key": "embeddings.rows.rounding",
    },
}

# The first lines of the new rooms; more than a docstring where a room offers a name itself.
ROOMS = {
    "_support": '"""Helpers that know nothing of recommendation models."""\n',
    "ablate": '''"""Ablations: one configuration in variations, each trained with several seeds."""

from recsys.ablate.run import ablate

__all__ = ["ablate"]
''',
    "bench.parts": '"""What benchmarks are made of."""\n',
    "cli": '''"""The command line: `recsys`, or `python -m recsys.cli`."""

from recsys.cli.commands import main

__all__ = ["main"]
''',
    "conversion": '"""Models that exist already: accelerated, restored, verified."""\n',
    "datasets.criteo": '"""Raw files of Criteo Kaggle and Criteo 1TB."""\n',
    "datasets.interchange": '"""Arrays in files of other programs, and stores made from them."""\n',
    "datasets.synthetic": '"""Synthetic samples in the shape of Criteo Kaggle\'s."""\n',
    "embeddings.kernels": '"""Kernels: a folder per kind of device, the same names in each."""\n',
    "embeddings.kernels.cpu.intrinsics": (
        '"""What kernels for the CPU share: addresses, copies, prefetches, turns."""\n'
    ),
    "embeddings.lookup": '"""Lookups: from ids to pooled vectors, from gradients to ledgers."""\n',
    "embeddings.popularity": '"""How often each row is looked up, and which rows stay hot."""\n',
    "embeddings.rows": '"""Rows of tables and the data that all kernels share."""\n',
    "embeddings.tiers": '"""Hot and cold tiers: where a row is, and how it gets there."""\n',
    "embeddings.tiers.cold": '"""Cold stores: every row and its state, in slower memory."""\n',
    "embeddings.update": '"""Updates: from a ledger and settings to updated rows."""\n',
    "pipeline.fae": '"""FAE: mini-batches of hot samples alone, and of others alone."""\n',
    "pipeline.hotline": '"""Hotline: popular samples of a mini-batch first."""\n',
    "report": '"""Results of runs and of ablations as a person reads them."""\n',
    "train": '"""Training runs: from a configuration to a folder of results."""\n',
}
MORE_FILES = {
    "recsys/cli/__main__.py": '''"""`python -m recsys.cli`."""

from recsys.cli.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
''',
}

# Names that go on to mean what they meant, outside of imports: functions that are called as a
# module was, and what the packages of `ROOMS` offer. The bare name of a room stays, too.
KEPT = {"accelerate", "verify", "ablate.ablate", "cli.main"}

# Tests that are not named after one module: the folder that they go to, "." for where they are.
TESTS = {
    "tests/test_docs.py": ".",
    "tests/test_larger_than_memory.py": ".",
    "tests/test_public.py": ".",
    "tests/test_users.py": ".",
    "tests/users.py": ".",
    "tests/typing_probe.py": ".",
    "tests/convergence/test_accelerate.py": ".",
    "tests/convergence/test_criteo_kaggle.py": ".",
    "tests/pipeline/stress.py": ".",
    "tests/pipeline/test_bag_modes.py": ".",
    "tests/pipeline/test_exactness.py": ".",
    "tests/pipeline/test_hotline.py": "tests/pipeline/hotline",
    "tests/pipeline/test_positions.py": ".",
    "tests/pipeline/test_stress.py": ".",
    "tests/embeddings/test_cold_marks.py": "tests/embeddings/tiers/cold",
    "tests/embeddings/test_copies_of_parts.py": "tests/embeddings/lookup",
    "tests/embeddings/test_copies_of_tiers.py": "tests/embeddings/tiers",
    "tests/embeddings/test_counting.py": "tests/embeddings/kernels/cpu",
    "tests/embeddings/test_device.py": "tests/embeddings/lookup",
    "tests/embeddings/test_exchanged_tables.py": "tests/embeddings/lookup",
    "tests/embeddings/test_failed_update.py": "tests/embeddings/update",
    "tests/embeddings/test_file_tier.py": "tests/embeddings/tiers/cold",
    "tests/embeddings/test_foreign_writes.py": "tests/embeddings/tiers",
    "tests/embeddings/test_half_precision.py": ".",
    "tests/embeddings/test_killed.py": "tests/embeddings/tiers/cold",
    "tests/embeddings/test_ledger_grad.py": "tests/embeddings/lookup",
    "tests/embeddings/test_memory.py": "tests/embeddings/lookup",
    "tests/embeddings/test_non_finite.py": "tests/embeddings/update",
    "tests/embeddings/test_scale_grad_by_freq.py": "tests/embeddings/lookup",
    "tests/embeddings/test_split_claims.py": "tests/embeddings/tiers",
    "tests/embeddings/test_tied_tables.py": "tests/embeddings/update",
    "tests/embeddings/test_tiered_bag.py": "tests/embeddings/tiers",
    "tests/embeddings/test_tiered_lookup.py": "tests/embeddings/kernels/cpu",
    "tests/embeddings/test_tiers_on_device.py": "tests/embeddings/tiers",
    "tests/embeddings/test_torch_path.py": "tests/embeddings/lookup",
    "tests/embeddings/test_tracing.py": ".",  # of embeddings in a model that is traced
    "tests/embeddings/test_transfer_stream.py": "tests/embeddings/tiers",
    "tests/embeddings/training_to_kill.py": "tests/embeddings/tiers/cold",
    "tests/embeddings/torch_kernels/conftest.py": "tests/embeddings/kernels/torch",
}

# Text that says something other than a module's name of what has moved: file, old, new. The file is
# named as before; a text that is not there is skipped with a note.
EDITS = [
    (  # a package's root is a folder further up
        "recsys/machine.py",
        "Path(__file__).resolve().parent.parent\n",
        "Path(__file__).resolve().parents[2]\n",
    ),
    (
        "tests/test_machine.py",
        'tmp_path / "recsys" / "machine.py"',
        'tmp_path / "recsys" / "_support" / "machine.py"',
    ),
    (  # embeddings know no configuration
        "recsys/embeddings/cold_files.py",
        "from recsys.config import COLD_TIERS\n",
        "",
    ),
    (
        "recsys/embeddings/cold_files.py",
        re.compile(r"(__all__ = \[)([^\]]*\]\n)"),
        r'\1"COLD_TIERS", \2\nCOLD_TIERS = ("host", "file")\n',
    ),
    (
        "recsys/config.py",
        'COLD_TIERS = ("host", "file")\n',
        "",
    ),
    (
        "recsys/config.py",
        "from recsys.config_schedule import ScheduleConfig\n",
        "from recsys.config_schedule import ScheduleConfig\n"
        "from recsys.embeddings.cold_files import COLD_TIERS\n",
    ),
    (  # nor its metrics
        "recsys/datasets/synthetic.py",
        "from recsys.metrics import auc\n",
        "from recsys.auc import auc\n",
    ),
    (
        "recsys/metrics.py",
        "    if scores.shape != labels.shape or scores.ndim != 1:\n",
        '    """Raise ValueError unless both arrays have one dimension and the same length."""\n'
        "    if scores.shape != labels.shape or scores.ndim != 1:\n",
    ),
    (
        "tests/test_metrics.py",
        "from recsys.metrics import MetricsAccumulator, _area, auc,",
        "from recsys.auc import area_under_curve\n"
        "from recsys.metrics import MetricsAccumulator, auc,",
    ),
    ("tests/test_metrics.py", "found = _area(", "found = area_under_curve("),
    (
        "tests/embeddings/torch_kernels/test_rounding.py",
        "from recsys.embeddings.kernels import rounding as numba\n",
        "from recsys.embeddings import rounding as reference\n",
    ),
    ("tests/embeddings/torch_kernels/test_rounding.py", "numba.", "reference."),
    (  # data sets know no configuration of training
        "recsys/datasets/synthetic.py",
        "from recsys.config import SyntheticConfig\n",
        "from recsys.datasets.synthetic_config import SyntheticConfig\n",
    ),
    (
        "recsys/datasets/synthetic_parameters.py",
        "from recsys.config import SyntheticConfig\n",
        "from recsys.datasets.synthetic_config import SyntheticConfig\n",
    ),
    ("recsys/report_page.py", "`report_page.html`", "`page.html`"),
    (  # or the line would be too long
        "recsys/trainer_process.py",
        "as in `recsys.trainer.train`: the first",
        "as in `trainer.train`: the first",
    ),
    (
        "recsys/embeddings/__init__.py",
        re.compile(r'\A"""(?:.|\n)*?"""'),
        '''"""Embedding tables, and the modules that look up and update their rows.

    bag, embedding, collection, embedding_collection
                   the modules that users build, of tables (`table`); `optimizer` has the formulas
                   that update rows, `baselines` the same modules by PyTorch and FBGEMM
    popularity/    how often each row is looked up, and which rows stay hot
    lookup/        from ids to pooled vectors, and from gradients to the ledger
    update/        from a ledger and the settings of an optimizer to updated rows
    tiers/         which row is in which slot, and its way from and to the cold store
    kernels/       what is done to rows: on the CPU by numba (cpu), elsewhere by torch (torch)
    rows/          the data that all kernels share

A room imports the rooms below it, never one above it. A resident table takes none of the tiers'
path; a tiered one goes through the same kernels, with slots for rows.
"""''',
    ),
    (
        "docs/architecture.md",
        re.compile(r"embeddings/tiers/stores/(\w+\.py \(\w+\))"),
        r"embeddings/tiers/cold/\1  ",
    ),
    ("pyproject.toml", '"recsys/cli*.py"', '"recsys/cli/**"'),
    ("Makefile", re.compile(r'(make check .*mypy)"'), r'\1, import-linter"'),
    ("Makefile", "\t$(BIN)/mypy\n", "\t$(BIN)/mypy\n\t$(BIN)/lint-imports --no-logo --no-cache\n"),
    (
        ".pre-commit-config.yaml",
        "  - repo: https://",
        """      - id: lint-imports
        name: lint-imports
        entry: .venv/bin/lint-imports --no-logo --no-cache
        language: system
        types: [python]
        pass_filenames: false
  - repo: https://""",
    ),
    ("CONTRIBUTING.md", "(ruff, formatting, mypy)", "(ruff, formatting, mypy, import-linter)"),
]

MAX_FILES, MAX_LINES = 12, 500
# Files that are read and rewritten, by the ends of their names.
_TEXTS = (".py", ".md", ".toml", ".sh", ".yaml", ".yml", ".cfg", "Makefile", "run")
_LEFT = ("tools/move_rooms.py",)
_NAME = re.compile(r"(?<![\w./\0])recsys((?:\.[A-Za-z_]\w*)+)")
_MARK = "\0recsys"  # a new name while old ones are being rewritten


def main() -> int:
    """Check, then move."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    root = Path(_git("rev-parse", "--show-toplevel").strip())
    mover = Mover(root, _git("ls-files", "-z", cwd=root).split("\0")[:-1])
    mover.plan()
    for note in mover.notes:
        print("note:", note)
    for error in mover.errors:
        print("error:", error, file=sys.stderr)
    if mover.errors:
        return 1
    print(f"{len(mover.moves)} files move, {len(mover.new_files)} files are new")
    if options.check:
        return 0
    if _git("status", "--porcelain", cwd=root).strip():
        print("error: the tree has changes; commit or stash them first", file=sys.stderr)
        return 1
    mover.move()
    return tidy(root)


class Mover:
    """What moves where, and what every file says after it.

    Args:
        root: Of the repository.
        files: All that git tracks.

    Attributes:
        moves: From old path to new.
        new_files: Path to content.
        errors: Why it cannot be done.
        notes: What may surprise.
    """

    def __init__(self, root: Path, files: list[str]) -> None:
        self.root, self.files = root, files
        self.moves: dict[str, str] = {}
        self.new_files: dict[str, str] = dict(MORE_FILES)
        self.errors: list[str] = []
        self.notes: list[str] = []
        # From old to new, whole names; filled by `plan`.
        self._modules: dict[str, str] = {}

    def plan(self) -> None:
        """Work out what moves; errors and notes are in the attributes afterwards."""
        modules = {_module_of(file): file for file in self.files if _is_source(file)}
        for old, new in MODULES.items():
            file = modules.get(f"recsys.{old}")
            if file is None and old not in DEFINITIONS:
                self.notes.append(f"recsys.{old} does not exist; its line of the map is not needed")
                continue
            self._modules[f"recsys.{old}"] = f"recsys.{new}"
            if file is None:
                continue
            is_package = file.endswith("/__init__.py")
            self.moves[file] = _path_of(f"recsys.{new}", is_package=is_package)
        known = {f"recsys.{each}".rstrip(".") for each in STAYS} | set(self._modules)
        for module in sorted(set(modules) - known):
            if module.rpartition(".")[0] in OLD_ROOMS:
                self.errors.append(f"{modules[module]} is not in the map; add it to the map")
        for file in self.files:
            if file.startswith("recsys/") and not file.endswith(".py"):
                if file not in DATA:
                    self.errors.append(f"{file} is not in DATA; say there where it goes")
                elif DATA[file] != file:
                    self.moves[file] = DATA[file]
        for room, text in ROOMS.items():
            path = _path_of(f"recsys.{room}", is_package=True)
            if path not in self.files or path in self.moves:
                self.new_files[path] = text
        self._plan_tests()
        self._check_targets()
        self._check_folders()

    def _plan_tests(self) -> None:
        for file in self.files:
            if not file.startswith("tests/") or not file.endswith(".py"):
                continue
            target = TESTS.get(file) or self._follow(file)
            if target is None:
                self.errors.append(
                    f"{file} is named after no module of the map; add it to TESTS, with '.' if it "
                    "stays where it is"
                )
            elif target != ".":
                name = target if target.endswith(".py") else f"{target}/{Path(file).name}"
                if name != file:
                    self.moves[file] = name
        for file in TESTS:
            if file not in self.files:
                self.notes.append(f"{file} does not exist; its line of TESTS is not needed")

    def _follow(self, file: str) -> str | None:
        """Where the test of a module goes; None if it is named after none."""
        folder, name = Path(file).parent, Path(file).stem
        if name == "conftest":
            return "."
        place = ".".join(("recsys", *folder.parts[1:]))
        words = name.removeprefix("test_").split("_")
        for end in range(len(words), 0, -1):
            module = f"{place}.{'_'.join(words[:end])}"
            if module in self._modules:
                *rooms, stem = self._modules[module].split(".")[1:]
                return "/".join(["tests", *rooms, "_".join(["test", stem, *words[end:]]) + ".py"])
            is_known = module.removeprefix("recsys.") in STAYS
            if is_known or (self.root / _path_of(module)).is_file():
                return "."
        return None

    def _check_targets(self) -> None:
        taken = Counter(self.moves.values())
        taken.update(set(self.files) - set(self.moves))
        for old, new in self.moves.items():
            if taken[new] > 1:
                self.errors.append(f"{old} would be moved over another file, {new}")
        for new in (*self.moves.values(), *self.new_files):
            if _is_ignored(self.root, new):
                self.errors.append(f"{new} would be ignored by git, and by ruff; see .gitignore")

    def _check_folders(self) -> None:
        sources = [self.moves.get(file, file) for file in self.files if _is_source(file)]
        sources += [file for file in self.new_files if file.startswith("recsys/")]
        for folder, count in Counter(str(Path(file).parent) for file in sources).items():
            if count > MAX_FILES:
                self.notes.append(f"{folder} will have {count} files beside each other")
        for file in self.files:
            if _is_source(file):
                count = len((self.root / file).read_text().splitlines())
                if count > MAX_LINES:
                    self.notes.append(f"{file} has {count} lines")

    def move(self) -> None:
        """Move the files, and rewrite what names them."""
        texts = {}
        for file in self.files:
            path = self.root / file
            is_text = path.name.endswith(_TEXTS) and not any(map(Path(file).match, _LEFT))
            if is_text and not path.is_symlink():
                texts[file] = path.read_text()
        for file, old, new in EDITS:
            pattern = old if isinstance(old, re.Pattern) else re.compile(re.escape(old))
            replacement = new if isinstance(old, re.Pattern) else new.replace("\\", r"\\")
            text, count = pattern.subn(replacement, texts.get(file, ""))
            if count:
                texts[file] = text
            else:
                print(f"note: {file} does not say {pattern.pattern!r}; an edit was skipped")
        for module, (file, names, docstring) in DEFINITIONS.items():
            if _path_of(f"recsys.{module}") in self.files:
                continue
            texts[file], text = _cut_out(texts[file], names, f"recsys.{module}", docstring)
            new = _path_of(self._modules[f"recsys.{module}"])
            self.new_files[new] = self._rewrite(_path_of(f"recsys.{module}"), text)
        for file, text in texts.items():
            texts[file] = self._rewrite(file, text)
        # By way of other names: one file may go where another one was.
        for number, (old, new) in enumerate(self.moves.items()):
            (self.root / new).parent.mkdir(parents=True, exist_ok=True)
            _git("mv", old, f"moving-{number}", cwd=self.root)
        for number, new in enumerate(self.moves.values()):
            (self.root / new).parent.mkdir(parents=True, exist_ok=True)
            _git("mv", f"moving-{number}", new, cwd=self.root)
        for file, text in texts.items():
            (self.root / self.moves.get(file, file)).write_text(text)
        for file, text in self.new_files.items():
            path = self.root / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for folder in {self.root / Path(old).parent for old in self.moves}:
            if folder.is_dir() and {each.name for each in folder.iterdir()} <= {"__pycache__"}:
                shutil.rmtree(folder)
        _git("add", "-A", "--", "recsys", "tests", cwd=self.root)

    def _rewrite(self, file: str, text: str) -> str:
        if file.endswith(".py"):
            text = self._rewrite_statements(file, text)
        text = _NAME.sub(lambda found: self._new_name(found, text), text)
        text = re.sub(
            r"(?<=`)(kernels|torch_kernels)\.[a-z_]+",
            lambda found: self._tail(found[0], "recsys.embeddings.", "recsys.embeddings.kernels."),
            text,
        )
        text = re.sub(
            r"(?<![\w/])(recsys|tests)/[\w/]+\.py\b",
            lambda found: self.moves.get(found[0], found[0]),
            text,
        )
        return text.replace(_MARK, "recsys")

    def _new_name(self, found: re.Match[str], text: str) -> str:
        name = found[0]
        parts = name.split(".")
        for end in range(len(parts), 1, -1):
            old = ".".join(parts[:end])
            if old not in self._modules:
                continue
            rest = parts[end:]
            line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
            is_import = re.fullmatch(r"\s*(from|import) +", line) is not None
            if not is_import and self._is_kept(old, rest):
                return name
            return ".".join([self._modules[old].replace("recsys", _MARK, 1), *rest])
        return name

    @staticmethod
    def _is_kept(module: str, rest: list[str]) -> bool:
        """Whether a module's name, and what is asked of it, still means the same."""
        old = module.removeprefix("recsys.")
        if not rest:
            return old in KEPT or old in ROOMS
        if old in KEPT:
            return rest[0].startswith("__")  # of the function
        return f"{old}.{rest[0]}" in KEPT

    def _tail(self, tail: str, prefix: str, new_prefix: str = "") -> str:
        """A module's name without a prefix, as it is afterwards; as before where that is none."""
        parts = tail.split(".")
        for end in range(len(parts), 0, -1):
            new = self._modules.get(prefix + ".".join(parts[:end]))
            for each in (new_prefix, prefix):
                if new is not None and each and new.startswith(each):
                    return ".".join([new.removeprefix(each), *parts[end:]])
        return tail

    def _rewrite_statements(self, file: str, text: str) -> str:
        """Imports of modules from packages, of moved names, and names that f-strings make."""
        tree = ast.parse(text)
        lines = text.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        changes: list[tuple[int, int, str]] = []

        def place(line: int, column: int) -> int:
            return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

        def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            return (
                place(node.lineno, node.col_offset),
                place(node.end_lineno, node.end_col_offset),
            )

        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                new = self._split_import(node)
                if new is not None:
                    changes.append((*span(node), ("\n" + " " * node.col_offset).join(new)))
            elif isinstance(node, (ast.Expr, ast.Assign, ast.For)):
                changes += [
                    (*span(each), f'"{new}"') for each, new in self._completed_names(node).items()
                ]
        for begin, end, new_text in sorted(set(changes), reverse=True):
            text = text[:begin] + new_text + text[end:]
        for name in NAMES.get(_module_of(file).removeprefix("recsys."), {}):
            text = re.sub(rf'(__all__ = \[[^\]]*?)"{name}",?\s*', r"\1", text, count=1)
        return text

    def _split_import(self, node: ast.ImportFrom) -> list[str] | None:
        """An import of modules, or of names that are elsewhere now, in new statements."""
        package = node.module or ""
        if package.split(".")[0] != "recsys":
            return None
        left, new = [], []
        names = NAMES.get(package.removeprefix("recsys."), {})
        for alias in node.names:
            module = self._modules.get(f"{package}.{alias.name}")
            suffix = f" as {alias.asname}" if alias.asname else ""
            if alias.name in names:
                new.append(f"from {_MARK}.{names[alias.name]} import {alias.name}{suffix}")
            elif module is not None and (package != "recsys" or alias.name not in KEPT):
                room, _, stem = module.rpartition(".")
                if stem != alias.name and not suffix:
                    suffix = f" as {alias.name}"
                new.append(f"from {room.replace('recsys', _MARK, 1)} import {stem}{suffix}")
            else:
                left.append(alias.name + suffix)
        if not new:
            return None
        if left:
            new.insert(0, f"from {package} import {', '.join(left)}")
        return new

    def _completed_names(self, statement: ast.stmt) -> dict[ast.Constant, str]:
        """Strings of a statement that an f-string of it makes the end of a module's name."""
        prefixes = set()
        strings = []
        for node in ast.walk(statement):
            if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                prefix = str(node.values[0].value)
                if re.fullmatch(r"recsys\.([a-z_]+\.)*", prefix):
                    prefixes.add(prefix)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node)
        found = {}
        for prefix in prefixes:
            for node in strings:
                tail = self._tail(node.value, prefix)
                if tail != node.value:
                    found[node] = tail
        return found


def _is_source(file: str) -> bool:
    return file.startswith("recsys/") and file.endswith(".py")


def _module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _path_of(module: str, *, is_package: bool = False) -> str:
    return module.replace(".", "/") + ("/__init__.py" if is_package else ".py")


def _cut_out(text: str, names: dict[str, str], module: str, docstring: str) -> tuple[str, str]:
    """What is left of a module without some definitions, and a new module of them.

    Both have all imports of the old one; ruff takes away those that are not needed.
    """
    for old, new in names.items():
        text = re.sub(rf"(?<![\w.\"]){old}\b", new, text)
    lines = text.splitlines(keepends=True)
    imports, cut = [], []
    for node in ast.parse(text).body:
        first = node.lineno - 1
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.decorator_list:
            first = node.decorator_list[0].lineno - 1
        while lines[first - 1].startswith("#"):
            first -= 1
        is_imports = isinstance(node, ast.Import | ast.ImportFrom | ast.If)
        if is_imports or _names_of(node) & set(names.values()):
            (imports if is_imports else cut).append((first, node.end_lineno))
    public = sorted(name for name in names.values() if not name.startswith("_"))
    new_lines = [docstring, "\n\n", *("".join(lines[slice(*span)]) for span in imports)]
    new_lines.append(f"\n__all__ = {public!r}\n\n")
    new_lines += ["".join(lines[slice(*span)]) for span in cut]
    left = "".join(line for number, line in enumerate(lines) if not _is_in(number, cut))
    place = lines[imports[-1][0]]
    statement = f"from {module} import {', '.join(public)}\n"
    return left.replace(place, statement + place, 1), "".join(new_lines)


def _names_of(node: ast.stmt) -> set[str]:
    """What a statement at the top of a module defines."""
    if isinstance(node, ast.Assign):
        return {each.id for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name)}
    return {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef) else set()


def _is_in(number: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(begin <= number < end for begin, end in spans)


def _is_ignored(root: Path, file: str) -> bool:
    command = ["git", "check-ignore", "--quiet", "--no-index", file]
    return subprocess.run(command, cwd=root, check=False).returncode == 0


def tidy(root: Path) -> int:
    """Sort imports and format; whether ruff finds nothing more."""
    beside = Path(sys.executable).with_name("ruff")
    ruff = str(beside) if beside.is_file() else shutil.which("ruff")
    if ruff is None:
        print("note: no ruff here; run `ruff check --fix .` and `ruff format .`")
        return 0
    # What a module no longer offers it may need for annotations alone (TC).
    for options in (["--fix"], ["--select", "TC", "--fix", "--unsafe-fixes"], ["--fix"]):
        command = [ruff, "check", *options, "--exit-zero", "."]
        subprocess.run(command, cwd=root, check=True, capture_output=True)
    subprocess.run([ruff, "format", "--quiet", "."], cwd=root, check=True)
    return subprocess.run([ruff, "check", "."], cwd=root, check=False).returncode


def _git(*arguments: str, cwd: Path | None = None) -> str:
    done = subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
