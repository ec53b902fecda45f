"""Tables of `recsys bench distributed`: steps, collectives, and the model of more processes."""

from __future__ import annotations

from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from table_cells import cells_of, keys_of_case, markdown, ratio, read_record

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "distributed_collectives_table",
    "distributed_model_table",
    "distributed_table",
    "processes_table",
]

_SPEED = "speed_over_torchrec_fbgemm"
_DESIGNS = {
    "table_wise_pooled": "table-wise, vectors",
    "row_wise_pooled": "row-wise, parts",
    "row_wise_rows": "row-wise, distinct rows",
}


def distributed_table(file: str) -> str:
    """Time and bytes of a step, by number of processes, plan and provider."""
    record = read_record(file)
    cells = cells_of(record)
    lines = []
    for case, provider in (key[:2] for key in cells if key[2] == "time"):
        keys, row = keys_of_case(case), cells[case, provider, "time"]
        interval = "" if row["low"] is None else f" ({row['low']:.1f}-{row['high']:.1f})"
        speed = cells.get((case, provider, _SPEED))
        sent = cells.get((case, provider, "bytes_sent"))  # missing if nothing was called
        on_loopback = cells.get((case, provider, "loopback_sent"))
        waited = cells.get((case, provider, "collective_time"))
        lines.append(
            [
                keys["W"],
                keys["plan"].replace("_", "-"),
                provider,
                f"{row['median']:.1f}{interval}",
                ratio(speed, mark="**") if speed else "",
                _megabytes(sent) if sent else "0.00",
                _megabytes(on_loopback) if on_loopback else "",
                f"{waited['median']:.1f}" if waited else "0.0",
            ]
        )
    first = next(iter(cells))
    keys = keys_of_case(first[0])
    num_runs = cells[first]["num_runs"]
    caption = (
        f"A step of {int(keys['B']):,} samples over all processes, D={keys['D']}, tables of at "
        f"most {int(keys['max_rows']):,} rows; median of {num_runs} rounds in which all took "
        "turns, each the time of its slowest process; bytes and waiting by process and step; one "
        "thread for each process; "
        f"{_machine(record)}."
    )
    header = ["processes", "plan", "", "step, ms (95 %)", "times as fast as TorchRec (95 %)"]
    header += ["sent, MB", "over the loopback, MB", "in collectives, ms"]
    return markdown(caption, header, lines)


def distributed_collectives_table(file: str) -> str:
    """Calls, bytes and time of each collective, with the most processes."""
    record = read_record(file)
    cells = cells_of(record)
    of_collectives = [key for key in cells if ",collective=" in key[0] and key[2] == "calls"]
    most = max((int(keys_of_case(case)["W"]) for case, *_ in of_collectives), default=1)
    lines = []
    for case, provider, _ in of_collectives:
        keys = keys_of_case(case)
        if int(keys["W"]) != most:
            continue
        lines.append(
            [
                keys["plan"].replace("_", "-"),
                provider,
                f"`{keys['collective']}`",
                keys["dtype"],
                f"{cells[case, provider, 'calls']['median']:.0f}",
                _megabytes(cells[case, provider, "bytes_sent"]),
                f"{cells[case, provider, 'collective_time']['median']:.1f}",
            ]
        )
    caption = (
        f"Collectives of a step on {most} processes, by process: the mean over them, and the "
        f"median of the counted steps; {_machine(record)}."
    )
    header = ["plan", "", "collective", "numbers", "calls", "sent, MB", "ms"]
    return markdown(caption, header, lines)


def distributed_model_table(file: str) -> str:
    """Bytes and time on a link that the model computes, by number of processes."""
    record = read_record(file)
    cells = {key: row for key, row in cells_of(record).items() if row.get("modelled")}
    sizes = [case for case, provider, _ in cells if provider in _DESIGNS and "link=" not in case]
    links = [keys_of_case(case).get("link") for case, *_ in cells]
    names = [name for name in dict.fromkeys(links) if name]
    lines = []
    for case in dict.fromkeys(sizes):
        line = [keys_of_case(case)["W"]]
        for design in _DESIGNS:
            times = [cells[f"{case},link={name}", design, "link_time"] for name in names]
            line.append(_megabytes(cells[case, design, "bytes_sent"]))
            line.append(" / ".join(f"{row['median']:.2f}" for row in times))
        lines.append(line)
    keys = keys_of_case(sizes[0])
    caption = (
        f"A model, not measured: what a process sends to others in a step of {int(keys['B']):,} "
        f"samples over all processes, D={keys['D']}, and the time on the links of the busiest one, "
        f"at {', '.join(names)}; means over the processes, medians over mini-batches."
    )
    header = ["processes"]
    for title in _DESIGNS.values():
        header += [f"{title}, MB", "ms"]
    return markdown(caption, header, lines)


def _megabytes(row: Mapping[str, Any]) -> str:
    return f"{row['median'] / 1e6:,.2f}"


def _machine(record: Mapping[str, Any]) -> str:
    environment = record["environment"]
    return f"{environment['cpu']}, {environment['num_cores']} cores, torch {environment['torch']}"


def processes_table(file: str) -> str:
    """The AUC of `recsys train` on one process and on several."""
    record = read_record(file)
    found: dict[int, list[float]] = {}
    for run in record["runs"]:
        found.setdefault(run["num_processes"], []).append(run["metrics"]["test"]["auc"])
    lines = [
        [
            str(num_processes),
            f"{mean(aucs):.5f}",
            f"{min(aucs):.5f} to {max(aucs):.5f}",
            f"{stdev(aucs):.5f}",
        ]
        for num_processes, aucs in found.items()
    ]
    config = record["runs"][0]["config"]
    caption = (
        f"Test AUC of a DLRM on a real sample of Criteo Kaggle, {config['optimizer']['name']} "
        f"{config['optimizer']['lr']:g}, B={config['batch_size']} over all processes, budget "
        f"{config['budget']} and one thread for each; {len(found[1])} seeds; "
        f"{record['environment']['cpu']}, torch {record['environment']['torch']}."
    )
    header = ["processes", "test AUC, mean", "least to most", "standard deviation"]
    return markdown(caption, header, lines)
