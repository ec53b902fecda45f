"""Tables of checkpoints' cost, and of what a run survives."""

from __future__ import annotations

from table_cells import cells_of, keys_of_case, machine, markdown, ratio, read_record

__all__ = ["checkpoints_table", "crash_table", "threads_table"]


def checkpoints_table(file: str) -> str:
    """`recsys bench checkpoints`: time and memory."""
    record = read_record(file)
    cells = cells_of(record)
    case, in_files = dict.fromkeys(row["case"] for row in record["rows"])
    ours = {key[2]: row for key, row in cells.items() if key[:2] == (case, "recsys")}
    plain = cells[case, "plain", "time"]
    memory = {key[2]: row["median"] for key, row in cells.items() if key[0] == in_files}
    keys = keys_of_case(case)
    gigabytes = int(keys_of_case(in_files)["bytes"]) / 1e9
    lines = [
        ["a turn of plain training", f"{plain['median']:.1f} s"],
        ["the same turn with a checkpoint", f"{ours['time']['median']:.1f} s"],
        [
            "time over plain's, median of turns (95 %)",
            ratio(cells[case, "plain", "time_over_plain"]),
        ],
        [
            "overhead of all turns, the copy of every row included",
            f"{100 * ours['overhead_in_all']['median']:.1f} %",
        ],
        [
            "of a turn, training waits in `save`",
            f"{ours['exposed_time']['median']:.2f} s ({ours['exposed_time']['p20']:.2f} to "
            f"{ours['exposed_time']['p80']:.2f})",
        ],
        ["a delta", f"{ours['delta']['median'] / 1e6:,.0f} MB"],
        [
            "memory for the record of updated rows and for waiting blocks",
            f"{ours['memory_bytes']['median'] / 2**20:,.0f} MiB",
        ],
        ["on the disk at the end", f"{ours['disk_bytes']['median'] / 1e9:.1f} GB"],
        [
            f"saving a table of {gigabytes:.0f} GB in files: peak of memory beyond that before",
            f"{memory['peak_memory_beyond'] / 2**20:,.0f} MiB",
        ],
        ["the same: seconds", f"{memory['save_time']:.0f}"],
    ]
    caption = (
        f"{plain['num_runs']} checkpoints of a training with Kaggle's tables, D={keys['D']}, "
        f"{keys['optimizer'].capitalize()}, B={keys['B']}, one in each turn of {keys['steps']} "
        f"steps, in turns with a plain one; {machine(record['environment'])}."
    )
    return markdown(caption, ["", ""], lines)


def crash_table(file: str) -> str:
    """`make crash`: kills by run."""
    record = read_record(file)
    lines = [
        [
            run["tier"],
            run["schedule"],
            str(run["kills"]),
            str(run["after_first_checkpoint"]),
            str(run["during_full"]),
            str(run["during_delta"]),
            "equal to the last bit"
            if run["difference"] == 0
            else f"differs by {run['difference']:.0e} at most",
        ]
        for run in record["runs"]
    ]
    caption = (
        f"{sum(run['kills'] for run in record['runs'])} kills (SIGKILL) in "
        f"{len(record['runs'])} runs; {machine(record['environment'])}."
    )
    header = [
        "tier",
        "schedule",
        "kills",
        "after the first checkpoint",
        "while a full piece was written",
        "while a delta was written",
        "final model, beside an unkilled run's",
    ]
    return markdown(caption, header, lines)


def threads_table(file: str) -> str:
    """`make threads`: random cases under delays."""
    record = read_record(file)
    lines = [[name, f"{number:,}"] for name, number in record["cases"].items()]
    lines += [
        [f"left after a case: {name}", str(number)] for name, number in record["left"].items()
    ]
    caption = (
        f"{record['num_cases']} random cases with {record['delays']:,} delays under "
        f"PYTHONDEVMODE=1, at most {record['most_threads']} threads at once, in "
        f"{record['seconds'] / 60:.0f} minutes; {machine(record['environment'])}."
    )
    return markdown(caption, ["", ""], lines)
