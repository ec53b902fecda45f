"""The site is built from the docs and the docstrings, and no link in it is broken."""

import os
import subprocess
import sys

from recsys import embeddings


def test_the_site_is_built_without_a_warning(pytestconfig, tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}

    done = subprocess.run(
        command,
        cwd=pytestconfig.rootpath,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    signatures = (tmp_path / "reference/recsys.embeddings/index.html").read_text("utf-8")
    for name in embeddings.__all__:
        assert f".{name}" in signatures
    assert "fonts.googleapis" not in (tmp_path / "index.html").read_text("utf-8")
