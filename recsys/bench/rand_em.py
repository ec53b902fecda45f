"""`recsys bench rand-em`: how often the true number of hot rows is within FAE's interval.

The table is Kaggle's largest, C3, with the popularity curve of `synthetic:criteo-kaggle` and as
many samples as the challenge has. A tenth of the samples is counted, as a profiler does. A row is
hot if it has at least `min_count` lookups among them.

    order=random            shuffled, because the generator spreads popular rows more evenly
    order=first_appearance  rows numbered by their first lookup among all samples, as the classic
                            preparation numbers ids; rows without lookups come last

Every trial draws other rows: either 35 chunks of 1,024 consecutive rows (provider `chunks`, as in
FAE), or as many single rows (provider `rows`). For the metric `inside`, the median is the share of
trials whose interval contains the true number, and `low` to `high` is Wilson's 95 % interval of
that share.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.bench.parts.harness import Row, summarize
from recsys.datasets.criteo.row_numbers import RowNumbers
from recsys.datasets.criteo.shape import KAGGLE_TABLE_SIZES
from recsys.datasets.synthetic.samples import SyntheticCriteo
from recsys.embeddings.popularity.profile import PopularityProfile
from recsys.embeddings.popularity.rand_em import METHODS, estimate_hot_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["bench_rand_em"]

_TABLE = 2
_RATE = 0.1
_BLOCK_SAMPLES = 1 << 16
_Z = 1.959963984540054  # 95 % of a normal distribution lie within this many standard deviations


def bench_rand_em(
    min_counts: Sequence[int],
    *,
    num_samples: int,
    num_trials: int,
    num_rows: int = KAGGLE_TABLE_SIZES[_TABLE],
) -> list[Row]:
    """Measure both ways of drawing rows on both orders.

    Args:
        min_counts: Lookups from which on a row is hot; one case for each.
        num_samples: All samples, of which a tenth is counted.
        num_trials: Draws in each case.
        num_rows: Rows of the table.
    """
    orders = _counts_by_order(num_samples, num_rows)
    num_lookups = int(orders["random"].sum(dtype=np.int64))
    rows = []
    for order, counts in orders.items():
        for min_count in min_counts:
            truth = int(np.count_nonzero(counts >= min_count))
            case = (
                f"order={order},min_count={min_count},hot_rows={truth},rows={num_rows},"
                f"lookups={num_lookups}"
            )
            for method in METHODS:
                found = [
                    estimate_hot_rows(counts, min_count, method=method, seed=seed)
                    for seed in range(num_trials)
                ]
                inside = [each.low <= truth <= each.high for each in found]
                rows.append(_share(case, method, inside))
                errors = [abs(each.num_rows - truth) / truth for each in found if truth]
                if errors:
                    row = summarize("rand-em", case, method, "relative_error", "share", errors)
                    rows.append(row)
    return rows


def _counts_by_order(num_samples: int, num_rows: int) -> dict[str, NDArray[Any]]:
    """Lookup counts of the rows of one table, in both orders."""
    # The columns before it are not used; size 1 makes them fast to generate.
    sizes = [*[1] * _TABLE, num_rows]
    source = SyntheticCriteo(num_samples=num_samples, table_sizes=sizes)
    table = list(source.table_sizes)[_TABLE]
    profile, numbers = PopularityProfile(source.table_sizes, rate=_RATE), RowNumbers()
    for begin in range(0, num_samples, _BLOCK_SAMPLES):
        batch = source.read(np.arange(begin, min(begin + _BLOCK_SAMPLES, num_samples)))
        profile.add(batch)
        numbers.number(batch.sparse_features[table].values().numpy().astype(np.uint32))
    counts = profile.counts(table)
    appeared = numbers.ids_by_row().astype(np.int64)
    never = np.ones(num_rows, bool)
    never[appeared] = False
    return {
        "random": np.random.default_rng(0).permutation(counts),
        "first_appearance": counts[np.concatenate([appeared, np.flatnonzero(never)])],
    }


def _share(case: str, method: str, inside: Sequence[bool]) -> Row:
    num, share = len(inside), float(np.mean(inside))
    p20, p80 = np.percentile(np.array(inside, float), [20, 80]).tolist()
    center = (share + _Z**2 / (2 * num)) / (1 + _Z**2 / num)
    width = _Z * math.sqrt(share * (1 - share) / num + _Z**2 / (4 * num**2)) / (1 + _Z**2 / num)
    return Row(
        bench="rand-em",
        case=case,
        provider=method,
        metric="inside",
        unit="share",
        median=share,
        p20=p20,
        p80=p80,
        num_runs=num,
        low=max(center - width, 0.0),
        high=min(center + width, 1.0),
    )
