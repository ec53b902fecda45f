"""Public names, the code of docs/distributed.md and the example."""

import re
from statistics import mean

import pytest

torchrec = pytest.importorskip("torchrec")


def test_the_snippets_of_the_page_run(ranks, pytestconfig, tmp_path):
    text = (pytestconfig.rootpath / "docs" / "distributed.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)

    found = ranks("docs", snippets=snippets, folder=str(tmp_path))

    assert len(snippets) == 2
    assert all(rank["num_tiers"] for rank in found)
    assert not list((tmp_path / "rows").iterdir())  # scratch space, which ends with the ranks


def test_the_example_learns(ranks, pytestconfig):
    found = ranks("example", root=str(pytestconfig.rootpath))

    for losses, hits in found:
        assert mean(losses[-10:]) < mean(losses[:10]) - 0.02
        assert 0 < hits < 1
