"""Record batches of any types become record batches of the schema's types, and are checked.

    meaning                 type                    nulls
    ----------------------  ----------------------  --------------------------------
    label: /label/0, ...    int8, 0 or 1            -1
    weight: /weight         float32, at least 0     none
    timestamp: /time        int64, seconds          none
    group: /group           int64 or string         none
    of the split: /part     uint8, place in SPLITS  none
    dense                   float64, finite         missing; none with missing "error"
    categorical             int64, string or a      missing; none with missing "error"
                            dictionary of strings
    multi, sequence         list of these           a null list is an empty one; no null elements
    a condition on rows     bool                    none

A column with two meanings, such as a categorical one that is the group, is in the batch twice.
Empty text and nan are missing. Booleans are integers, 1 for true. They are no text, because text
files write them in several ways; only the column of the split and conditions take them as true and
false. Decimals of whole numbers, as databases write ids, are integers. Files and frames both pass
through `conform`, so the same values give the same batch.
"""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from recsys.datasets.tabular.schema import (
    GROUP,
    NO_LABEL,
    PART,
    TIME,
    TIME_UNITS,
    WEIGHT,
    CategoricalColumn,
    DenseColumn,
    Rule,
    rule_of,
)
from recsys.errors import DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from recsys.datasets.tabular.schema import Schema

__all__ = ["conform", "is_list", "plain"]

_FIRST_MILLISECONDS = 100_000_000_000  # as seconds: the year 5138
_CORRECT = "correct it, or leave the row out"
_FILL_IN = "fill it in, or leave the row out"
_COMPARISONS = {
    "==": pc.equal,
    ">=": pc.greater_equal,
    ">": pc.greater,
    "<=": pc.less_equal,
    "<": pc.less,
}


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
        optional: Labels and groups may have nulls if they are named here; those of labels become
            `NO_LABEL`.

    Returns:
        The features and roles of the schema that the batch has, and whether each of its conditions
        holds.

    Raises:
        DatasetFormatError: a column has a type, or a value, that its meaning does not accept. The
            message names row, column, rule, value and hint.
    """
    found, arrays = set(batch.schema.names), {}
    features = {name: name for name in (*schema.dense, *schema.value_columns)}
    for meaning, name in (features | schema.roles).items():
        if name in found:
            with _explained(batch, name, place):
                arrays[meaning] = _convert(
                    batch.column(name), meaning, schema, may_be_null=name in optional
                )
    for condition, where in schema.conditions.items():
        holds = [_holds(batch, name, texts, place) for name, texts in where.items()]
        arrays[condition] = reduce(pc.and_, holds)
    return pa.RecordBatch.from_pydict(arrays)


class _Fault(Exception):
    """What a column breaks: the row of the batch (None: all of them), the rule, the hint."""

    def __init__(self, row: int | None, rule: str, hint: str) -> None:
        super().__init__(rule)
        self.row, self.rule, self.hint = row, rule, hint


@contextmanager
def _explained(batch: pa.RecordBatch, name: str, location: Callable[[int], str]) -> Iterator[None]:
    """Let a fault of a column say where it is, and the value."""
    try:
        yield
    except _Fault as fault:
        array = batch.column(name)
        value = array.type if fault.row is None else repr(array[fault.row].as_py())[:60]
        raise DatasetFormatError(
            f"{location(fault.row or 0)}, column {name!r}: {fault.rule}, got {value}; {fault.hint}"
        ) from None


def _holds(
    batch: pa.RecordBatch, name: str, texts: tuple[str, ...], location: Callable[[int], str]
) -> pa.Array:
    """Whether a column has one of the values of a condition, or keeps its rule; not if missing."""
    array, rule = plain(batch.column(name)), rule_of(texts)
    with _explained(batch, name, location):
        if rule is None:
            found = _cast(array, pa.string(), "must hold one value in each row", "name another")
            return pc.is_in(found, value_set=pa.array(texts, pa.string())).fill_null(False)
        return _compare(array, rule).fill_null(False)


def _convert(array: pa.Array, meaning: str, schema: Schema, *, may_be_null: bool) -> pa.Array:
    column: Any = schema.dense.get(meaning) or schema.value_columns.get(meaning)
    must_be_known = getattr(column, "missing", "") == "error"
    is_text = isinstance(column, CategoricalColumn) and column.values == "string"
    if is_text and types.is_dictionary(array.type) and not must_be_known:
        values = plain(array.dictionary)
        if types.is_string(values.type) and 2 * len(values) < len(array):
            return pa.DictionaryArray.from_arrays(array.indices, values)
    array = plain(array)
    if column is None:
        must_be_known = not may_be_null
    if isinstance(column, DenseColumn):
        array = _dense(array)
    elif isinstance(column, CategoricalColumn):
        array = _values(array, column.values)
    elif column is not None:
        return _lists(array, column.values, column.split, schema.missing_values)
    elif meaning == TIME:
        array = _seconds(array, schema.timestamp_format)
    elif meaning == WEIGHT:
        array = _cast(array, pa.float32(), "must be a number", _CORRECT)
        is_right = pc.and_(pc.is_finite(array), pc.greater_equal(array, 0))
        _require(is_right, "a weight must be finite and at least 0", _CORRECT)
    elif meaning == GROUP:
        # Unsigned integers, such as hashes, may be too large for `_integers`.
        is_number = types.is_integer(array.type) or types.is_floating(array.type)
        array = (_integers if is_number and not types.is_uint64(array.type) else _strings)(array)
    elif meaning == PART:
        array = _part(array, schema.split)
    else:
        array = _label(array, schema.positive_rule)
    if must_be_known:
        hint = f'{_FILL_IN}, or set missing to something other than "error"'
        _require(array.is_valid(), "must have a value", hint)
    return array.fill_null(NO_LABEL) if meaning.startswith("/label/") else array


def _part(array: pa.Array, split: Any) -> pa.Array:
    """The position of the list in which a column split has each value."""
    values = [value for part in split.parts for value in part]
    texts = _strings(array.cast(pa.string()) if types.is_boolean(array.type) else array)
    positions = pc.index_in(texts, pa.array(values, pa.string()))
    _require(positions.is_valid(), f"must be one of {values}", "list its value in [split]")
    codes = np.repeat(np.arange(3, dtype=np.uint8), [len(part) for part in split.parts])
    return pa.array(codes).take(positions)


def plain(array: pa.Array) -> pa.Array:
    """Without dictionary encoding or a large or view type; nulls for empty text and nan.

    Decimals of whole numbers become text, which is read as integers where these are wanted.
    """
    kind = array.type
    if types.is_dictionary(kind):
        return plain(array.dictionary_decode())
    if types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind):
        array, kind = array.cast(pa.string()), pa.string()
    if types.is_string(kind) or types.is_floating(kind):
        is_text = types.is_string(kind)
        is_missing = pc.equal(pc.binary_length(array), 0) if is_text else pc.is_nan(array)
        if pc.any(is_missing).as_py():
            array = pc.if_else(is_missing, pa.scalar(None, kind), array)
    elif types.is_decimal(kind) and kind.scale == 0:
        array = array.cast(pa.string())
    return array


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is one of Arrow's lists; maps are none."""
    return any(
        is_kind(kind)
        for is_kind in (
            types.is_list,
            types.is_large_list,
            types.is_fixed_size_list,
            types.is_list_view,
            types.is_large_list_view,
        )
    )


def _require(is_right: pa.Array, rule: str, hint: str) -> None:
    """Raise for the first row whose `is_right` is False; null is right."""
    row = pc.index(is_right, False).as_py()
    if row >= 0:
        raise _Fault(row, rule, hint)


def _cast(array: pa.Array, kind: pa.DataType, rule: str, hint: str) -> pa.Array:
    """Cast, or name the first row that cannot be cast. Integers become the nearest floats."""
    try:
        return array.cast(kind, safe=not (types.is_floating(kind) and types.is_integer(array.type)))
    except pa.ArrowNotImplementedError:
        raise _Fault(None, rule, hint) from None
    except pa.ArrowInvalid:
        low, high = 0, len(array)  # the first bad row is in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                array[low:middle].cast(kind)
                low = middle
            except pa.ArrowInvalid:
                high = middle
        raise _Fault(low, rule, hint) from None


def _dense(array: pa.Array) -> pa.Array:
    hint = "correct it, leave the value out, or make the column categorical"
    array = plain(_cast(array, pa.float64(), "must be a number", hint))
    is_right = pc.is_finite(array.cast(pa.float32(), safe=False))
    _require(is_right, "must be a finite number of float32", "correct it, or leave the value out")
    return array


def _values(array: pa.Array, values: str) -> pa.Array:
    return _integers(array) if values == "integer" else _strings(array)


def _integers(array: pa.Array) -> pa.Array:
    if types.is_temporal(array.type):
        raise _Fault(None, "must be integers", "convert it to integers")
    if types.is_floating(array.type):
        bits = np.finfo(array.type.to_pandas_dtype()).nmant + 1
        _require(
            pc.less(pc.abs(array.cast(pa.float64())), 2.0**bits),
            f"an integer in a column of {array.type} must be below 2^{bits}, as larger ones are "
            "rounded",
            'read the column as integers, such as by dtype "Int64" of pandas, or as text',
        )
    hint = "correct it" + ', or set values to "string"' * (not types.is_floating(array.type))
    return _cast(array, pa.int64(), "must be a signed integer of 64 bits", hint)


def _strings(array: pa.Array) -> pa.Array:
    kind = array.type
    is_empty = types.is_floating(kind) and array.null_count == len(array)  # as of a frame
    if not (types.is_string(kind) or types.is_integer(kind) or is_empty):
        # As text, true would be "true" or "True", and 3 would be "3.0".
        hint = (
            'convert it to text or, as by .astype("Int64") of pandas, integers; lists are for multi'
        )
        hint = 'set values to "integer", or convert it to text' if types.is_boolean(kind) else hint
        raise _Fault(None, "must be text or integers", hint)
    return array.cast(pa.string())


def _lists(array: pa.Array, values: str, split: str, missing_values: tuple[str, ...]) -> pa.Array:
    """Lists without missing elements, which split text may name; null lists stay."""
    is_text = types.is_string(array.type)
    if is_text:
        if not split and array.null_count < len(array):
            raise _Fault(None, "must be lists", "set split to the character between the values")
        array = pc.split_pattern(array, pattern=split or "|")
    if not is_list(array.type):
        is_nested = types.is_nested(array.type)
        hint = "write its keys as lists" if is_nested else "make the column categorical"
        raise _Fault(None, "must be text or lists", hint)
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths, dtype=np.int64)
    flat = plain(array.flatten())  # leaves out what null lists hold
    if is_text and missing_values:
        is_missing = pc.is_in(flat, value_set=pa.array(missing_values, pa.string()))
        flat = pc.if_else(is_missing, pa.scalar(None, flat.type), flat)
    try:
        flat = _values(flat, values)
    except _Fault as fault:
        if fault.row is not None:  # of an element: name the row of its list
            fault.row = int(np.searchsorted(ends, fault.row, side="right"))
        raise
    if flat.null_count:
        num_kept = np.cumsum(flat.is_valid().to_numpy(zero_copy_only=False))
        ends = np.concatenate([[0], num_kept])[ends]
        flat = flat.drop_null()
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    return pa.ListArray.from_arrays(
        offsets, flat, mask=array.is_null() if array.null_count else None
    )


def _compare(array: pa.Array, rule: Rule) -> pa.Array:
    """Whether each value keeps a rule, bool; null where it is missing."""
    if isinstance(rule.value, str):
        if array.null_count < len(array) and not types.is_string(array.type):
            hint = 'leave out positive for 0, 1, true and false, or set it to ">= 4", say'
            raise _Fault(None, f"must be text, as its rule is {f'== {rule.value}'!r}", hint)
        return pc.equal(array.cast(pa.string()), rule.value)
    number = plain(_cast(array, pa.float64(), "must be a number", _CORRECT))
    return _COMPARISONS[rule.comparison](number, rule.value)


def _label(array: pa.Array, rule: Rule | None) -> pa.Array:
    if rule is not None:
        return _compare(array, rule).cast(pa.int8())
    fault = "a label must be 0, 1, true or false"
    hint = 'correct it, or set positive to a rule, such as ">= 4" for numbers or "== yes" for text'
    texts = pc.utf8_lower(_cast(array, pa.string(), fault, hint))
    positions = pc.index_in(texts, pa.array(["0", "0.0", "false", "1", "1.0", "true"]))
    _require(pc.or_(positions.is_valid(), array.is_null()), fault, hint)
    return pc.greater_equal(positions, 3).cast(pa.int8())


def _seconds(array: pa.Array, form: str) -> pa.Array:
    _require(array.is_valid(), "must have a value", _FILL_IN)
    if "%" in form:
        return _parse_form(_strings(array), form)
    if types.is_string(array.type):
        array = _parse_times(array)
    if types.is_date(array.type):
        array = array.cast(pa.timestamp("s"))
    if types.is_timestamp(array.type):
        per_second = TIME_UNITS.get(array.type.unit, 1)
        return pa.array(array.cast(pa.int64()).to_numpy() // per_second)
    array = _integers(pc.floor(array) if types.is_float64(array.type) else array)
    if form:
        return pa.array(array.to_numpy() // TIME_UNITS[form])
    _require(
        pc.less(pc.abs(array), _FIRST_MILLISECONDS),
        "a time must be seconds since 1970, ISO text or a timestamp",
        'set timestamp_format: "ms" for milliseconds, or the form of its digits',
    )
    return array


def _parse_form(text: pa.Array, form: str) -> pa.Array:
    """Seconds of text of a form."""
    read = pc.strptime(text, format=form, unit="s", error_is_null=True)
    _require(
        read.is_valid(),
        f"a time must have the form {form!r}",
        "correct it, or set timestamp_format to the form of the column",
    )
    if re.fullmatch("(%[YymdHMS])+", form):  # Arrow reads 1152025 under %m%d%Y as November 5
        is_whole = pc.equal(pc.utf8_length(text), len(form) + 2 * form.count("Y"))
        hint = "write times as text: integers lose leading zeros"
        _require(is_whole, f"a time must have all digits of the form {form!r}", hint)
    return read.cast(pa.int64())


def _parse_times(array: pa.Array) -> pa.Array:
    """Times in text: integers, floats, or ISO with a zone or without one."""
    kinds = [pa.int64(), pa.float64()]
    kinds += [pa.timestamp(unit, zone) for unit in ("us", "ns") for zone in (None, "UTC")]
    for kind in kinds:
        with suppress(pa.ArrowInvalid):
            return array.cast(kind)
    is_number = pc.match_substring_regex(array[:1], "^[0-9.]+$")[0].as_py()
    rule = "a time must be seconds since 1970 or ISO text, all in one form"
    hint = "correct it, or set timestamp_format"
    return _cast(array, kinds[1] if is_number else kinds[2], rule, hint)
