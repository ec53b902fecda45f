"""Tables about data that is not Criteo's: its preparation, models on it, and their predictions."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING, Any

from table_cells import cells_of, keys_of_case, machine, markdown, mebibytes, ratio, read_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["clicks_table", "predict_table", "rankings_table", "table_prepare_table"]


def table_prepare_table(file: str) -> str:
    """`recsys bench prepare --table`: throughput and peak memory by provider."""
    record = read_record(file)
    rows = {(row["provider"], row["metric"]): row for row in record["rows"]}
    case = keys_of_case(record["rows"][0]["case"])
    labels = {"recsys": "recsys, CSV", "recsys-parquet": "recsys, Parquet", "pandas": "pandas, CSV"}
    lines = []
    for provider, label in labels.items():
        rate = rows[provider, "throughput"]
        speed = rows.get((provider, "speed_over_pandas"))
        lines.append(
            [
                label,
                f"{rate['median']:.0f} ({rate['p20']:.0f}-{rate['p80']:.0f})",
                f"{rows[provider, 'peak_memory']['median'] / 2**30:.2f}",
                ratio(speed) if speed else "",
            ]
        )
    caption = (
        f"A table of {case['columns']} columns to a store: {int(case['bytes']) / 1e9:.2f} GB of "
        f"CSV, {int(case['rows']):,} rows, {int(case['values']):,} distinct values; median of "
        f"{rate['num_runs']} runs (20th to 80th percentile); {machine(record['environment'])}. "
        "MB/s are of CSV, for Parquet too."
    )
    return markdown(caption, ["", "MB/s", "peak memory, GiB", "over pandas (95 %)"], lines)


def predict_table(file: str) -> str:
    """`recsys bench predict`: samples per second of predictions and of training."""
    record = read_record(file)
    cells = cells_of(record)
    lines = []
    for case in dict.fromkeys(row["case"] for row in record["rows"]):
        rates = [cells[case, name, "throughput"]["median"] for name in ("train", "predict")]
        lines.append(
            [
                keys_of_case(case)["tables"],
                *(f"{rate:,.0f}" for rate in rates),
                ratio(cells[case, "predict", "speed_over_training"], mark="**"),
                mebibytes(cells[case, "predict", "peak_memory"]),
            ]
        )
    keys = keys_of_case(case)
    caption = (
        f"{int(keys['samples']):,} samples, Kaggle's tables, D={keys['D']}, B={keys['B']}; median "
        f"of {cells[case, 'predict', 'throughput']['num_runs']} runs in turns; "
        f"{machine(record['environment'])}. Memory without pages of mapped files."
    )
    header = ["tables in training", "training, samples/s", "prediction, samples/s"]
    return markdown(caption, [*header, "times training (95 %)", "its memory, MiB"], lines)


def clicks_table(file: str) -> str:
    """Clicks on ads: DLRM beside logistic regression on the same columns."""
    record = read_record(file)
    lines = []
    for found in record["data_sets"]:
        if "logistic_regression" not in found:
            continue
        regression = found["logistic_regression"]
        models = {
            "DLRM": [run["metrics"]["test"] for run in found["runs"]],
            f"logistic regression, C={regression['C']:g}": [regression["metrics"]["test"]],
        }
        for model, metrics in models.items():
            samples = f"{metrics[0]['num_samples']:,}"
            cells = [f"{_mean(metrics, key):.4f}" for key in ("auc", "logloss", "calibration")]
            error = f"{metrics[0]['auc_standard_error']:.3f}"
            lines.append([found["name"], model, samples, cells[0], error, *cells[1:]])
    header = ["data", "model", "test samples", "test AUC", "its standard error", "logloss"]
    return markdown(_caption(record), [*header, "calibration"], lines)


def rankings_table(file: str) -> str:
    """The item that was chosen: DLRM beside popularity."""
    record = read_record(file)
    lines = []
    for found in record["data_sets"]:
        metrics = [run["metrics"]["test"] for run in found["runs"]]
        if "recall_at_k" not in metrics[0]:
            continue
        lines.append(
            [
                found["name"],
                f"{sum(found['runs'][0]['data']['table_sizes'].values()):,}",
                f"{metrics[0]['num_rankings']:,}",
                *(
                    f"{_mean(metrics, key):.4f}"
                    for key in (
                        "recall_at_k",
                        "popularity_recall_at_k",
                        "recall_standard_error",
                        "ndcg_at_k",
                        "popularity_ndcg_at_k",
                    )
                ),
            ]
        )
    k = metrics[0]["ranking_k"]
    header = ["data", "rows", "rankings", f"**recall at {k}**", "of popularity"]
    header += ["standard error", f"NDCG at {k}", "of popularity"]
    return markdown(_caption(record), header, lines)


def _mean(metrics: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(mean(each[key] for each in metrics))


def _caption(record: Mapping[str, Any]) -> str:
    seeds = sorted({run["config"]["seed"] for each in record["data_sets"] for run in each["runs"]})
    return (
        f"Mean of seeds {', '.join(map(str, seeds))}; {machine(record['environment'])}; commit "
        f"{str(record['environment']['commit'])[:10]}."
    )
