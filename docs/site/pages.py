"""Pages of the site that are no files of docs/: the front page, and those made from the code.

Links to files of examples/ lead to the page that shows them. Links to other files outside docs/
become their path in the project, since the site has no such files.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from example_files import PAGE, anchor, examples_page
from keys_and_commands import commands_page, keys_page
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

__all__ = ["on_files", "on_page_markdown"]

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (  # in an order in which `recsys`, which repeats some names of the others, comes last
    "recsys.embeddings",
    "recsys.pipeline",
    "recsys.models",
    "recsys.datasets",
    "recsys.train",
    "recsys.distributed",
    "recsys.errors",
    "recsys",
)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the front page and the pages made from the code."""
    readme = (_ROOT / "README.md").read_text("utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "reference/cli.md", content=commands_page()))
    files.append(File.generated(config, "reference/config.md", content=keys_page()))
    files.append(File.generated(config, PAGE, content=examples_page()))
    described: dict[int, str] = {}
    for package in _PACKAGES:
        page = f"reference/{package}.md"
        files.append(File.generated(config, page, content=_signatures(package, described)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files that the site has not by others, or by their path."""
    if page.file.src_uri == PAGE:
        return markdown  # its code may look like links
    here = Path(page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        text, target, _ = match.groups()
        if "://" in target:
            return match[0]
        found = files.get_file_from_path(_normal(here / target))
        if found is not None and found.inclusion.is_included():
            return match[0]
        # README.md, which is the front page, lies outside docs/.
        path = target if page.file.src_uri == "index.md" else _normal(Path("docs") / here / target)
        folder, _, example = path.partition("/")
        if folder == "examples" and (_ROOT / path).exists():
            return f"[{text}]({os.path.relpath(PAGE, here)}{anchor(example)})"
        is_named = text.strip("`") in (path, Path(path).name)
        return f"`{path}`" if is_named else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)


def _signatures(package: str, described: dict[int, str]) -> str:
    """A page with every public name of a package, or a link to the page that has it.

    Args:
        package: Name of the package.
        described: The page of every object so far, by its identity; the page's are added.
    """
    module = importlib.import_module(package)
    first_line = (module.__doc__ or "").strip().partition("\n")[0]
    parts = [f"# {package}\n\n{first_line}\n"]
    links = []
    for name in sorted(name for name in module.__all__ if not name.startswith("__")):
        value = getattr(module, name)
        path = f"{getattr(value, '__module__', package)}.{name}"
        if id(value) in described:
            links.append(f"- [`{name}`][{path}] of {described[id(value)]}\n")
            continue
        described[id(value)] = package
        parts.append(f"::: {path}\n")
    if links:
        parts.insert(1, "Also of this package:\n\n" + "".join(links))
    return "\n".join(parts)


def _normal(path: Path) -> str:
    """A path without `..`, as far as it stays below its first folder."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    # `docs/../examples` is a path of the project.
    return "/".join(parts)
