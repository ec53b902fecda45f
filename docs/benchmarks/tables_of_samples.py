"""Tables of the lookups of samples, and of estimates of hot rows."""

from __future__ import annotations

from table_cells import (
    cells_of,
    keys_of_case,
    markdown,
    read_record,
)

__all__ = ["continuation_table", "coverage_table", "planted_table", "rand_em_table"]


def rand_em_table(file: str) -> str:
    """`recsys bench rand-em`: how often the true number is within the interval."""
    record = read_record(file)
    cells = cells_of(record)
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    lines = []
    for case in cases:
        keys = keys_of_case(case)
        line = [keys["order"].replace("_", " "), keys["min_count"], f"{int(keys['hot_rows']):,}"]
        for method in ("chunks", "rows"):
            inside = cells[case, method, "inside"]
            error = cells.get((case, method, "relative_error"))
            line.append(
                f"**{100 * inside['median']:.1f} %** "
                f"({100 * inside['low']:.1f}-{100 * inside['high']:.1f})"
            )
            line.append(f"{100 * error['median']:.1f} %" if error else "")
        lines.append(line)
    keys = keys_of_case(cases[0])
    caption = (
        f"A table of {int(keys['rows']):,} rows, {int(keys['lookups']):,} lookups counted, "
        f"{record['rows'][0]['num_runs']} trials in each line; inside: trials whose 99.9 % "
        "interval holds the truth (with that share's own 95 % interval); error: median over trials."
    )
    header = ["rows are in order of", "hot from count", "hot rows"]
    header += ["chunks: inside", "error", "single rows: inside", "error"]
    return markdown(caption, header, lines)


def coverage_table(file: str) -> str:
    """Lookups of synthetic samples, compared with the real sample."""
    record = read_record(file)
    real, synthetic = record["real"], record["synthetic"]
    first, second = real["popularity"][0], synthetic["popularity"][0]
    lines = [["distinct rows", f"{first['num_rows']:,}", f"{second['num_rows']:,}"]]
    for top, *shares in zip(record["tops"], first["top_shares"], second["top_shares"], strict=True):
        label = f"lookups in the top {100 * top:g} % of the rows met"
        lines.append([label, *(f"{100 * share:.1f} %" for share in shares)])
    for size, *found in zip(
        record["batch_sizes"], real["distinct_rows"], synthetic["distinct_rows"], strict=True
    ):
        label = f"distinct rows per lookup, mini-batches of {size:,}"
        lines.append([label, *(f"{rows:.3f}" for rows in found)])
    caption = f"The first {first['num_samples']:,} samples; rows of all columns ranked together."
    return markdown(caption, ["", "real sample", "synthetic"], lines)


def continuation_table(file: str) -> str:
    """Lookups of increasing numbers of synthetic samples."""
    record = read_record(file)
    lines = [
        [
            f"{found['num_samples']:,}",
            f"{found['num_rows']:,}",
            *(f"{100 * share:.1f} %" for share in found["top_shares"]),
        ]
        for found in record["synthetic"]["popularity"]
    ]
    tops = [f"top {100 * top:g} %" for top in record["tops"]]
    caption = "Synthetic samples from the first on; shares of lookups by rank among the rows met."
    return markdown(caption, ["samples", "rows met", *tops], lines)


def planted_table(file: str) -> str:
    """The best AUC on the planted labels, by what a model knows."""
    planted = read_record(file)["synthetic"]["planted"]
    labels = {
        "everything": "everything",
        "no_interactions": "every row's effect and the dense features, no interactions",
        "no_tables": "the dense features alone, no tables",
    }
    lines = [[label, f"{planted[name]:.3f}"] for name, label in labels.items()]
    return markdown("The best that can be expected.", ["what a model knows", "AUC"], lines)
