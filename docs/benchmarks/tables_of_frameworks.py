"""The table of docs/frameworks.md."""

from __future__ import annotations

from table_cells import markdown, read_record

__all__ = ["frameworks_table"]


def frameworks_table() -> str:
    """The losses of every framework's example without recsys and on a budget."""
    record = read_record("frameworks.json")
    lines = [
        [
            f"[{row['example']}.py](../examples/frameworks/{row['example']}.py)",
            f"{row['package']} {row['version']}",
            f"{row['last_loss']:.6f}",
            f"{row['last_loss_with_recsys']:.6f}",
            f"{row['largest_difference']:.1e}",
        ]
        for row in record["rows"]
    ]
    return markdown(
        f"Losses with Adagrad, without recsys and with a budget of {record['budget']} for tables "
        "and state of 212 KiB (226 KiB for DeepCTR, which has first-order tables), over two epochs "
        "of 32 mini-batches.",
        ["example", "framework", "last loss", "last loss with recsys", "largest difference"],
        lines,
    )
