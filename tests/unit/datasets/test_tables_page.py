import re
from typing import get_args

import pytest

from recsys.datasets.tabular import schema as schema_parts
from recsys.datasets.tabular.schema import Schema, Split


def names(kind):
    return set(kind.model_fields)


TABLES = {"dense", "categorical", "multi", "sequence", "history", "split", "negatives"}
# The keys that each section lists in a table; the others are those of the section that it names.
SECTIONS = {
    "### The whole table": names(Schema) - TABLES,
    "### `[dense.": names(schema_parts.DenseColumn),
    "### `[categorical.": names(schema_parts.CategoricalColumn),
    "### `[multi.": names(schema_parts.MultiColumn) - names(schema_parts.ValueColumn),
    "### `[sequence.": set(),
    "### `[history.": names(schema_parts.HistoryColumn),
    "### `[negatives]`": names(schema_parts.Negatives),
}


@pytest.fixture
def page(pytestconfig):
    return (pytestconfig.rootpath / "docs" / "tables.md").read_text()


def section(page, title):
    return page.split(title, 1)[1].split("\n#", 1)[0]


@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_lists_every_key(page, title):
    listed = re.findall(r"^\| `(\w+)` \|", section(page, title), re.MULTILINE)
    assert set(listed) == SECTIONS[title]


def test_the_page_lists_every_split_and_its_keys(page):
    rows = re.findall(r'^\| `"(\w+)"` \| (.*)', section(page, "### `[split]`"), re.MULTILINE)
    listed = dict(rows)
    kinds = {
        by: kind for kind in get_args(Split) for by in get_args(kind.model_fields["by"].annotation)
    }
    assert listed.keys() == kinds.keys()
    for by, kind in kinds.items():
        assert names(kind) - {"by"} <= set(re.findall(r"`(\w+)`", listed[by])), by
