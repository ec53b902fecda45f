import warnings

import pytest
from tqdm import tqdm

from recsys.datasets.tabular.prepare import prepare_table
from recsys.datasets.tabular.schema import Schema

pytest.importorskip("pyarrow")


def test_no_progress_bar_is_drawn_where_a_warning_is_printed(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("click,ad\n1,a\n1,b\n")
    (tmp_path / ".store.12345678").mkdir()  # as a killed preparation leaves it
    schema = Schema.from_dict({"label": "click", "categorical": {"ad": {}}})
    bars = []

    def look(*_):
        bars.append([bar for bar in tqdm._instances if bar.desc.startswith("prepare")])

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", look)
        prepare_table([tmp_path / "a.csv"], tmp_path / "store", schema, show_progress=True)

    assert bars == [[]]
