"""Makes the tables in the docs from the JSON that benchmarks wrote; `make tables` calls it.

A table is between two comments, `<!-- table: NAME -->` and `<!-- end -->`. NAME is a key of
`TABLES`. A test fails if a table differs from its JSON. Other tables of the docs were written once;
the text beside them links to their records in `benchmarks/results`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import hypot, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from recsys.report import make_differences

__all__ = ["DOCUMENTS", "RESULTS", "TABLES", "Policies", "Rankings", "Table", "with_tables"]

_ROOT = Path(__file__).resolve().parents[1]
RESULTS = _ROOT / "benchmarks" / "results"
DOCUMENTS = (
    "README.md",
    "benchmarks/README.md",
    "docs/benchmarks.md",
    "docs/frameworks.md",
    "docs/reliability.md",
    "docs/slipstream.md",
    "benchmarks/slipstream/README.md",
)
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = Mapping[str, Any]


class Table(NamedTuple):
    """How the rows of a benchmark become a table.

    Attributes:
        file: The JSON.
        caption: What stands above it; may name {machine}, {rounds} and keys of the first case.
        keys: Titles of the first columns, with the key of a row's case, or "provider", in each.
        columns: Title, provider (empty: that of the line), metric, and format of the others.
        where: Which rows belong to it, by the keys of their case and their provider.
    """

    file: str
    caption: str
    keys: Mapping[str, str]
    columns: Sequence[tuple[str, str, str, Callable[[Row], str]]]
    where: Callable[[Mapping[str, str]], bool] = lambda keys: True

    def text(self) -> str:
        """The table in Markdown."""
        record = json.loads((RESULTS / self.file).read_text())
        rows = [(_keys_of(row), row) for row in record["rows"]]
        rows = [(keys, row) for keys, row in rows if self.where(keys)]
        cells = {(self._line(keys), row["provider"], row["metric"]): row for keys, row in rows}
        lines = []
        for line in dict.fromkeys(self._line(keys) for keys, _ in rows):
            found = [
                (format_cell, cells.get((line, provider or line[-1], metric)))
                for _, provider, metric, format_cell in self.columns
            ]
            if any(row is not None for _, row in found):
                shown = ["" if row is None else format_cell(row) for format_cell, row in found]
                lines.append([*line, *shown])
        environment = record["environment"]
        first = rows[0][0]
        caption = self.caption.format(
            **first,
            machine=f"{environment['cpu']}, {environment['num_threads']} threads, torch "
            f"{environment['torch']}",
            gpu=f"{environment['gpu']}, torch {environment['torch']}",
            rounds=rows[0][1]["num_runs"],
        )
        titles = [*self.keys, *(title for title, _, _, _ in self.columns)]
        table = [titles, ["---"] * len(titles), *lines]
        return caption + "\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in table)

    def _line(self, keys: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(keys.get(key, "") for key in self.keys.values())


class Headlines(NamedTuple):
    """One figure of several benchmarks each.

    Attributes:
        titles: Of the columns.
        lines: The cells, all but the last; then the record, the case, and the metric of the ratio.
    """

    titles: Sequence[str]
    lines: Sequence[tuple[Sequence[str], str, str, str]]

    def text(self) -> str:
        """The table in Markdown."""
        table = [[*self.titles], ["---"] * len(self.titles)]
        for cells, file, case, metric in self.lines:
            (ratio,) = (
                _ratio(row)
                for row in json.loads((RESULTS / file).read_text())["rows"]
                if (row["provider"], row["case"], row["metric"]) == ("recsys", case, metric)
            )
            table.append([*cells, ratio])
        return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


class Policies(NamedTuple):
    """How ablations of skipping become one table.

    Attributes:
        caption: What stands above it.
        lines: The record, the variation, and the variation that left out as many random samples.
    """

    caption: str
    lines: Sequence[tuple[str, str, str]]

    def text(self) -> str:
        """The table in Markdown."""
        titles = ("policy", "left out", "times faster", "AUC", "AUC beside random samples")
        lines = [[*titles], ["---"] * len(titles)]
        for file, variation, control in self.lines:
            cells = json.loads((RESULTS / file).read_text())["cells"]
            found = _differences(cells, variation, "none")
            beside = _differences(cells, variation, control).get("auc")
            skipped = [cell["run"]["skipped"] for cell in cells if cell["variation"] == variation]
            left_out = mean(one["share_skipped"] for one in skipped)
            policy, _, share = variation.partition("-")
            faster = (1 / found["train_seconds"][key] for key in ("mean", "high", "low"))
            lines.append(
                [
                    f"`{policy}`, {float(share):.0%}",
                    f"{left_out:.0%}" if left_out else "updates",
                    "{:.2f} ({:.2f} to {:.2f})".format(*faster),
                    _change(found["auc"]),
                    "" if beside is None else _change(beside),
                ]
            )
        return self.caption + "\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


class Rankings(NamedTuple):
    """How ablations of models that rank items become one table, with a line for each of the data.

    Attributes:
        caption: What stands above it.
        models: Title, record, variation, and what the names of its metrics begin with; {} in the
            name of a record is that of the data.
        lines: What the data is called, in names of records and to readers.
    """

    caption: str
    models: Sequence[tuple[str, str, str, str]]
    lines: Sequence[tuple[str, str]]

    def text(self) -> str:
        """The table in Markdown."""
        titles = ("data", *(title for title, *_ in self.models))
        table = [[*titles], ["---"] * len(titles)]
        for data, name in self.lines:
            table.append([name])
            for _, file, variation, prefix in self.models:
                cells = json.loads((RESULTS / file.format(data)).read_text())["cells"]
                runs = [cell["run"] for cell in cells if cell["variation"] == variation]
                found = [run["metrics"]["test"] for run in runs]
                metrics = (f"{prefix}recall", f"{prefix}ndcg")
                table[-1].append("; ".join(_with_error(found, metric) for metric in metrics))
        return self.caption + "\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in table)


def _with_error(runs: Sequence[Mapping[str, Any]], name: str) -> str:
    """The mean over seeds, and its error: of the groups, which all seeds share, and of seeds."""
    values = [run[f"{name}_at_k"] for run in runs]
    of_groups = mean(run[f"{name}_standard_error"] for run in runs)
    error = hypot(of_groups, stdev(values) / sqrt(len(values)))
    return f"{mean(values):.3f} \u00b1 {error:.3f}"


def _differences(
    cells: Sequence[Mapping[str, Any]], variation: str, baseline: str
) -> dict[str, Mapping[str, Any]]:
    """A variation beside another one, by metric, in pairs of equal seeds; times as ratios."""
    found = make_differences(cells, {"variations": [variation], "baseline": baseline})
    return {entry["metric"]: entry for entry in found}


def _change(entry: Mapping[str, Any]) -> str:
    return "{:+.4f} ({:+.4f} to {:+.4f})".format(*(entry[key] for key in ("mean", "low", "high")))


def _keys_of(row: Row) -> dict[str, str]:
    """The parameters of a row's case, and its provider."""
    pairs = dict(pair.split("=") for pair in row["case"].split(","))
    return pairs | {"provider": row["provider"]}


def with_tables(text: str) -> str:
    """Replace the tables of a document by new ones."""
    return _PLACE.sub(lambda place: place[1] + TABLES[place[2]].text() + place[3], text)


def _number(digits: int, unit: float = 1.0) -> Callable[[Row], str]:
    return lambda row: f"{row['median'] / unit:,.{digits}f}"


def _ratio(row: Row) -> str:
    """A ratio, with its 95 % interval if it has one."""
    interval = "" if row["low"] is None else f" ({row['low']:.2f}-{row['high']:.2f})"
    return f"**{row['median']:.2f}**{interval}"


def _percent(row: Row) -> str:
    return f"{100 * row['median']:.1f} %"


def _more(row: Row) -> str:
    """How much longer something takes, from the ratio of times."""
    middle, low, high = (100 * (row[key] - 1) for key in ("median", "low", "high"))
    return f"{middle:.1f} % ({low:.1f} to {high:.1f})"


def _spread(row: Row) -> str:
    """A median, with the 20th and the 80th percentile."""
    return f"{row['median']:,.0f} ({row['p20']:,.0f}-{row['p80']:,.0f})"


_MS, _MIB, _GIB = _number(2), _number(0, 2**20), _number(2, 2**30)
_OVER_FBGEMM = ("times as fast as FBGEMM (95 %)", "recsys", "speed_over_fbgemm", _ratio)
_OVER_TORCH = ("times as fast as PyTorch (95 %)", "recsys", "speed_over_torch", _ratio)
_PREPARED = [
    ("MB/s", "", "throughput", _spread),
    ("peak memory, GiB", "", "peak_memory", _GIB),
    ("times pandas (95 %)", "", "speed_over_pandas", _ratio),
]
_ONE_HOT = ",T=26,ids=one-hot"
TABLES: dict[str, Table | Headlines | Policies | Rankings] = {
    "whole_steps": Headlines(
        ("you have", "optimizer, B", "a step, times as fast (95 %)"),
        [
            *(
                (
                    (what, f"{optimizer}, {batch_size:,}"),
                    "models.json",
                    f"model={kind},B={batch_size},D=16,optimizer={optimizer.lower()}{more}",
                    "speed_over_torch",
                )
                for what, kind, more in (
                    ("26 `nn.Embedding`, as they come", "dense-embeddings", _ONE_HOT),
                    ("26 `nn.EmbeddingBag`, `sparse=True`", "bags", _ONE_HOT),
                    ("TorchRec's collection of 26 tables", "collection", _ONE_HOT),
                )
                for optimizer, batch_size in (("SGD", 2048), ("Adagrad", 2048))
            ),
            *(
                (
                    ("a whole DLRM, `sparse=True`", f"{optimizer}, 1,024"),
                    "models.json",
                    f"model=classic,B=1024,D=16,optimizer={optimizer.lower()}",
                    "speed_over_torch",
                )
                for optimizer in ("SGD", "Adagrad")
            ),
            (
                ("tables of 1.5 times the memory, beside mapped files", "SGD, 4,096"),
                "tiers_file.json",
                "B=4096,D=128,budget=2GiB,cold_tier=file,optimizer=sgd,tables=35.3GiB,"
                "schedule=lookahead-2",
                "speed_over_mmap",
            ),
        ],
    ),
    "headlines": Headlines(
        ("what", "beside", "conditions", "record", "ratio (95 %)"),
        [
            (
                ("the embeddings alone", "FBGEMM", "median of D and optimizers, B=128", "lookup"),
                "lookup.json",
                "B=128",
                "speed_over_fbgemm",
            ),
            (
                ("the embeddings alone", "PyTorch", "the same", "lookup"),
                "lookup.json",
                "B=128",
                "speed_over_torch",
            ),
            (
                ("a DLRM step", "FBGEMM", "SGD, D=16, B=2,048, float32", "step"),
                "step.json",
                "B=2048,D=16,optimizer=sgd,precision=fp32",
                "speed_over_fbgemm",
            ),
            (
                ("a DLRM step", "PyTorch", "the same", "step"),
                "step.json",
                "B=2048,D=16,optimizer=sgd,precision=fp32",
                "speed_over_torch",
            ),
            (
                ("`accelerate` on a DLRM of bags", "before", "Adagrad, B=1,024", "models"),
                "models.json",
                "model=classic,B=1024,D=16,optimizer=adagrad",
                "speed_over_torch",
            ),
            (
                (
                    "5 % of the bytes in fast memory",
                    "all of them",
                    "both tiers in the host's memory, D=64, B=2,048",
                    "tiers",
                ),
                "tiers.json",
                "B=2048,D=64,cold_tier=host,optimizer=rowwise_adagrad,share=0.05,"
                "schedule=sequential",
                "share_of_resident_speed",
            ),
            (
                (
                    "tables of 1.5 times the memory",
                    "`nn.EmbeddingBag` over mapped files",
                    "SGD, D=128, B=4,096, look-ahead",
                    "tiers_file",
                ),
                "tiers_file.json",
                "B=4096,D=128,budget=2GiB,cold_tier=file,optimizer=sgd,tables=35.3GiB,"
                "schedule=lookahead-2",
                "speed_over_mmap",
            ),
            (
                (
                    "5 % of the rows in a GPU's memory",
                    "all of them",
                    "H100, SGD, D=128, B=16,384, look-ahead",
                    "gpu",
                ),
                "gpu.json",
                "B=16384,D=128,model=kaggle,precision=tf32,share=0.05,schedule=lookahead-2",
                "share_of_resident_speed",
            ),
            (
                (
                    "row-wise tables on four processes",
                    "TorchRec with FBGEMM",
                    "D=16, B=16,384",
                    "distributed",
                ),
                "distributed.json",
                "W=4,B=16384,D=16,max_rows=500000,plan=row_wise",
                "speed_over_torchrec_fbgemm",
            ),
            (
                ("raw Criteo text to a store", "pandas", "1 GB", "prepare"),
                "prepare.json",
                "bytes=1000213260,lines=4114170,ids=7280038",
                "speed_over_pandas",
            ),
        ],
    ),
    "lookup_headline": Table(
        "lookup.json",
        "Median over all dimensions and optimizers, each the ratio of the medians of its rounds; "
        "{machine}.",
        {"B": "B"},
        [_OVER_FBGEMM, _OVER_TORCH],
        lambda keys: "D" not in keys,
    ),
    "lookup": Table(
        "lookup.json",
        "Milliseconds of a step of the embeddings alone, median of {rounds} rounds in which all "
        "took turns; {machine}.",
        {"D": "D", "optimizer": "optimizer", "B": "B"},
        [
            ("recsys", "recsys", "time", _MS),
            ("fbgemm", "fbgemm", "time", _MS),
            ("torch", "torch", "time", _MS),
            _OVER_FBGEMM,
            _OVER_TORCH,
            ("of the bandwidth", "recsys", "bandwidth_share", _percent),
        ],
        lambda keys: "B" in keys and "D" in keys,
    ),
    "step": Table(
        "step.json",
        "Milliseconds of a step, median of {rounds} rounds in which all took turns; SGD, Kaggle's "
        "26 tables, D={D}; {machine}.",
        {"B": "B", "precision": "precision"},
        [
            *(
                (name, name, "time", _MS)
                for name in ("recsys", "torch", "fbgemm", "dense", "dense_eager")
            ),
            _OVER_TORCH,
            _OVER_FBGEMM,
            ("recsys, times dense (95 %)", "recsys", "time_over_dense", _ratio),
        ],
    ),
    "models": Table(
        "models.json",
        "A step of a model of plain PyTorch before and after `recsys.accelerate`, median of "
        "{rounds} rounds; D={D}, tables of at most a million rows, one id a sample; {machine}.",
        {"model": "model", "tables": "T", "optimizer": "optimizer", "B": "B"},
        [
            ("torch, ms", "torch", "time", _MS),
            ("recsys, ms", "recsys", "time", _MS),
            ("times as fast (95 %)", "recsys", "speed_over_torch", _ratio),
        ],
        lambda keys: "B" in keys and keys.get("ids") != "jagged" and keys.get("T") != "4",
    ),
    "tiers": Table(
        "tiers.json",
        "Milliseconds of a training step, B={B}, D={D}, {optimizer}, cold tier {cold_tier}; median "
        "of {rounds} rounds in which both took turns; {machine}.",
        {"budget": "share", "schedule": "schedule"},
        [
            ("MiB", "recsys", "budget", _MIB),
            ("lookups hit", "recsys", "lookup_hit_rate", _percent),
            ("waits for rows", "recsys", "exposed_fetch", _number(1)),
            ("recsys", "recsys", "time", _number(1)),
            ("resident", "resident", "time", _number(1)),
            ("share of resident speed (95 %)", "recsys", "share_of_resident_speed", _ratio),
        ],
    ),
    "tiers_file": Table(
        "tiers_file.json",
        "Training steps with {tables} of tables in files, 1.5 times the memory; B={B}, D={D}, SGD, "
        "budget {budget}; median of {rounds} rounds in which all took turns; {machine}.",
        {"schedule": "schedule"},
        [
            ("samples/s", "recsys", "speed", _spread),
            ("ms", "recsys", "time", _number(1)),
            ("of it waits for rows", "recsys", "exposed_fetch", _number(1)),
            (
                "times `nn.EmbeddingBag` over mapped files (95 %)",
                "recsys",
                "speed_over_mmap",
                _ratio,
            ),
        ],
    ),
    "time_to_auc": Table(
        "time_to_auc.json",
        "One epoch on the sample of Criteo Kaggle, Adagrad 0.01, B={B}, D={D}; median of {rounds} "
        "seeds in which all took turns; {machine}.",
        {"provider": "provider"},
        [
            ("test AUC", "", "auc", _number(4)),
            ("epoch, s", "", "epoch", _number(2)),
            ("s to a test AUC of 0.75", "", "time_to_auc", _number(2)),
            ("times as fast as facebook (95 %)", "", "speed_over_facebook", _ratio),
        ],
    ),
    "frameworks": Table(
        "frameworks.json",
        "The last loss of two epochs of 32 mini-batches, without recsys and with a budget of "
        "128KiB for 212 KiB of rows and state (226 KiB for DeepCTR); Adagrad.",
        {"example": "example", "framework": "framework"},
        [
            ("last loss", "plain", "last_loss", _number(6)),
            ("with recsys", "recsys", "last_loss", _number(6)),
            (
                "largest difference",
                "recsys",
                "largest_difference",
                lambda row: f"{row['median']:.1e}",
            ),
        ],
    ),
    "gpu": Table(
        "gpu.json",
        "Training steps of a DLRM, replayed as CUDA graphs; SGD, Kaggle's 26 tables, D={D}; recsys "
        "has a twentieth of the rows in the GPU's memory, the others have all; {gpu}.",
        {
            "model": "model",
            "precision": "precision",
            "B": "B",
            "schedule": "schedule",
            "": "provider",
        },
        [
            ("ms per step", "", "time", _MS),
            ("samples/s", "", "throughput", _number(0)),
            ("of the speed of resident", "", "share_of_resident_speed", _percent),
            ("lookups hit", "", "lookup_hit_rate", _percent),
        ],
        lambda keys: keys["provider"] in ("resident", "recsys", "torch"),
    ),
    "distributed": Table(
        "distributed.json",
        "A step of {B} samples over all processes, D={D}, tables of at most {max_rows} rows; "
        "median of {rounds} rounds in which all took turns, each the time of its slowest process; "
        "{machine} for each process.",
        {"processes": "W", "plan": "plan", "": "provider"},
        [
            ("step, ms", "", "time", _number(1)),
            ("times as fast as TorchRec (95 %)", "", "speed_over_torchrec_fbgemm", _ratio),
            ("sent by a process in a step, MB", "", "loopback_sent", _number(2, 1e6)),
        ],
        lambda keys: "plan" in keys and "collective" not in keys,
    ),
    "prepare": Table(
        "prepare.json",
        "Raw Criteo text to numbered arrays: {lines} lines, {ids} distinct ids; median of {rounds} "
        "runs (20th to 80th percentile); {machine}.",
        {"": "provider"},
        _PREPARED,
    ),
    "prepare_table": Table(
        "prepare_table.json",
        "A table of {columns} columns to a store: {rows} rows, {values} distinct values; median of "
        "{rounds} runs (20th to 80th percentile); {machine}. MB/s are of CSV, for Parquet too.",
        {"": "provider"},
        _PREPARED,
    ),
    "predict": Table(
        "predict.json",
        "{samples} samples, Kaggle's tables, D={D}, B={B}; median of {rounds} runs in turns; "
        "{machine}. Memory without pages of mapped files.",
        {"tables in training": "tables"},
        [
            ("training, samples/s", "train", "throughput", _number(0)),
            ("prediction, samples/s", "predict", "throughput", _number(0)),
            ("times training (95 %)", "predict", "speed_over_training", _ratio),
            ("its memory, MiB", "predict", "peak_memory", _MIB),
        ],
        lambda keys: "tables" in keys,
    ),
    "ranking": Table(
        "predict.json",
        "All {items} items ranked for {groups} groups, models of the default sizes, D={D}; median "
        "of {rounds} runs; {machine}.",
        {"model": "model"},
        [("seconds", "recsys", "time", _number(1))],
        lambda keys: "items" in keys,
    ),
    "checkpoints": Table(
        "checkpoints.json",
        "{rounds} checkpoints of a training with Kaggle's tables, D={D}, Adagrad, B={B}, one in "
        "each turn of {steps} steps, in turns with a plain one; {machine}.",
        {"steps of a turn": "steps"},
        [
            ("a turn of plain training, s", "plain", "time", _number(1)),
            ("with a checkpoint, s", "recsys", "time", _number(1)),
            ("longer (95 %)", "plain", "time_over_plain", _more),
            ("training waits in `save`, s", "recsys", "exposed_time", _MS),
            (
                "longer in all, the copy of every row included",
                "recsys",
                "overhead_in_all",
                _percent,
            ),
            ("on the disk, GB", "recsys", "disk_bytes", _number(1, 1e9)),
        ],
        lambda keys: "steps" in keys,
    ),
    "policies": Policies(
        "Synthetic samples with Criteo Kaggle's tables, B=2048, Adagrad, two threads; 4 million "
        "trained on, 1 million tested. Beside no skipping in pairs of equal seeds (95 %): ten "
        "seeds for 35 %, three for 20 %, the share that was asked for.",
        [
            ("slipstream_goal_35.json", "importance-0.35", "random_drop-0.35"),
            ("slipstream_goal_35.json", "random_drop-0.35", "random_drop-0.35"),
            *(
                ("slipstream_synthetic.json", f"{policy}-0.2", "random_drop-0.2")
                for policy in ("paper", "drop_input", "subsample", "freeze_rows", "random_drop")
            ),
        ],
    ),
    "rankings": Rankings(
        "Recall at 20; NDCG at 20: mean of three seeds, and its standard error, of the questions "
        "and of the seeds. All items are ranked for the last positive of 5,000 groups; for `din`, "
        "which computes each pair of question and item, of 250. `two_tower` and `sasrec` learn by "
        "a softmax over the items of a mini-batch and 4,000 drawn ones, on MovieLens over all.",
        [
            ("popularity", "rankings_{}.json", "two_tower", "popularity_"),
            ("item_knn", "rankings_{}.json", "two_tower", "item_knn_"),
            ("`din`", "rankings_din_{}.json", "din", ""),
            ("`two_tower`", "rankings_{}.json", "two_tower", ""),
            ("`sasrec`", "rankings_{}.json", "sasrec", ""),
        ],
        [
            ("movielens", "MovieLens 1M"),
            ("gowalla", "Gowalla"),
            ("diginetica", "Diginetica"),
            ("tmall", "Tmall"),
            ("nowplaying", "Nowplaying"),
            ("retailrocket", "Retailrocket"),
        ],
    ),
    "skipping": Table(
        "skipping.json",
        "Time beyond plain training, {rounds} rounds in turns (95 %); Kaggle's tables, D={D}, "
        "{optimizer}; {machine}.",
        {"B": "B", "steps per window": "window"},
        [
            ("a second plain process", "plain_again", "time_over_plain", _more),
            ("`Observe`", "observe", "time_over_plain", _more),
            ("`DropInput(share=0)`", "drop_input", "time_over_plain", _more),
        ],
    ),
}


if __name__ == "__main__":
    for name in DOCUMENTS:
        document = _ROOT / name
        document.write_text(with_tables(document.read_text()))
