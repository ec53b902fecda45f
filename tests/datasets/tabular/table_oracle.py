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
        names = schema.get("labels") or ([schema["label"]] if "label" in schema else [])
        self.labels = [
            [int(eval(f"{v} {rule}")) if rule else int(v) for v in row]
            for row in zip(*(frame[name].tolist() for name in names), strict=True)
        ] or [[1]] * self.n
        self.times = self._times()
        self.is_sample = [self.holds(schema.get("filter", {}), row) for row in range(self.n)]
        self.parts = self._parts()
        self.num_train = sum(self.is_train(row) for row in range(self.n))
        kinds = ("categorical", "multi", "sequence")
        self.columns = {name: keys for kind in kinds for name, keys in schema.get(kind, {}).items()}
        self.bags = {*schema.get("multi", {}), *schema.get("sequence", {})}
        self.vocabularies = {}
        for name, keys in self.columns.items():
            table = keys.get("table", name)
            self.vocabularies.setdefault(table, self._vocabulary(table))
        self.samples = self._samples()
        self.order = [row for row, _ in self.samples]
        self.sizes = [[self.parts[row] for row in self.order].count(part) for part in range(3)]

    def is_train(self, row):
        return self.parts[row] == 0 and self.is_sample[row]

    def _times(self):
        """Seconds of each row; None without times."""
        if "timestamp" not in self.schema:
            return None
        ticks = {"ms": 1000}.get(self.schema.get("timestamp_format"), 1)
        return [time // ticks for time in self.frame[self.schema["timestamp"]].tolist()]

    def in_time(self):
        """Rows by time; the order of the file where there is none."""
        rows = pd.DataFrame({"row": range(self.n), "time": self.times or 0})
        return rows.sort_values("time", kind="stable")["row"].tolist()

    def holds(self, where, row):
        """Whether a row keeps a condition; nothing holds of a missing value."""
        for column, given in where.items():
            value = self.frame[column][row]
            allowed = given if isinstance(given, list) else [given]
            if is_missing(value):
                return False
            if str(allowed[0])[0] in "<=>":
                if not eval(f"{value} {allowed[0]}"):
                    return False
            elif str(value) not in map(str, allowed):
                return False
        return True

    def _parts(self):
        """The part of every row, those that are no samples included."""
        split = self.schema.get("split", {"by": "fraction"})
        by, kept = split["by"], self.is_sample
        if by == "column":
            lists = [split.get(key, []) for key in ("train", "test", "validation")]
            parts = [
                next(part for part in range(3) if str(value) in lists[part])
                for value in self.frame[split["column"]]
            ]
            tests = [row for row, part in enumerate(parts) if part == 1 and kept[row]]
            for row in tests[: 0 if "validation" in split else len(tests) // 2]:
                parts[row] = 2
            return parts
        test, validation = (Fraction(str(split.get(k, "1/14"))) for k in ("test", "validation"))
        if by in ("random", "group"):
            users = self.frame[self.schema["group"]]
            numbers = range(self.n)
            if by == "group":
                numbers = [hashed_row(str(user), 2**31 - 1) for user in users]
            offset = finish_mix(split.get("seed", 0))
            draws = [
                (finish_mix((number * 0x9E3779B97F4A7C15 + offset) % M) >> 11) / 2**53
                for number in numbers
            ]
            return [1 if u < test else 2 if u < test + validation else 0 for u in draws]
        if by == "last_one_out":
            positives = defaultdict(list)
            for row in self.in_time():
                if kept[row]:
                    positives[self.frame[self.schema["group"]][row]].append(row)
            parts = [0] * self.n
            for rows in positives.values():
                if len(rows) >= 3:
                    parts[rows[-1]], parts[rows[-2]] = 1, 2
            return parts
        rows = self.in_time() if by == "timestamp" else list(range(self.n))
        num_samples = sum(kept)
        held = math.floor(num_samples * (test + validation))
        num_test = math.ceil(held * test / (test + validation)) if held else 0
        num_validation = held - num_test
        if "test_from" in split:
            num_test = sum(
                self.times[row] >= split["test_from"] for row in range(self.n) if kept[row]
            )
            num_validation = math.floor(num_samples * validation)
        parts, number, part = [0] * self.n, 0, 0
        for row in rows:
            if kept[row]:
                number += 1
                part = 0
                if number > num_samples - num_test - num_validation:
                    part = 2
                if number > num_samples - num_test:
                    part = 1
            parts[row] = part
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
            if self.is_train(row):
                for name in mine:
                    values = self.bag(name, row) if name in self.bags else [self.frame[name][row]]
                    seen += [each for each in values if not is_missing(each)]
        for history in self.schema.get("history", {}).values():
            if "where" in history and history["of"] in mine:
                values = [
                    self.frame[history["of"]][row]
                    for row in range(self.n)
                    if self.parts[row] == 0
                    and not self.is_sample[row]
                    and self.holds(history["where"], row)
                ]
                seen += [value for value in values if not is_missing(value)]
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

    def _samples(self):
        """The row of each sample, and the row of its item if it is a negative, else None."""
        found = []
        for part in (0, 2, 1):
            for row in range(self.n):
                if self.parts[row] == part and self.is_sample[row]:
                    found.append((row, None))
                    if part == 0 and "negatives" in self.schema:
                        found += [(row, item) for item in self._negatives(row)]
        return found

    def num_negatives(self):
        return sum(item is not None for _, item in self.samples)

    def has_repeats(self):
        histories = self.schema.get("history", {}).values()
        return any(keys["of"] == self.schema["negatives"]["item"] for keys in histories)

    def train_items(self):
        """The items of the training part and how often they are there, by row of their table."""
        name = self.schema["negatives"]["item"]
        first = 2 if self.columns[name].get("missing") == "own" else 1
        rows = [self.item(row) for row in range(self.n) if self.is_train(row)]
        return sorted(Counter(row for row in rows if row >= first).items())

    def item(self, row):
        name = self.schema["negatives"]["item"]
        return self.row_of(name, self.frame[name][row])

    def _negatives(self, row):
        """The items of the negatives of a row: those that can be drawn."""
        keys, groups = self.schema["negatives"], self.frame[self.schema["group"]]
        items, counts = zip(*(self.train_items() or [(0, 0)]), strict=True)
        known = {self.item(row)}
        if not self.has_repeats():
            known = {
                self.item(other)
                for other in range(self.n)
                if self.is_train(other) and groups[other] == groups[row]
            }
        if not set(items) - known - {0}:
            return []
        weights = np.array(counts) ** (0.75 if keys.get("by") == "popularity" else 0.0)
        ends = np.cumsum(weights)
        drawn = []
        for number in range(keys.get("per_positive", 4)):
            state = finish_mix((finish_mix(keys.get("seed", 0)) + row) % M)
            state = finish_mix((state + number) % M)
            for draw in range(256):
                bits = finish_mix((state + (draw + 1) * 0x9E3779B97F4A7C15) % M)
                place = int(np.searchsorted(ends, (bits >> 11) / 2**53 * ends[-1], side="right"))
                if items[place] not in known:
                    break
            while items[place] in known:
                place = (place + 1) % len(items)
            drawn.append(items[place])
        return drawn

    def catalog_row(self, name, item):
        """What an item column looks up in the last training row of an item."""
        rows = [r for r in range(self.n) if self.is_train(r) and self.item(r) == item]
        return self.row_of(name, self.frame[name][rows[-1]])

    def histories(self, keys, is_new=False):
        """The rows of the history of each row of the frame.

        With `is_new`, the rows are those of a store that is like another: none is for training.
        """
        groups, in_time = self.frame[self.schema["group"]], self.in_time()
        has_both = "negatives" not in self.schema and self.times is not None
        result = [None] * self.n
        for place, row in enumerate(in_time):
            is_free = is_new or self.parts[row] != 0
            earlier = [
                other
                for other in in_time[:place]
                if groups[other] == groups[row]
                and self.is_listed(keys, other)
                and (is_free or self.parts[other] == 0)
                and not (has_both and self.times[other] == self.times[row])
            ]
            values = [self.row_of(keys["of"], self.frame[keys["of"]][other]) for other in earlier]
            result[row] = values[-keys.get("max_length", 20) :]
        return result

    def is_listed(self, keys, row):
        if "where" in keys:
            return self.holds(keys["where"], row)
        return self.is_sample[row] and any(self.labels[row])

    def features(self, is_new=False):
        """A list of rows for each feature and each sample, in the order of the store.

        With `is_new`, the samples are the rows of the frame that the filter keeps.
        """
        samples = [(row, None) for row in self.kept()] if is_new else self.samples
        negatives = self.schema.get("negatives", {})
        found = {}
        for name in self.columns:
            found[name] = lists = []
            for row, item in samples:
                if item is not None and name == negatives["item"]:
                    lists.append([item])
                elif item is not None and name in negatives.get("item_columns", ()):
                    lists.append([self.catalog_row(name, item)])
                elif name in self.bags:
                    lists.append([self.row_of(name, each) for each in self.bag(name, row)])
                else:
                    lists.append([self.row_of(name, self.frame[name][row])])
        for name, keys in self.schema.get("history", {}).items():
            histories = self.histories(keys, is_new)
            found[name] = [histories[row] for row, _ in samples]
        return found

    def kept(self):
        return [row for row in range(self.n) if self.is_sample[row]]

    def sample_labels(self):
        labels = [self.labels[row] if item is None else [0] for row, item in self.samples]
        return labels if "labels" in self.schema else [label for (label,) in labels]

    def dense(self):
        """(N, I) float64."""
        columns = []
        for name, keys in self.schema.get("dense", {}).items():
            values = pd.Series(self.frame[name].tolist(), dtype="float64")
            is_train = np.array([self.is_train(row) for row in range(self.n)])
            fill = {"error": 0.0}.get(keys.get("missing"), keys.get("missing", 0.0))
            values = values.fillna(values[is_train].mean() if fill == "mean" else fill)
            if keys.get("transform") == "log":
                values = np.log(1 + values.clip(lower=0))
            elif keys.get("transform") == "standardize":
                deviation = values[is_train].std(ddof=0)
                if values[is_train].nunique() == 1:
                    deviation = 1.0
                values = (values - values[is_train].mean()) / deviation
            columns.append(values.to_numpy()[self.order])
        return np.stack(columns, axis=1) if columns else np.empty((len(self.order), 0))

    def groups(self):
        """Numbers of groups, by first appearance in the file, of each sample."""
        numbers, _ = pd.factorize(self.frame[self.schema["group"]])
        return numbers[self.order].tolist()
