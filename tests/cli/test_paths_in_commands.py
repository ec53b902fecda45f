"""The commands that messages name work as they are, also where a path has spaces."""

import pytest

from recsys.cli import main


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["evaluate", "no run"], "recsys train DATA --run 'no run'"),
        (["evaluate", "its run"], "recsys train --run 'its run' --resume"),
        (["train", "--run", "no run", "--resume"], "recsys train STORE --run 'no run' --resume"),
        (["train", "no store"], "recsys prepare criteo-kaggle RAW --out 'no store'"),
        (["train", "my table.csv"], "recsys inspect 'my table.csv' > schema.toml"),
        (
            ["prepare", "criteo-kaggle", "my table.csv", "--out", "store"],
            "recsys prepare table 'my table.csv' --schema schema.toml",
        ),
        (
            ["plan", "its run", "--budget", "1MiB", "--out", "plan"],
            "recsys profile 'its run' --out PROFILE.npz",
        ),
    ],
)
def test_a_command_in_an_error_quotes_its_paths(arguments, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my table.csv").write_text("label,item\n1,2\n")
    (tmp_path / "its run").mkdir()
    (tmp_path / "its run" / "config.toml").write_text("")

    assert main(arguments) == 2

    assert command in capsys.readouterr().err
