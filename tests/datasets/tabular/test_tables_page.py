import re
import tomllib
from dataclasses import fields

import pytest

from recsys.datasets.tabular import schema_parts
from recsys.datasets.tabular.named import NAMED_SCHEMAS
from recsys.datasets.tabular.schema import Schema

SECTIONS = {
    "### The whole table": Schema,
    "### `[dense.": schema_parts.DenseColumn,
    "### `[categorical.": schema_parts.CategoricalColumn,
    "### `[history.": schema_parts.HistoryColumn,
    "### `[negatives]`": schema_parts.Negatives,
}
COLUMNS = {"dense", "categorical", "multi", "sequence", "history", "split", "negatives"}


@pytest.fixture
def page(pytestconfig):
    return (pytestconfig.rootpath / "docs" / "tables.md").read_text()


@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_lists_every_key(page, title):
    section = page.split(title, 1)[1].split("\n#", 1)[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert listed == {each.name for each in fields(SECTIONS[title])} - COLUMNS


def test_the_page_names_every_named_schema(page):
    section = page.split("## Named schemas", 1)[1]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(NAMED_SCHEMAS)


def test_the_schema_of_the_page_is_valid(page):
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    schema = Schema.from_dict(tomllib.loads(text))
    assert (schema.label, list(schema.multi)) == ("click", ["tags"])
