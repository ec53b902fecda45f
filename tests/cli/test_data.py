"""`recsys prepare`, from raw files to stores."""

import pytest

from recsys.cli import main
from recsys.datasets.criteo.read import CriteoReader
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


def test_days_are_gone_on_with_by_the_same_command(raw, tmp_path, monkeypatch, capsys):
    days = [tmp_path / f"day_{day}" for day in range(2)]
    for day in days:
        day.write_bytes(raw.read_bytes())
    command = ("prepare", "criteo-1tb", *days, "--out", tmp_path / "store", "--max-ind-range", 3)
    read = CriteoReader.read

    def stop_at_day_1(self, path):
        if path == days[1]:
            raise KeyboardInterrupt
        return read(self, path)

    with monkeypatch.context() as patches:
        patches.setattr(CriteoReader, "read", stop_at_day_1)
        assert run_cli(*command) == 130
    capsys.readouterr()
    assert run_cli(*command) == 0

    samples, before = capsys.readouterr().out.splitlines()
    assert samples.startswith(f"{tmp_path / 'store'}: 140 samples, ")
    assert before == "1 of 2 days were prepared before"
    assert max(Store(tmp_path / "store").table_sizes.values()) == 3
