"""Record batches of any types become record batches of the schema's types, and are checked.

    meaning                 type                    nulls
    ----------------------  ----------------------  --------------------------------
    label                   int8, 0 or 1            none
    weight                  float32, at least 0     none
    timestamp               int64, seconds          none
    group                   int64 or string         none
    column of the split     string                  none
    dense                   float64, finite         missing; none with missing "error"
    categorical             int64 or string         missing; none with missing "error"
    multi, sequence         list of these           a null list is an empty one; no null elements
    their weights           list of float32         none; as many elements as the list of values

A column that is categorical and also the group, or the column of the split, has the type of the
categorical one, and no nulls. Empty text and nan are missing. Booleans are integers, 1 for true.
They are no text, because text files write them in several ways; only the column of the split takes
them as true and false. Decimals of whole numbers, as databases write ids, are integers. Files and
frames both pass through `conform`, so the same values give the same batch.

This module needs pyarrow, so others import it in functions, after `import_pyarrow`.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.datasets.tabular.reading.date_forms import date_form, first_misread
from recsys.datasets.tabular.schemas.schema_parts import (
    TIME_UNITS,
    CategoricalColumn,
    ColumnSplit,
    DenseColumn,
    PositiveRule,
)
from recsys.errors import DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from numpy.typing import NDArray

    from recsys.datasets.tabular.schemas.schema import Schema

__all__ = ["conform", "plain"]

_FIRST_MILLISECONDS = 100_000_000_000  # as seconds: the year 5138
_UTC = r"(^|[^A-Za-z])(UTC|GMT|Z)($|[^A-Za-z])"
_GROUP_WAY_OUT = "fill it in, or leave the row out: a group must be known"
_MISSING_WAY_OUT = (  # also for rows to predict
    "fill it in, leave the row out, or prepare the training data with missing set to {}"
)
_SPLIT_WAY_OUT = "fill it in, or leave the row out: the split must be known"


def conform(
    batch: pa.RecordBatch,
    schema: Schema,
    place: Callable[[int], str],
    *,
    optional: Collection[str] = (),
) -> pa.RecordBatch:
    """Give the columns of a batch the types of the schema, and check their values.

    Args:
        batch: Columns that the schema names, in any order; columns it does not name are dropped.
        schema: What they mean.
        place: Names a row of the batch, by its number from 0, in messages, such as "a.csv, line 7".
        optional: The label and the column of the split may have nulls if they are named here.

    Returns:
        The columns of the batch that the schema names, in the schema's order.

    Raises:
        DatasetFormatError: a column has a type, or a value, that its meaning does not accept. The
            message names row, column, rule, value and way out.
    """
    found = set(batch.schema.names)
    names = [name for name in schema.columns if name in found]
    arrays = [
        _conform_column(batch, name, schema, place, may_be_null=name in optional) for name in names
    ]
    return pa.RecordBatch.from_arrays(arrays, names=names)


class _Fault(Exception):
    """What a column breaks: the row of the batch (None: all of them), the rule, the way out."""

    def __init__(self, row: int | None, rule: str, way_out: str) -> None:
        super().__init__(rule)
        self.row, self.rule, self.way_out = row, rule, way_out


def _conform_column(
    batch: pa.RecordBatch,
    name: str,
    schema: Schema,
    place: Callable[[int], str],
    *,
    may_be_null: bool,
) -> pa.Array:
    array, weighted = batch.column(name), schema.weights_of.get(name)
    try:
        if weighted is not None:
            return _weights(plain(array), plain(batch.column(weighted)), weighted, schema)
        return _convert(plain(array), name, schema, may_be_null=may_be_null)
    except _Fault as fault:
        value = f", got {array.type}"
        if fault.row is not None:
            value = f", got {repr(array[fault.row].as_py())[:60]}"
            if not array[fault.row].is_valid:
                value = ", got a missing value"
        raise DatasetFormatError(
            f"{place(fault.row or 0)}, column {name!r}: {fault.rule}{value}; {fault.way_out}"
        ) from None


def _convert(array: pa.Array, name: str, schema: Schema, *, may_be_null: bool) -> pa.Array:
    column: Any = schema.dense.get(name) or schema.value_columns.get(name)
    if isinstance(column, DenseColumn):
        return _dense(array, column)
    if isinstance(column, CategoricalColumn):
        array = _values(array, column.values)
        if name == schema.group:
            _require_valid(array, _GROUP_WAY_OUT)
        if isinstance(schema.split, ColumnSplit) and schema.split.column == name:
            _require_valid(array, _SPLIT_WAY_OUT)
        if column.missing == "error":
            _require_valid(array, _MISSING_WAY_OUT.format('"rare" or "own"'))
        return array
    if column is not None:
        return _lists(array, column.values, column.split, schema.missing_values)
    if name == schema.label:
        label = _label(array, schema.positive_rule)
        if not may_be_null:
            _require_valid(label, "fill it in, or leave the row out: a label must be known")
        return label
    if name == schema.timestamp:
        return _seconds(array, schema.timestamp_format)
    if name == schema.weight:
        return _weight(array)
    if name == schema.group:
        # Unsigned integers, such as hashes, may be too large for `_integers`.
        is_number = _is_integer(array.type) or pa.types.is_floating(array.type)
        array = (_integers if is_number and not pa.types.is_uint64(array.type) else _strings)(array)
        _require_valid(array, _GROUP_WAY_OUT)
        return array
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.string())
    array = _strings(array)
    if not may_be_null:
        _require_valid(array, _SPLIT_WAY_OUT)
    return array


def plain(array: pa.Array) -> pa.Array:
    """Without dictionary encoding or a large or view type; nulls for empty text and nan.

    Decimals of whole numbers become integers, or text if one has more than 64 bits.
    """
    kind = array.type
    if pa.types.is_dictionary(kind):
        return plain(array.dictionary_decode())
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        array, kind = array.cast(pa.string()), pa.string()
    if pa.types.is_string(kind):
        is_empty = pc.equal(pc.binary_length(array), 0)
        if pc.any(is_empty).as_py():
            array = pc.if_else(is_empty, pa.scalar(None, kind), array)
    elif pa.types.is_floating(kind):
        is_nan = pc.is_nan(array)
        if pc.any(is_nan).as_py():
            array = pc.if_else(is_nan, pa.scalar(None, kind), array)
    elif pa.types.is_null(kind):
        array = array.cast(pa.string())
    elif pa.types.is_decimal(kind) and kind.scale == 0:
        try:
            array = array.cast(pa.int64())
        except pa.ArrowInvalid:
            array = array.cast(pa.string())
    return array


def _is_integer(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind))


def _require_valid(array: pa.Array, way_out: str) -> None:
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise _Fault(row, "must have a value", way_out)


def _require(is_right: pa.Array, rule: str, way_out: str) -> None:
    """Raise for the first row whose `is_right` is False; null is right."""
    if not pc.all(is_right, min_count=0).as_py():
        row = int(np.flatnonzero(pc.equal(is_right, False).fill_null(False).to_numpy(False))[0])
        raise _Fault(row, rule, way_out)


def _cast(array: pa.Array, kind: pa.DataType, rule: str, way_out: str) -> pa.Array:
    """Cast, or name the first row that cannot be cast. Integers become the nearest floats."""
    is_rounded = pa.types.is_floating(kind) and _is_integer(array.type)
    try:
        return array.cast(kind, safe=not is_rounded)
    except pa.ArrowNotImplementedError:
        raise _Fault(None, rule, way_out) from None
    except pa.ArrowInvalid:
        low, high = 0, len(array)  # the first bad row is in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                array[low:middle].cast(kind)
                low = middle
            except pa.ArrowInvalid:
                high = middle
        raise _Fault(low, rule, way_out) from None


def _dense(array: pa.Array, column: DenseColumn) -> pa.Array:
    if pa.types.is_temporal(array.type):
        raise _Fault(None, "must be numbers", "convert it, or leave it out of dense")
    if not pa.types.is_float64(array.type):
        way_out = "correct it, leave the value out, or make the column categorical"
        array = plain(_cast(array, pa.float64(), "must be a number", way_out))
    _require(pc.is_finite(array), "must be finite", "correct it, or leave the value out")
    if column.missing == "error":
        _require_valid(array, _MISSING_WAY_OUT.format('a number or "mean"'))
    return array


def _values(array: pa.Array, values: str) -> pa.Array:
    return _integers(array) if values == "integer" else _strings(array)


def _integers(array: pa.Array) -> pa.Array:
    if pa.types.is_temporal(array.type):
        raise _Fault(None, "must be integers", "convert it to integers")
    if pa.types.is_floating(array.type):
        bits = np.finfo(array.type.to_pandas_dtype()).nmant + 1
        _require(
            pc.less(pc.abs(array.cast(pa.float64())), 2.0**bits),
            f"an integer in a column of {array.type} must be below 2^{bits}, as larger ones are "
            "rounded",
            'read the column as integers, such as by dtype "Int64" of pandas, or as text',
        )
    return _cast(
        array,
        pa.int64(),
        "must be a signed integer of 64 bits",
        'correct it, or set values to "string"',
    )


def _strings(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_string(kind):
        return array
    if _is_integer(kind):
        return array.cast(pa.string())
    if pa.types.is_floating(kind) and array.null_count == len(array):
        return pa.nulls(len(array), pa.string())  # an empty column of a frame
    way_out = "convert it to text"
    if pa.types.is_boolean(kind):  # text files write True, or true
        way_out = 'set values to "integer", which takes true as 1, or convert it to text'
    elif pa.types.is_floating(kind):  # as text, 3 would be "3.0", and a missing value "nan"
        way_out = 'convert whole numbers to integers, as by .astype("Int64") of pandas'
    raise _Fault(None, "must be text or integers", way_out)


def _lists(array: pa.Array, values: str, split: str, missing_values: tuple[str, ...]) -> pa.Array:
    """Lists without missing elements, which split text may name; null lists stay."""
    flat, ends = _elements(array, split, missing_values, "make the column categorical")
    with _naming_rows(ends):
        flat = _values(flat, values)
    flat, ends = _kept(flat, flat, ends)
    return _as_lists(flat, ends, array.is_null() if array.null_count else None)


def _weights(array: pa.Array, weighted: pa.Array, name: str, schema: Schema) -> pa.Array:
    """Lists of weights: one for each element that `_lists` keeps of the weighted column."""
    column: Any = schema.value_columns[name]
    way_out = "correct it, or leave the row out"
    flat, own_ends = _elements(
        array, column.split, schema.missing_values, f"give it a list for each row, as {name!r} has"
    )
    num_weights = np.diff(own_ends, prepend=0)
    if pa.types.is_string(weighted.type) and schema.missing_values:
        # A missing cell with one weight is one missing value, which the reader made null.
        is_one = pc.and_(weighted.is_null(), pa.array(num_weights == 1))
        weighted = pc.if_else(is_one, schema.missing_values[0], weighted)
    values, ends = _elements(weighted, column.split, schema.missing_values, way_out)
    lengths = np.diff(ends, prepend=0)
    is_right = num_weights == lengths
    if not is_right.all():
        row = int(np.argmin(is_right))
        rule = f"must have as many numbers as {name!r} has values, {lengths[row]}"
        raise _Fault(row, rule, way_out)
    flat, ends = _kept(flat, values, ends)
    with _naming_rows(ends):
        _require(flat.is_valid(), f"must have a number for each value of {name!r}", way_out)
        flat = _cast(flat, pa.float64(), "must be numbers", way_out).cast(pa.float32())
        _require(pc.is_finite(flat), "weights must be finite in float32", way_out)
    return _as_lists(flat, ends)


def _elements(
    array: pa.Array, split: str, missing_values: tuple[str, ...], way_out: str
) -> tuple[pa.Array, NDArray[np.int64]]:
    """The elements of all lists, null where one is missing, and where each list ends.

    `way_out` is for a column that has neither lists nor text.
    """
    types = pa.types
    is_text = types.is_string(array.type)
    if is_text:
        if not split and array.null_count < len(array):
            raise _Fault(None, "must be lists", "set split to the character between the values")
        array = pc.split_pattern(array, pattern=split or "|")
    if not (
        types.is_list(array.type)
        or types.is_large_list(array.type)
        or types.is_fixed_size_list(array.type)
    ):
        raise _Fault(None, "must be text or lists", way_out)
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    flat = plain(array.flatten())  # leaves out what null lists hold
    if is_text and missing_values:
        is_missing = pc.is_in(flat, value_set=pa.array(missing_values, pa.string()))
        flat = pc.if_else(is_missing, pa.scalar(None, flat.type), flat)
    return flat, np.cumsum(lengths, dtype=np.int64)


def _kept(
    flat: pa.Array, values: pa.Array, ends: NDArray[np.int64]
) -> tuple[pa.Array, NDArray[np.int64]]:
    """The elements whose values are not null, and where each list ends among them."""
    if not values.null_count:
        return flat, ends
    is_kept = values.is_valid()
    num_kept = np.concatenate([[0], np.cumsum(is_kept.to_numpy(zero_copy_only=False))])
    return flat.filter(is_kept), num_kept[ends]


def _as_lists(flat: pa.Array, ends: NDArray[np.int64], is_null: pa.Array | None = None) -> pa.Array:
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=is_null)


@contextmanager
def _naming_rows(ends: NDArray[np.int64]) -> Iterator[None]:
    """Let a fault of an element name the row of its list."""
    try:
        yield
    except _Fault as fault:
        if fault.row is not None:
            fault.row = int(np.searchsorted(ends, fault.row, side="right"))
        raise


def _label(array: pa.Array, rule: PositiveRule | None) -> pa.Array:
    if rule is not None and rule.text:
        if array.null_count == len(array):
            return pa.nulls(len(array), pa.int8())
        if not pa.types.is_string(array.type):
            rule_of_text = f"must be text, as positive is {f'== {rule.text}'!r}"
            way_out = "leave out positive for 0, 1, true and false, or set it to a rule for numbers"
            raise _Fault(None, rule_of_text, f'{way_out}, such as ">= 4"')
        return pc.equal(array, rule.text).cast(pa.int8())
    if rule is not None:
        way_out = "correct it, or leave the row out"
        number = plain(_cast(array, pa.float64(), "must be a number", way_out))
        compare = {
            "==": pc.equal,
            ">=": pc.greater_equal,
            ">": pc.greater,
            "<=": pc.less_equal,
            "<": pc.less,
        }[rule.comparison]
        return compare(number, rule.number).cast(pa.int8())
    if pa.types.is_boolean(array.type):
        return array.cast(pa.int8())
    if pa.types.is_nested(array.type):
        raise _Fault(None, "a label must be 0, 1, true or false", "take one value of each row")
    found = array.dictionary_encode()
    known = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}
    numbers = [known.get(str(each).lower(), -1) for each in found.dictionary.to_pylist()]
    label = pa.array(numbers, pa.int8()).take(found.indices)
    _require(
        pc.greater_equal(label, 0),
        "a label must be 0, 1, true or false",
        'correct it, or set positive to a rule, such as ">= 4" for numbers or "== yes" for text',
    )
    return label


def _weight(array: pa.Array) -> pa.Array:
    way_out = "correct it, or leave the row out"
    _require_valid(array, way_out)
    array = _cast(array, pa.float32(), "must be a number", way_out)
    is_right = pc.and_(pc.is_finite(array), pc.greater_equal(array, 0))
    _require(is_right, "a weight must be finite and at least 0", way_out)
    return array


def _seconds(array: pa.Array, form: str) -> pa.Array:
    types, way_out = pa.types, "correct it, or leave the row out"
    _require_valid(array, way_out)
    if "%" in form:
        text = _strings(array)
        read = pc.strptime(text, format=form, unit="s", error_is_null=True)
        way_out = "correct it, or set timestamp_format to the form of the column"
        _require(read.is_valid(), f"a time must have the form {form!r}", way_out)
        if "%Z" in form and "%z" not in form:
            rule = "the zone of a time must be UTC or GMT, as names of others are not read"
            way_out = "write offsets such as +01:00, with %z"
            _require(pc.match_substring_regex(text, _UTC), rule, way_out)
        if (row := first_misread(text, read, form)) >= 0:
            rule = f"a time must have the form {form!r}, with all digits and a day of its month"
            raise _Fault(row, rule, "correct it; write times as text: integers lose leading zeros")
        return read.cast(pa.int64())
    if types.is_string(array.type):
        array = _parse_times(array)
    if types.is_date(array.type):
        array = array.cast(pa.timestamp("s"))
    if types.is_timestamp(array.type):
        per_second = TIME_UNITS.get(array.type.unit, 1)
        return pa.array(array.cast(pa.int64()).to_numpy() // per_second)
    if types.is_floating(array.type):
        if not types.is_float64(array.type):
            rule = "floats of times must have 64 bits, as shorter ones are rounded"
            raise _Fault(None, rule, "read the column as integers or float64")
        _require(pc.is_finite(array), "a time must be finite", way_out)
        array = pc.floor(array)
    elif not _is_integer(array.type):
        raise _Fault(None, "must be seconds, ISO text or timestamps", "convert it")
    array = _cast(array, pa.int64(), "a time must be seconds since 1970", way_out)
    if not form and len(array) and (digits := date_form(array)):
        rule = f"a time must be seconds since 1970, not a date of the form {digits!r}"
        raise _Fault(0, rule, f'set timestamp_format to "{digits}"')
    if form:
        return pa.array(array.to_numpy() // TIME_UNITS[form])
    _require(
        pc.less(pc.abs(array), _FIRST_MILLISECONDS),
        "a time must be seconds since 1970",
        'set timestamp_format: "ms" for milliseconds, or the form of its digits',
    )
    return array


def _parse_times(array: pa.Array) -> pa.Array:
    """Times in text: integers, floats, or ISO with a zone or without one."""
    kinds = [
        pa.int64(),
        pa.float64(),
        pa.timestamp("us"),
        pa.timestamp("us", "UTC"),
        pa.timestamp("ns"),
        pa.timestamp("ns", "UTC"),
    ]
    likely = None
    for kind in kinds:
        with suppress(pa.ArrowInvalid):
            array[:1].cast(kind)
            likely = likely or kind
            return array.cast(kind)
    rule = "a time must be seconds since 1970 or ISO text, all in one form"
    return _cast(array, likely or kinds[2], rule, "correct it, or set timestamp_format")
