"""The page of the site that shows the files of examples/."""

from __future__ import annotations

import re
from pathlib import Path

from markdown.extensions.toc import slugify

__all__ = ["EXAMPLES", "PAGE", "anchor", "examples_page"]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAGE = "reference/examples.md"
_LANGUAGES = {".py": "python", ".toml": "toml"}
_LINK = re.compile(r"\]\(([^):]+)\)")


def anchor(path: str) -> str:
    """The part of the page with a file or folder of examples/, as `#...`; of README.md, nothing.

    Args:
        path: Relative to examples/.
    """
    return "" if path in ("", "README.md") else f"#{slugify(path, '-')}"


def examples_page() -> str:
    """The page: README.md of examples/, then every file under its path."""
    readme = (EXAMPLES / "README.md").read_text("utf-8")
    parts = [_LINK.sub(_from_the_page, readme)]
    files = [file for file in EXAMPLES.rglob("*") if file.suffix in _LANGUAGES]
    folders: list[Path] = []
    for file in sorted(files, key=lambda file: (file.parent, file.name)):
        is_at_top = file.parent == EXAMPLES
        if not is_at_top and file.parent not in folders:
            folders.append(file.parent)
            parts.append(f"## {file.parent.relative_to(EXAMPLES)}\n")
        heading = f"{'##' if is_at_top else '###'} {file.relative_to(EXAMPLES)}"
        code = file.read_text("utf-8")
        parts.append(f"{heading}\n\n````{_LANGUAGES[file.suffix]}\n{code}````\n")
    return "\n".join(parts)


def _from_the_page(match: re.Match[str]) -> str:
    """A link of README.md, as it is from the page."""
    target = match[1]
    return f"](../{target.removeprefix('../docs/')})" if "../" in target else f"]({anchor(target)})"
