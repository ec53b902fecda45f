"""The table of docs/benchmarks/what_if.py: predictions beside measurements."""

from __future__ import annotations

from table_cells import machine, markdown, read_record

__all__ = ["what_if_table"]


def what_if_table(file: str) -> str:
    """Predicted and measured speed of each change of each base run."""
    record = read_record(file)
    lines = []
    for setting in record["settings"]:
        base = setting["measured"]
        name = setting["name"]
        lines.append(
            [name, "as measured", "", f"{base['samples_per_second']:,.0f}", "", "", "", ""]
        )
        for each in setting["predictions"]:
            predicted, measured = each["predicted"], each["measured"]
            lines.append(
                [
                    name,
                    each["change"],
                    f"{predicted['samples_per_second']:,.0f}",
                    f"{measured['samples_per_second']:,.0f}",
                    f"**{100 * each['error']:+.1f} %**",
                    f"{predicted['exposed_seconds_per_1000_steps']:.2f}",
                    f"{measured['exposed_seconds_per_1000_steps']:.2f}",
                    f"{100 * predicted['lookup_hit_rate']:.1f} %",
                ]
            )
    caption = (
        "Samples per second of training on the real sample of Criteo Kaggle; each prediction from "
        f"the base run above it, each measurement the median of {record['num_rounds']} rounds in "
        "which all runs took turns; "
        f"{machine(record['environment'])}."
    )
    header = ["base", "change", "predicted", "measured", "error"]
    header += ["predicted waits, s in 1,000 steps", "measured", "lookups hit"]
    return markdown(caption, header, lines)
