"""The commands that documents show, and the words of a command line that they stand for."""

import re
import shlex
from itertools import takewhile
from typing import NamedTuple

_PROGRAM = re.compile(  # with what may stand before it
    r"^(?:\$ )?(?:cd \S+ && )?(?:[A-Z_]+=\S+ )*"
    r"(?:\.venv/bin/|\$\(BIN\)/|timeout \d+ |torchrun .*? -m (?:-- )?|python -m (?=recsys ))?"
    r"(recsys|make|python) (.*)"
)
# Options of `recsys train` alone, or with `make train`.
_OF_TRAIN = re.compile(r"^(?:make train .*)?ARGS=([\"'])(.*)\1$|^(--set .*)")
_OPTIONAL = re.compile(r"(?:(?<=\s)|^)\[([^\]]+)\](?=\s|$)")
_FENCE = re.compile(r"^ *(```|~~~).*\n((?s:.*?))^ *\1", re.MULTILINE)
# Words that stand for a number or for one of several choices.
PLACEHOLDERS = {
    "A:B": "0:0.5",
    "B": "64",
    "COMMAND": "train",
    "KIND": "dlrm",
    "N": "3",
    "NAME": "lookup",
    "R": "0.1",
    "S": "60",
    "W": "2",
}


class Shown(NamedTuple):
    """A command in a document.

    Attributes:
        program: recsys, make or python.
        text: What follows it.
        is_whole: Whether it is to be typed as it is: not one that a sentence mentions.
    """

    program: str
    text: str
    is_whole: bool


def commands_of(text, *, is_markdown):
    """Every command in a document: lines of code blocks, and code in sentences and tables."""
    lines, prose = _code_and_prose(text, is_markdown)
    for line in lines:
        yield from _shown(line, is_whole=True)
    for paragraph in re.split(r"\n\s*\n|\n(?=\|)", prose):
        for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", paragraph):
            is_first_cell = paragraph.startswith(f"| `{span}`")
            yield from _shown(" ".join(span.replace(r"\|", "|").split()), is_whole=is_first_cell)


def overlooked(text, names, *, is_markdown):
    """Lines of code with `recsys` and the name of a command, of which `commands_of` takes none.

    Not where they are quoted.
    """
    named = re.compile(rf"(?<!')\brecsys (?:{'|'.join(map(re.escape, names))})\b")
    lines, _ = _code_and_prose(text, is_markdown)
    return [
        line
        for line in lines
        if named.search(re.sub("`[^`]*`", "", line)) and not list(_shown(line, is_whole=True))
    ]


def _code_and_prose(text, is_markdown):
    if not is_markdown:
        text = re.sub(r"^ *# ?", "", text, flags=re.MULTILINE)  # comments
    blocks = [block for _, block in _FENCE.findall(text)] if is_markdown else []
    prose = _FENCE.sub("\n", text)
    indented = re.findall(r"(?:^(?: {4,}|\t).*\n)+", prose, re.MULTILINE)
    code = "".join([*blocks, *indented])
    return re.sub(r"\\\n\s*", " ", code).splitlines(), prose


def _shown(line, *, is_whole):
    line = line.strip()
    if found := _PROGRAM.match(line):
        yield Shown(*found.groups(), is_whole)
    if found := _OF_TRAIN.match(line):
        yield Shown("recsys", f"train {found[2] or found[3]}", is_whole=True)


def lines_meant(text):
    """The lists of arguments that a command with `[...]`, `a|b` and `...` stands for."""
    texts = {_OPTIONAL.sub("", text), _OPTIONAL.sub(r"\1", text)}
    for words in (shlex.split(each, comments=True) for each in sorted(texts)):
        choices = [
            [word] if "=" in word else word.split("|")
            for word in takewhile(lambda word: word != ">", words)
            if word not in ("...", "$(ARGS)")  # more of the reader's
        ]
        for number in range(max(map(len, choices), default=1)):
            meant = [of_word[min(number, len(of_word) - 1)] for of_word in choices]
            yield [re.sub(r"[^=]*$", _filled, word, count=1) for word in meant]


def _filled(found):
    return PLACEHOLDERS.get(found[0], found[0])
