"""The size gate of `make check` complains where a count has risen, and lowers what has fallen."""

import ast
import copy
import tomllib

import pytest

from tests import house

LIMITS = {
    "public": ["recsys"],
    "rooms": {"recsys/batch": {"statements": 10, "goal": 8}},
    "folders": {"recsys": {"statements": 100, "begin": {"statements": 200, "tokens": 2000}}},
    "only_fall": {"calls_of_a_resident_step": 60},
}


def counted(room=10, statements=100, tokens=1000, calls=60):
    return {
        "rooms": {"recsys/batch": {"statements": room}},
        "folders": {"recsys": {"statements": statements, "tokens": tokens}},
        "only_fall": {"calls_of_a_resident_step": calls},
    }


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (counted(room=11), "recsys/batch has 11"),
        (counted(statements=101), "recsys has 101"),
        (counted(tokens=1101), "tokens by only"),
        (counted(calls=61), "calls_of_a_resident_step: 61"),
    ],
)
def test_a_count_that_rises_is_named(now, named):
    (complaint,) = house.complaints(LIMITS, now)
    assert named in complaint


def test_a_room_may_rise_for_a_reason_and_no_further():
    raised = LIMITS["rooms"]["recsys/batch"] | {"raised": 2, "reason": "ids of 32 bits"}
    limits = LIMITS | {"rooms": {"recsys/batch": raised}}

    assert [*house.complaints(limits, counted(room=12))] == []
    assert [*house.complaints(limits, counted(room=13))] != []
    del raised["reason"]
    assert [*house.complaints(limits, counted(room=12))] != []


def test_lowering_writes_what_has_fallen(tmp_path, monkeypatch):
    file = tmp_path / "house.toml"
    file.write_text("# what it is\n\n")
    monkeypatch.setattr(house, "HOUSE", file)
    limits = copy.deepcopy(LIMITS)

    house.lower(limits, counted(room=9, statements=90, tokens=900, calls=50))

    written = tomllib.loads(file.read_text())
    assert written["rooms"]["recsys/batch"] == {"statements": 9, "goal": 8}
    assert written["folders"]["recsys"]["statements"] == 90
    assert written["only_fall"] == {"calls_of_a_resident_step": 50}


def test_statements_and_tokens_leave_out_comments_and_docstrings_only():
    text = '"""What it is."""\n\nX = 1  # one\n\n\ndef f():\n    """F."""\n    return X\n'
    tree = ast.parse(text)

    assert house.num_statements(tree) == 5
    assert house.num_tokens(text, tree) == 10  # X = 1 def f ( ) : return X


def test_an_import_for_types_only_closes_a_circle():
    modules = {"recsys.a", "recsys.b", "recsys.c"}
    trees = {
        "recsys.a": "from recsys.b import x",
        "recsys.b": "if TYPE_CHECKING:\n    from recsys import a",
        "recsys.c": "import recsys.a",
    }
    imports = {name: house.imports_of(ast.parse(text), modules) for name, text in trees.items()}
    assert house.files_on_circles(imports) == ["recsys.a", "recsys.b"]


def test_a_private_import_counts_outside_the_unit_tests_alone():
    tree = ast.parse("from recsys.tiers.slots import Slots\nfrom recsys import accelerate")
    assert house.private_imports({"tests/test_a.py": tree}, {"recsys"}) == 1
    assert house.private_imports({"tests/unit/test_a.py": tree}, {"recsys"}) == 0
