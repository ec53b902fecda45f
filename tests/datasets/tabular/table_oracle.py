"""What a store must hold, worked out row by row with pandas and plain Python."""

import math
from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pandas as pd

M = 2**64


def split_mix(state):
    state = (state + 0x9E3779B97F4A7C15) % M
    return finish_mix(state)


def finish_mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % M
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % M
    return z ^ (z >> 31)


def fnv(text):
    bits = 0xCBF29CE484222325
    for byte in text.encode():
        bits = (bits ^ byte) * 0x100000001B3 % M
    return bits


def hashed_row(value, num_rows):
    if value is None:
        value = ""
    return split_mix(fnv(value) if isinstance(value, str) else value % M) % num_rows


def is_missing(value):
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


class Expected:
    """The arrays of a store, for a frame of plain Python values and a schema as a dictionary."""

    def __init__(self, frame: pd.DataFrame, schema: dict):
        self.frame, self.schema, self.n = frame, schema, len(frame)
        rule = schema.get("positive")
        label = schema.get("label")
        values = frame[label].tolist() if label else [1] * self.n
        self.labels = [int(eval(f"{v} {rule}")) if rule else int(v) for v in values]
        self.parts = self._parts()
        self.order = [row for part in range(3) for row in range(self.n) if self.parts[row] == part]
        self.sizes = [self.parts.count(part) for part in range(3)]
        kinds = ("categorical", "multi", "sequence")
        self.columns = {name: keys for kind in kinds for name, keys in schema.get(kind, {}).items()}
        self.bags = {*schema.get("multi", {}), *schema.get("sequence", {})}
        self.vocabularies = {}
        for name, keys in self.columns.items():
            table = keys.get("table", name)
            self.vocabularies.setdefault(table, self._vocabulary(table))

    def in_time(self):
        """Rows by time; the order of the file where there is none."""
        rows = pd.DataFrame({"row": range(self.n)})
        time = self.schema.get("timestamp")
        rows["time"] = list(self.frame[time]) if time else 0
        return rows.sort_values("time", kind="stable")["row"].tolist()

    def _parts(self):
        split = self.schema.get("split", {"by": "fraction"})
        by = split["by"]
        if by == "column":
            lists = [split.get(key, []) for key in ("train", "test", "validation")]
            parts = [
                next(part for part in range(3) if str(value) in lists[part])
                for value in self.frame[split["column"]]
            ]
            return parts if "validation" in split else self._halved(parts)
        test, validation = (Fraction(str(split.get(k, "1/14"))) for k in ("test", "validation"))
        if by == "random":
            offset = finish_mix(split.get("seed", 0))
            draws = [
                (finish_mix((row * 0x9E3779B97F4A7C15 + offset) % M) >> 11) / 2**53
                for row in range(self.n)
            ]
            return [1 if u < test else 2 if u < test + validation else 0 for u in draws]
        if by == "last_one_out":
            positives = defaultdict(list)
            for row in self.in_time():
                if self.labels[row]:
                    positives[self.frame[self.schema["group"]][row]].append(row)
            parts = [0] * self.n
            for rows in positives.values():
                if len(rows) >= 3:
                    parts[rows[-1]], parts[rows[-2]] = 1, 2
            return parts
        if by == "timestamp" and "test_from" in split:
            times, first = self.frame[self.schema["timestamp"]].tolist(), split["test_from"]
            second = split.get("validation_from")
            if second is None:
                return self._halved([int(time >= first) for time in times])
            moments = {1: first, 2: second}
            return [
                max((part for part in moments if time >= moments[part]), key=moments.get, default=0)
                for time in times
            ]
        rows = self.in_time() if by == "timestamp" else list(range(self.n))
        held = math.floor(self.n * (test + validation))
        num_test = math.ceil(held * test / (test + validation)) if held else 0
        parts = [0] * self.n
        for place, row in enumerate(rows[self.n - held :]):
            parts[row] = 1 if place < num_test else 2
        return parts

    @staticmethod
    def _halved(parts):
        tests = [row for row, part in enumerate(parts) if part == 1]
        for row in tests[math.ceil(len(tests) / 2) :]:
            parts[row] = 2
        return parts

    def bag(self, name, row):
        """The values of a bag that are kept."""
        keys, values = self.columns[name], self.frame[name][row]
        values = [each for each in (values or []) if not is_missing(each)]
        most = keys.get("max_length", 0)
        if not most:
            return values
        return values[-most:] if name in self.schema.get("sequence", {}) else values[:most]

    def _vocabulary(self, table):
        """Rows by value, and the number of rows."""
        mine = {name: k for name, k in self.columns.items() if k.get("table", name) == table}
        keys = next(iter(mine.values()))
        if keys.get("numbering") == "hash":
            return None, keys["num_rows"]
        seen = []
        for row in range(self.n):
            if self.parts[row] == 0:
                for name in mine:
                    values = self.bag(name, row) if name in self.bags else [self.frame[name][row]]
                    seen += [each for each in values if not is_missing(each)]
        counts = Counter(seen)
        first = 2 if any(k.get("missing") == "own" for k in mine.values()) else 1
        kept = [value for value in counts if counts[value] >= keys.get("min_count", 1)]
        most = keys.get("max_rows", 0)
        if most:
            frequent = sorted(kept, key=lambda value: -counts[value])[: most - first]
            kept = [value for value in kept if value in frequent]
        return {value: first + place for place, value in enumerate(kept)}, first + len(kept)

    def row_of(self, name, value):
        keys = self.columns[name]
        rows, num_rows = self.vocabularies[keys.get("table", name)]
        if rows is None:
            return hashed_row(None if is_missing(value) else value, num_rows)
        if is_missing(value):
            return 1 if keys.get("missing") == "own" else 0
        return rows.get(value, 0)

    def histories(self, keys):
        """The rows of the history of each row of the frame."""
        earlier, result = defaultdict(list), [None] * self.n
        for row in self.in_time():
            group = self.frame[self.schema["group"]][row]
            result[row] = earlier[group][-keys.get("max_length", 20) :]
            if self.labels[row]:
                value = self.frame[keys["of"]][row]
                earlier[group] = [*earlier[group], self.row_of(keys["of"], value)]
        return result

    def features(self):
        """A list of rows for each feature and each sample, in the order of the store."""
        found = {}
        for name in self.columns:
            found[name] = [
                [self.row_of(name, each) for each in self.bag(name, row)]
                if name in self.bags
                else [self.row_of(name, self.frame[name][row])]
                for row in self.order
            ]
        for name, keys in self.schema.get("history", {}).items():
            histories = self.histories(keys)
            found[name] = [histories[row] for row in self.order]
        return found

    def dense(self):
        """(N, I) float64."""
        columns = []
        for name, keys in self.schema.get("dense", {}).items():
            values = pd.Series(self.frame[name].tolist(), dtype="float64")
            is_train = np.array(self.parts) == 0
            fill = keys.get("missing", 0.0)
            values = values.fillna(values[is_train].mean() if fill == "mean" else fill)
            if keys.get("transform") == "log":
                values = np.log(1 + values.clip(lower=0))
            elif keys.get("transform") == "standardize":
                deviation = values[is_train].std(ddof=0)
                if values[is_train].nunique() == 1:
                    deviation = 1.0
                values = (values - values[is_train].mean()) / deviation
            columns.append(values.to_numpy()[self.order])
        return np.stack(columns, axis=1) if columns else np.empty((self.n, 0))

    def groups(self):
        """Numbers of groups by first appearance in the file."""
        numbers, _ = pd.factorize(self.frame[self.schema["group"]])
        return numbers[self.order].tolist()
