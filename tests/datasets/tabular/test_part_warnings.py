import warnings

import pytest
from tqdm import tqdm

from recsys.datasets.tabular.prepare import prepare_table
from recsys.datasets.tabular.schema import Schema

pytest.importorskip("pyarrow")


def test_no_progress_bar_is_drawn_where_a_warning_is_printed(tmp_path, monkeypatch):
    rows = "".join(f"{user},{ad},{ad % 2}\n" for user in range(9) for ad in range(5))
    (tmp_path / "a.csv").write_text("user,ad,genre\n" + rows)  # a genre belongs to its ad
    columns = {"categorical": {"ad": {}, "genre": {}}, "negatives": {"item": "ad"}}
    schema = Schema.from_dict({"group": "user", **columns})
    bars = []

    def look(*_):
        bars.append([bar for bar in tqdm._instances if bar.desc.startswith("prepare")])

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", look)
        prepare_table([tmp_path / "a.csv"], tmp_path / "store", schema, show_progress=True)

    assert bars == [[]]
