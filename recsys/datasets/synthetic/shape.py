"""The distributions of Criteo Kaggle's 26 categorical and 13 dense columns.

The numbers are aggregates of a uniform sample of 137,139 labelled rows of the challenge's training
file. This module contains no value, row or id of the file.

- `shares`: the percentage of a column's lookups that go to its 1, 2, 3, ... most popular rows, at
  the ranks `KNOT_RANKS`, down to rows that were seen about four times. A sample that is ranked by
  its own counts overstates the share of its top rows. So each share was adjusted until 137,139
  draws from the curve, ranked by their own counts, had the measured share.
- `tail_exponent`: below the last knot the sample contains mostly rows seen once. There, popularity
  falls as rank**-exponent down to the last row of the column's table (`num_embeddings` of the
  complete training file). With this exponent, 137,139 draws have as many distinct rows as the
  sample. Most rows of the big tables never appear in a sample of this size.
- `group`, `coupling`: in some columns values are popular together (a rare value of C12 comes with
  rare values of C3, C16 and C21). These columns share one uniform number per sample and group. A
  column uses it with probability `coupling`, otherwise an independent number. Coupling does not
  change the popularity within a column; it changes how many samples are popular in all of their
  columns. Couplings are the sample's rank correlations, raised slightly until that share fits.
- dense columns, `DenseShape`: missing shares, locations and scales are measured; the factors model
  the strongest correlations; the effects are invented, with the signs of the sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "KAGGLE_COLUMNS",
    "KAGGLE_DENSE",
    "KAGGLE_TABLE_SIZES",
    "KNOT_RANKS",
    "NUM_FACTORS",
    "NUM_GROUPS",
    "ColumnShape",
    "DenseShape",
    "popularity_curve",
]

# fmt: off
KNOT_RANKS: Final = (
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000, 1500,
    2000, 3000,
)
# fmt: on
# How many random numbers the columns of a sample share: one per group and per factor.
NUM_GROUPS: Final = 4
NUM_FACTORS: Final = 4
# Consecutive edges of a curve differ by this factor; between them all ranks are equally popular.
_EDGE_RATIO = 1.1


class ColumnShape(NamedTuple):
    """Popularity of one categorical column; see the module docstring for the fields."""

    num_embeddings: int
    tail_exponent: float
    group: int
    coupling: float
    shares: tuple[float, ...]


class DenseShape(NamedTuple):
    """One dense column. If a value is not missing, `log(x + 1)` is normal, cut off at 0.

    A missing value is 0. Columns of one factor share two random numbers per sample: a normal one
    with weight `loading` (the rest is independent), and a uniform one that decides which values are
    missing. `effect` is the change of the planted score per unit of log(x + 1).
    """

    missing: float
    location: float
    scale: float
    factor: int
    loading: float
    effect: float


def popularity_curve(
    shape: ColumnShape, num_embeddings: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The share of lookups that go to the most popular rows, as a fine, piecewise linear curve.

    Between the knots of the shape, popularity falls as 1 / rank; below the last knot, by the power
    law. A smaller table truncates the curve, a larger one extends the power law. Both renormalise.

    Shape:
        result: edges (K + 1,), ranks ascending from 0 to num_embeddings; shares (K + 1,) ascending
        from 0 to 1: `shares[k]` of the lookups go to the `edges[k]` most popular rows.
    """
    knots = np.array([0, *KNOT_RANKS[: len(shape.shares)]])
    knot_shares = np.array([0.0, *shape.shares]) / 100
    edges = [0]
    while edges[-1] < num_embeddings:
        edges.append(min(max(edges[-1] + 1, int(edges[-1] * _EDGE_RATIO)), num_embeddings))
    ranks = np.array(sorted({*edges, *knots[knots < num_embeddings].tolist()}), np.int64)

    shares = np.interp(np.log1p(ranks), np.log1p(knots), knot_shares)
    last, size = int(knots[-1]), shape.num_embeddings
    in_tail = ranks > last
    length = _power_integral(last, ranks[in_tail], shape.tail_exponent)
    whole = _power_integral(last, np.array([size]), shape.tail_exponent)
    shares[in_tail] = knot_shares[-1] + (1 - knot_shares[-1]) * length / whole
    return ranks, shares / shares[-1]


def _power_integral(begin: int, ends: NDArray[np.int64], exponent: float) -> NDArray[np.float64]:
    """The integral of (1 + x)**-exponent from begin to each of ends, up to a constant factor."""
    # expm1 is accurate for exponents near 1, where the integral becomes a logarithm.
    log_ratio = np.log1p(ends) - np.log1p(begin)
    power = 1.0 - exponent
    return np.asarray(np.expm1(power * log_ratio) / power if power else log_ratio)


# fmt: off
# I1 .. I13. Factors: 0 and 1 activity, 2 content, 3 none.
KAGGLE_DENSE: Final = (
    #            missing location scale factor loading effect
    DenseShape(0.4509,  0.613, 1.303, 0,  0.75,  0.70),
    DenseShape(0.0000,  1.653, 2.710, 3,  0.00,  0.10),
    DenseShape(0.2134,  2.134, 1.221, 2,  0.45, -0.30),
    DenseShape(0.2145,  1.697, 0.918, 2,  0.90, -0.15),
    DenseShape(0.0263,  7.269, 2.939, 0, -0.75, -0.30),
    DenseShape(0.2227,  3.382, 1.794, 0, -0.65, -0.15),
    DenseShape(0.0428,  1.499, 1.598, 1,  0.95,  0.75),
    DenseShape(0.0005,  2.024, 1.188, 2,  0.70, -0.15),
    DenseShape(0.0428,  3.536, 1.647, 1,  0.50,  0.00),
    DenseShape(0.4509,  0.423, 0.357, 0,  0.95,  2.40),
    DenseShape(0.0428,  0.883, 0.858, 1,  0.95,  1.20),
    DenseShape(0.7652, -0.603, 1.400, 3,  0.00,  0.60),
    DenseShape(0.2145,  1.721, 0.984, 2,  0.87, -0.90),
)

# C1 .. C26: num_embeddings, tail_exponent, group, coupling, shares.
KAGGLE_COLUMNS: Final = (
    ColumnShape(1_460, 1.578, 0, 0.00,
        (50.042, 66.817, 75.209, 80.175, 83.462, 85.789, 87.575, 88.970, 90.086, 90.962, 93.900,
         95.335, 96.821, 98.109, 98.644, 99.055, 99.388, 99.544)),
    ColumnShape(583, 7.983, 0, 0.00,
        (11.335, 15.621, 19.411, 23.084, 26.620, 29.839, 32.886, 35.570, 37.758, 40.204, 49.058,
         55.107, 63.251, 73.727, 80.109, 86.351, 92.191, 95.297, 97.996)),
    ColumnShape(10_131_227, 0.953, 0, 0.95,
        (3.440, 5.970, 7.013, 8.042, 8.994, 9.856, 10.692, 11.456, 12.267, 12.988, 15.970, 17.506,
         20.675, 24.546, 26.988, 29.502, 32.692, 34.999, 38.125, 41.863, 44.161, 46.359, 48.838,
         50.929)),
    ColumnShape(2_202_608, 1.236, 0, 0.95,
        (3.578, 7.020, 9.262, 11.405, 13.303, 15.127, 16.604, 17.633, 18.501, 19.222, 22.794,
         25.322, 29.074, 34.012, 37.355, 40.907, 44.930, 47.972, 51.951, 56.856, 59.959, 63.227,
         66.656, 69.136, 72.430)),
    ColumnShape(305, 2.346, 0, 0.00,
        (67.417, 82.879, 89.154, 92.477, 94.322, 95.611, 96.475, 97.025, 97.479, 97.868, 98.815,
         99.239, 99.602, 99.834)),
    ColumnShape(24, 8.000, 0, 0.00,
        (39.609, 61.467, 80.077, 92.258, 95.414, 98.190, 99.957, 99.964, 99.989, 99.994)),
    ColumnShape(12_517, 2.997, 1, 0.93,
        (2.125, 3.439, 4.338, 5.073, 5.800, 6.506, 7.086, 7.676, 8.214, 8.769, 11.098, 12.993,
         15.743, 20.087, 23.692, 27.366, 32.974, 37.160, 43.692, 52.852, 59.318, 66.312, 74.331,
         79.930, 85.609)),
    ColumnShape(633, 2.147, 0, 0.00,
        (59.463, 76.003, 83.433, 87.614, 90.155, 91.998, 93.260, 94.257, 94.984, 95.599, 97.345,
         98.121, 98.841, 99.409, 99.627, 99.741)),
    ColumnShape(3, 2.000, 0, 0.00,
        (90.007, 99.985)),
    ColumnShape(93_145, 1.937, 0, 0.00,
        (22.205, 23.693, 24.448, 25.037, 25.585, 26.066, 26.479, 26.911, 27.119, 27.355, 29.354,
         30.923, 33.034, 36.673, 39.238, 42.144, 46.291, 49.599, 54.525, 61.245, 65.986, 70.946,
         76.524, 80.236, 84.603)),
    ColumnShape(5_683, 5.136, 1, 0.95,
        (3.201, 5.305, 6.853, 8.149, 9.216, 9.884, 10.897, 11.627, 12.382, 13.192, 16.488, 18.939,
         23.522, 29.416, 33.941, 39.032, 45.597, 50.407, 58.118, 68.408, 75.168, 82.156, 89.445,
         92.468)),
    ColumnShape(8_351_593, 0.984, 0, 0.99,
        (3.434, 5.952, 8.199, 9.245, 10.245, 11.190, 12.055, 12.867, 13.602, 14.420, 17.653,
         19.515, 22.619, 26.923, 29.727, 32.361, 35.611, 38.030, 41.277, 45.161, 47.549, 49.801,
         52.402, 54.448)),
    ColumnShape(3_194, 7.321, 1, 0.97,
        (3.203, 5.567, 7.243, 8.605, 9.699, 11.074, 12.459, 13.409, 14.181, 14.583, 18.411,
         21.764, 26.455, 33.149, 38.197, 43.728, 51.028, 56.353, 64.137, 74.547, 81.136, 87.575,
         94.057, 97.062)),
    ColumnShape(27, 8.000, 0, 0.00,
        (34.893, 69.090, 84.565, 89.038, 92.053, 94.494, 95.796, 97.046, 97.793, 98.402, 99.603,
         99.892)),
    ColumnShape(14_992, 2.805, 2, 0.95,
        (1.547, 2.614, 3.552, 4.426, 5.071, 5.786, 6.534, 7.297, 8.110, 8.974, 12.510, 15.639,
         20.683, 28.456, 34.151, 40.374, 48.110, 53.932, 62.148, 72.320, 78.415, 84.489, 90.119,
         92.783)),
    ColumnShape(5_461_306, 1.062, 0, 0.98,
        (3.440, 5.977, 8.194, 9.236, 10.259, 11.236, 12.109, 12.986, 13.781, 14.429, 18.093,
         20.406, 24.291, 29.438, 32.672, 35.705, 39.484, 42.253, 45.808, 50.054, 52.673, 55.392,
         58.352, 60.658)),
    ColumnShape(10, 2.000, 0, 0.00,
        (46.026, 59.196, 70.509, 78.966, 84.261, 88.796, 93.148, 97.370, 99.999)),
    ColumnShape(5_652, 3.776, 2, 0.95,
        (3.197, 6.028, 8.707, 11.032, 13.125, 14.977, 17.018, 18.867, 20.521, 21.051, 25.656,
         30.195, 37.201, 46.349, 52.990, 60.015, 68.278, 74.068, 81.343, 88.653, 92.509, 95.765,
         97.994)),
    ColumnShape(2_173, 3.931, 3, 0.88,
        (44.149, 78.587, 80.508, 81.105, 82.032, 82.607, 83.171, 83.670, 84.032, 84.313, 85.610,
         86.560, 88.013, 90.090, 91.440, 92.816, 94.301, 95.357, 96.693, 98.162, 98.875)),
    ColumnShape(4, 2.000, 3, 0.87,
        (44.188, 63.186, 81.694)),
    ColumnShape(7_046_547, 1.012, 0, 0.99,
        (3.449, 5.960, 8.170, 9.216, 10.228, 11.156, 11.857, 12.827, 13.697, 14.433, 18.072,
         20.275, 23.493, 28.109, 31.064, 33.840, 37.488, 40.122, 43.471, 47.479, 49.976, 52.293,
         55.051, 57.077)),
    ColumnShape(18, 0.900, 0, 0.00,
        (76.147, 89.735, 98.263, 99.027, 99.558, 99.936, 99.968, 99.980, 99.996)),
    ColumnShape(15, 8.000, 0, 0.00,
        (43.725, 63.745, 75.840, 82.814, 88.575, 94.182, 96.627, 98.176, 99.029, 99.483)),
    ColumnShape(286_181, 1.550, 0, 0.97,
        (5.297, 10.099, 14.676, 18.949, 22.406, 24.548, 26.788, 28.845, 30.511, 31.897, 37.387,
         40.828, 45.295, 51.063, 54.407, 57.844, 61.684, 64.472, 68.259, 73.180, 76.331, 79.530,
         82.900, 85.023)),
    ColumnShape(105, 8.000, 3, 0.87,
        (44.144, 58.379, 69.157, 77.193, 81.183, 83.979, 87.056, 90.466, 93.398, 95.449, 98.137,
         99.090, 99.812)),
    ColumnShape(142_572, 1.558, 0, 0.88,
        (44.182, 48.347, 50.177, 51.769, 53.255, 54.684, 55.753, 56.408, 57.378, 58.119, 60.306,
         61.705, 63.720, 66.980, 68.898, 71.206, 73.749, 75.605, 78.264, 81.790, 83.918, 86.143,
         88.496, 89.973)),
)
# fmt: on

KAGGLE_TABLE_SIZES: Final = tuple(column.num_embeddings for column in KAGGLE_COLUMNS)
