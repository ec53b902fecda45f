"""`recsys prepare`, from raw files to stores."""

import pytest

from recsys.cli import main
from recsys.datasets.store import Store


def run_cli(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture
def raw(raw_line, tmp_path):
    file = tmp_path / "raw.txt"
    file.write_text(
        "".join(
            raw_line(
                str(line % 3 // 2),
                [str(line * column) for column in range(13)],
                [f"{line * line % (column + 2):x}" for column in range(26)],
            )
            + "\n"
            for line in range(70)
        )
    )
    return file


def test_days_become_a_store(raw, tmp_path, capsys):
    days = [tmp_path / f"day_{day}" for day in range(2)]
    for day in days:
        day.write_bytes(raw.read_bytes())

    assert (
        run_cli("prepare", "criteo-1tb", *days, "--out", tmp_path / "store", "--max-ind-range", 3)
        == 0
    )

    assert capsys.readouterr().out.startswith(f"{tmp_path / 'store'}: 140 samples, ")
    assert max(Store(tmp_path / "store").table_sizes.values()) == 3
