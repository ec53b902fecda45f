"""The tables of `recsys bench gpu`: each case, with its providers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from table_cells import cells_of, keys_of_case, markdown, percent, read_record

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["gpu_table", "host_rows_table"]

_HEADER = ["model", "D", "B", "rows in HBM", "provider", "ms per step", "samples/s"]
_HEADER += ["of resident's speed", "floor", "lookups hit", "PCIe, bytes per sample"]


def gpu_table(file: str) -> str:
    """Every provider of every case."""
    record = read_record(file)
    cells = cells_of(record)
    steps = [(case, provider) for case, provider, metric in cells if metric == "time"]
    lines = [_line(cells, case, provider) for case, provider in steps]
    found, limits = record["environment"], record["limits"]
    is_captured = record["plan"].get("capture", False)
    how = "steps replayed as CUDA graphs" if is_captured else "all op by op"
    caption = (
        f"{found['gpu']}, torch {found['torch']}, {how}; SGD, Kaggle's 26 tables, median of "
        f"rounds in which all took turns. Copies within its memory reach "
        f"{limits['on_device'] / 1e12:.2f} TB/s, over PCIe {limits['to_device'] / 1e9:.0f} and "
        f"{limits['to_host'] / 1e9:.0f} GB/s."
    )
    return markdown(caption, _HEADER, lines)


def _line(cells: Mapping[Any, dict[str, Any]], case: str, provider: str) -> list[str]:
    def cell(metric: str) -> dict[str, Any] | None:
        return cells.get((case, provider, metric))

    def number(metric: str, digits: int) -> str:
        row = cell(metric)
        return "" if row is None else f"{row['median']:,.{digits}f}"

    keys = keys_of_case(case)
    share = "" if provider != "recsys" else keys["share"]
    name = f"{provider}, {keys['schedule']}" if "schedule" in keys else provider
    return [
        f"{keys['model']}, {keys['precision']}",
        keys["D"],
        f"{int(keys['B']):,}",
        share if share in ("", "floor") else f"{100 * float(share):g} %",
        name,
        number("time", 2),
        number("throughput", 0),
        percent(cell("share_of_resident_speed")),
        percent(cell("floor_share")),
        percent(cell("lookup_hit_rate")),
        number("pcie_per_sample", 0),
    ]


def host_rows_table(file: str) -> str:
    """How fast the host's rows are copied, by where they are and the number of programs."""
    record = read_record(file)
    found = record["host_rows"]
    caption = (
        f"{record['environment']['gpu']}: copies of 65,536 rows of {4 * found['dim']} bytes in "
        f"tables of 16 GiB, {found['bytes_in_huge_pages'] / 2**30:.1f} GiB in huge pages."
    )
    lines = [
        [
            each["rows"],
            str(each["num_programs"]),
            f"{each['to_device'] / 1e9:.1f}",
            f"{each['to_host'] / 1e9:.1f}",
            percent({"median": each["products_beside"]}),
        ]
        for each in found["copies"]
    ]
    header = ["rows", "programs", "GB/s to the device", "GB/s to the host"]
    return markdown(caption, [*header, "speed that products keep"], lines)
