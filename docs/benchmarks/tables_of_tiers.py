"""Tables of `recsys bench tiers`: hot rows in slots, the others in memory or in files."""

from __future__ import annotations

from table_cells import (
    cells_of,
    cells_of_recsys,
    keys_of_case,
    machine,
    markdown,
    mebibytes,
    percent,
    ratio,
    read_record,
)

__all__ = ["tiers_file_table", "tiers_table"]


def tiers_table(file: str) -> str:
    """`recsys bench tiers`: share of the resident speed at each budget, under each schedule."""
    record = read_record(file)
    cells = cells_of(record)
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    lines = []
    for case in cases:
        ours = cells_of_recsys(cells, case)
        keys = keys_of_case(case)
        line = [
            keys["share"].replace("floor", "the floor"),
            keys["schedule"],
            percent(ours["budget_share"]),
            mebibytes(ours["budget"]),
            mebibytes(ours["hot_memory"]),
            mebibytes(ours.get("peak_over_resident")),
            percent(ours.get("lookup_hit_rate")),
            percent(ours.get("unique_hit_rate")),
        ]
        exposed = ours.get("exposed_fetch")
        line += [
            f"{exposed['median']:.1f}" if exposed else "",
            f"{ours['time']['median']:.1f}",
            f"{cells[case, 'resident', 'time']['median']:.1f}",
            ratio(ours["share_of_resident_speed"], mark="**"),
        ]
        lines.append(line)
    keys = keys_of_case(cases[0])
    caption = (
        f"Milliseconds of a training step, B={keys['B']}, D={keys['D']}, {keys['optimizer']}, "
        f"cold tier {keys['cold_tier']}; median of {record['rows'][0]['num_runs']} rounds in which "
        f"both took turns; {machine(record['environment'])}."
    )
    header = ["budget", "schedule", "of all bytes", "MiB"]
    header += ["slots and map, MiB", "peak over resident, MiB", "lookups hit", "distinct rows hit"]
    header += ["waits for rows", "recsys", "resident"]
    return markdown(caption, [*header, "share of resident speed (95 %)"], lines)


def tiers_file_table(file: str) -> str:
    """`recsys bench tiers --cold-tier file`: schedules compared with mapped files and limits."""
    record = read_record(file)
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    of_schedules = [case for case in cases if "schedule" in keys_of_case(case)]
    cells = cells_of(record)
    whole = of_schedules[0].rpartition(",schedule=")[0]
    lines = []
    for case in of_schedules:
        ours = cells_of_recsys(cells, case)
        speedup = ours.get("speedup_over_sequential")
        of_reads = ours.get("share_of_limit_of_reads")
        lines.append(
            [
                keys_of_case(case)["schedule"],
                f"{ours['speed']['median']:,.0f}",
                f"{ours['speed']['p20']:,.0f}-{ours['speed']['p80']:,.0f}",
                f"{ours['time']['median']:.1f}",
                f"{ours['exposed_fetch']['median']:.1f}",
                f"{ours['disk_floor']['median']:.1f}",
                ratio(ours["share_of_limit"], mark="**"),
                ratio(of_reads) if of_reads else "",
                ratio(speedup, mark="**") if speedup else "",
                ratio(ours["speed_over_mmap"], mark="**"),
            ]
        )
    mapped = cells[whole, "mmap", "speed"]
    spread = f"{mapped['p20']:,.0f}-{mapped['p80']:,.0f}"
    time = f"{1e3 * int(keys_of_case(whole)['B']) / mapped['median']:.1f}"
    lines.append(["mmap", f"{mapped['median']:,.0f}", spread, time, *[""] * 6])
    ours = cells_of_recsys(cells, whole)
    direct = {
        keys_of_case(case)["threads"]: row["median"]
        for (case, _, metric), row in cells.items()
        if metric == "direct_reads_of_empty_cache"
    }
    best = max(direct, key=lambda threads: direct[threads])
    ordinary = next(
        row["median"]
        for (_, _, metric), row in cells.items()
        if metric == "ordinary_reads_of_empty_cache"
    )
    peaks = {
        provider: cells[whole, provider, "peak_anonymous_memory"]["median"]
        - cells[whole, provider, "anonymous_memory_at_start"]["median"]
        for provider in ("recsys", "mmap")
    }
    num_bytes = cells[whole, "disk", "num_bytes"]["median"]
    first = cells_of_recsys(cells, of_schedules[0])
    keys = keys_of_case(whole)
    caption = (
        f"Training steps with {num_bytes / 2**30:.1f} GiB of tables, "
        f"{num_bytes / record['environment']['memory_bytes']:.2f} times memory; B={keys['B']}, "
        f"D={keys['D']}, SGD, budget {keys['budget']}; median of {mapped['num_runs']} rounds in "
        f"which all took turns; {machine(record['environment'])}. Ours fetched "
        f"{first['fetched_rows_per_sample']['median']:.2f} rows a sample "
        f"({percent(first['lookup_hit_rate'])} of lookups hit); a step that fetches none takes "
        f"{ours['compute_floor']['median']:.1f} ms. The disk gave "
        f"{cells[whole, 'disk', 'random_reads_of_4096']['median']:,.0f} random reads of 4 KiB a "
        "second in the same rounds; of an empty cache, with as many reads at once, "
        + ", ".join(f"{reads:,.0f} ({threads})" for threads, reads in direct.items())
        + f", at best {direct[best]:,.0f}, and {ordinary:,.0f} by way of it. Memory of its own "
        f"since the start: {peaks['recsys'] / 2**20:,.0f} MiB for ours, "
        f"{peaks['mmap'] / 2**20:,.0f} MiB for mmap."
    )
    header = ["", "samples/s", "20th to 80th percentile", "ms", "of it waits for rows"]
    header += ["the disk's floor, ms", "of the limit (95 %)", "of that by pages read (95 %)"]
    return markdown(caption, [*header, "over sequential (95 %)", "over mmap (95 %)"], lines)
