"""`recsys bench prepare`: raw Criteo text to numbered arrays, compared with pandas in chunks.

The text is a sample repeated until it is large enough. Ids that occur once in the sample get new
values in every repetition. So new ids keep appearing, as in a long file, and popular ids stay
popular. The text is in the page cache, so the speed of the disk is not measured. Each run has its
own process, and both providers take a turn in each round.
"""

from __future__ import annotations

import gzip
import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from recsys._support.machine import peak_memory_bytes
from recsys.bench.parts.harness import Row, ratio, rows_by_provider, take_turns
from recsys.bench.parts.scratch import scratch_folder
from recsys.bench.parts.worker import in_own_process
from recsys.datasets.criteo.flow import CATEGORY_NAMES, INTEGER_NAMES
from recsys.datasets.criteo.kaggle import prepare_criteo_kaggle
from recsys.datasets.criteo.parse import NUM_FIELDS, NUM_INTEGERS, parse_lines
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from recsys.datasets.criteo.parse import ParsedLines

__all__ = ["SIZES", "Size", "bench_prepare", "hex_digits", "measure_runs", "prepare_with_pandas"]

_PANDAS_CHUNK_LINES = 200_000
_HEX_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


@dataclass(frozen=True)
class Size:
    """How much text is read, and how often.

    Attributes:
        num_lines: The least number of lines; the whole sample is repeated.
        num_ids: Distinct ids; None changes every id that occurs once in every repetition.
        num_runs: Runs of each provider.
    """

    num_lines: int
    num_ids: int | None
    num_runs: int


SIZES = {
    "quick": Size(num_lines=400_000, num_ids=None, num_runs=1),
    "gigabyte": Size(num_lines=4_114_000, num_ids=None, num_runs=6),
    "kaggle": Size(num_lines=45_840_617, num_ids=33_762_577, num_runs=1),
}


def bench_prepare(raw: Path | None, size: Size) -> list[Row]:
    """Measure throughput and peak memory of both providers, and compare their speed.

    Args:
        raw: The sample, plain or gzip. Default: `criteo_kaggle_137k` in the folder RECSYS_DATA.
        size: The amount of text; see `SIZES`.

    Raises:
        ConfigError: there is no sample.
    """
    raw = raw or Path(os.environ.get("RECSYS_DATA", ".")) / "criteo_kaggle_137k" / "train.txt.gz"
    if not raw.is_file():
        raise ConfigError(
            f"bench prepare needs raw Criteo text, but {raw} is not a file; give one with --raw, "
            "or the folder of samples with RECSYS_DATA"
        )
    with scratch_folder() as folder:
        text = folder / "train.txt"
        num_bytes, num_lines = write_long_text(raw, text, size)
        short = folder / "short.txt"
        with text.open("rb") as file:
            short.write_bytes(file.readline())
        providers = {name: (prepare, short, text) for name, prepare in _PROVIDERS.items()}
        case = f"bytes={num_bytes},lines={num_lines},ids="
        return measure_runs("prepare", case, num_bytes, providers, size.num_runs)


def measure_runs(
    bench: str,
    case: str,
    num_bytes: int,
    providers: Mapping[str, tuple[Callable[[Path, Path], int], Path, Path]],
    num_runs: int,
) -> list[Row]:
    """Let providers take turns, each run in its own process; compare them with "pandas".

    Args:
        bench: As in `Row`.
        case: As in `Row`, up to the number of distinct values, which all providers must find.
        num_bytes: Bytes of text that a run reads.
        providers: By name: writes a file to a folder and returns the number of distinct values; a
            short file, with which it compiles its kernels; the file to measure.
        num_runs: Runs of each provider.
    """
    done = take_turns(
        {name: partial(in_own_process, _measure, *each) for name, each in providers.items()},
        num_runs,
        num_warm_up_rounds=0,  # each process warms up itself
    )
    found = {run.num_values for runs in done.values() for run in runs}
    assert len(found) == 1, f"the providers disagree on the number of values: {found}"
    case += str(found.pop())
    seconds = {name: [run.seconds for run in runs] for name, runs in done.items()}
    rates = {name: [num_bytes / 1e6 / s for s in spent] for name, spent in seconds.items()}
    peaks = {name: [run.peak_memory_bytes for run in runs] for name, runs in done.items()}
    baseline = seconds.pop("pandas")
    return [
        *rows_by_provider(bench, case, "throughput", "MB/s", rates),
        *rows_by_provider(bench, case, "peak_memory", "bytes", peaks),
        *(
            ratio(bench, case, name, "speed_over_pandas", values=spent, baseline=baseline)
            for name, spent in seconds.items()
        ),
    ]


def write_long_text(raw: Path, out: Path, size: Size) -> tuple[int, int]:
    """Repeat a sample to a size; returns the bytes and lines written.

    Raises:
        ConfigError: the sample has a bad line.
    """
    content = raw.read_bytes()
    is_gzip = content[:2] == b"\x1f\x8b"
    content = (gzip.decompress(content) if is_gzip else content).replace(b"\r\n", b"\n")
    text = np.frombuffer(content.removesuffix(b"\n") + b"\n", np.uint8)
    parsed = parse_lines(text, 0, len(text), stop_at_bad_line=True)
    if len(parsed.bad_lines):
        raise ConfigError(
            f"bench prepare needs a file without bad lines, but line {parsed.num_lines} of {raw} "
            "is bad; `recsys prepare` says why"
        )
    num_repetitions = -(-size.num_lines // parsed.num_lines)
    places, ids, num_others = _ids_seen_once(text, parsed)
    if size.num_ids is not None and num_repetitions > 1:
        num_changing = (size.num_ids - num_others - len(ids)) // (num_repetitions - 1)
        chosen = np.random.default_rng(0).permutation(len(ids))[:num_changing]
        places, ids = places[chosen], ids[chosen]
    digit_places = places[:, None] + np.arange(8)
    changed = text.copy()
    with out.open("wb") as file:
        for repetition in range(num_repetitions):
            if repetition:
                changed[digit_places] = hex_digits(_other_ids(ids, repetition))
            file.write(changed.data)
    return num_repetitions * len(text), num_repetitions * parsed.num_lines


def hex_digits(ids: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The letters of 32-bit ids in hexadecimal, (N, 8)."""
    digits = ids[:, None] >> np.arange(28, -1, -4, dtype=np.uint64)
    letters: NDArray[np.uint8] = _HEX_DIGITS[digits & np.uint64(15)]
    return letters


def _ids_seen_once(
    text: NDArray[np.uint8], parsed: ParsedLines
) -> tuple[NDArray[np.int64], NDArray[np.uint64], int]:
    """Offsets of the eight-digit ids that occur once in a column, these ids, number of others."""
    separators = np.flatnonzero((text == ord("\t")) | (text == ord("\n")))
    field_ends = separators.reshape(-1, NUM_FIELDS)[:, 1 + NUM_INTEGERS :]
    places, ids, num_distinct = [], [], 0
    for column, values in enumerate(parsed.categories):
        distinct, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ends = field_ends[:, column]
        is_once = (counts[inverse] == 1) & (text[ends - 9] == ord("\t"))
        places.append(ends[is_once] - 8)
        ids.append(values[is_once].astype(np.uint64))
        num_distinct += len(distinct)
    once = np.concatenate(ids)
    return np.concatenate(places), once, num_distinct - len(once)


def prepare_with_pandas(text: Path, out: Path) -> int:
    """Write the same arrays with `pandas.read_csv` in chunks; returns the number of distinct ids.

    `pandas.factorize` numbers the ids of a chunk, and a dictionary maps them to numbers over all.
    """
    out.mkdir()
    rows_of_ids: list[dict[str, int]] = [{} for _ in CATEGORY_NAMES]
    names = ["label", *INTEGER_NAMES, *CATEGORY_NAMES]
    dtypes: dict[str, Any] = {"label": np.int8}
    dtypes |= dict.fromkeys(INTEGER_NAMES, np.float64) | dict.fromkeys(CATEGORY_NAMES, str)
    with (
        (out / "labels.bin").open("wb") as labels,
        (out / "dense.bin").open("wb") as dense,
        (out / "sparse.bin").open("wb") as sparse,
    ):
        chunks: Iterator[pd.DataFrame] = pd.read_csv(
            text,
            sep="\t",
            header=None,
            names=names,
            dtype=dtypes,
            chunksize=_PANDAS_CHUNK_LINES,
            na_values=[""],
            keep_default_na=False,
        )
        for chunk in chunks:
            labels.write(chunk["label"].to_numpy().data)
            integers = chunk[list(INTEGER_NAMES)].fillna(0).clip(lower=0)
            dense.write(np.ascontiguousarray(integers.to_numpy(np.int32)).data)
            rows = np.empty((len(chunk), len(CATEGORY_NAMES)), np.int32)
            for column, name in enumerate(CATEGORY_NAMES):
                numbers = rows_of_ids[column]
                codes, ids = pd.factorize(chunk[name].fillna("00000000"))
                rows[:, column] = np.array(
                    [numbers.setdefault(raw_id, len(numbers)) for raw_id in ids], np.int32
                )[codes]
            sparse.write(rows.data)
    return sum(map(len, rows_of_ids))


def _prepare_with_recsys(text: Path, out: Path) -> int:
    return prepare_criteo_kaggle([text], out, show_progress=False).num_rows


_PROVIDERS = {"recsys": _prepare_with_recsys, "pandas": prepare_with_pandas}


@dataclass(frozen=True)
class _Run:
    seconds: float
    peak_memory_bytes: float
    num_values: int


def _measure(prepare: Callable[[Path, Path], int], short: Path, text: Path) -> _Run:
    """Measure one run, in the folder of the text, after kernels are compiled."""
    with tempfile.TemporaryDirectory(dir=text.parent) as folder:
        prepare(short, Path(folder) / "short")
        begin = time.perf_counter()
        num_values = prepare(text, Path(folder) / "out")
        seconds = time.perf_counter() - begin
    return _Run(seconds, float(peak_memory_bytes() or "nan"), num_values)


def _other_ids(ids: NDArray[np.uint64], repetition: int) -> NDArray[np.uint64]:
    """Other 32-bit ids; they stay distinct, because multiplying by an odd number is invertible."""
    mixed = ids * np.uint64(0x9E3779B1) + np.uint64(repetition) * np.uint64(0x85EBCA6B)
    return mixed & np.uint64(0xFFFFFFFF)
