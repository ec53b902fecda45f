"""The pictures of docs/concepts.md are what their script draws, and say what the records say."""

import json
import re
import runpy
import sys
from xml.etree import ElementTree

import pytest

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def figures(pytestconfig, monkeypatch):
    folder = pytestconfig.rootpath / "docs" / "figures"
    monkeypatch.syspath_prepend(folder)
    yield runpy.run_path(str(folder / "figures.py"))["FIGURES"]
    sys.modules.pop("drawing", None)


def test_every_picture_is_drawn_by_the_script_and_stands_in_the_page(pytestconfig, figures):
    docs = pytestconfig.rootpath / "docs"
    page = (docs / "concepts.md").read_text()

    assert {file.name for file in (docs / "figures").glob("*.svg")} == set(figures)
    assert set(re.findall(r"\]\(figures/(.*?)\)", page)) == set(figures)
    for name, draw in figures.items():
        assert (docs / "figures" / name).read_text() == draw(), name


def test_no_mark_of_a_picture_lies_outside_it(figures):
    for name, draw in figures.items():
        picture = ElementTree.fromstring(draw())
        width, height = (float(size) for size in picture.get("viewBox").split()[2:])

        for each in picture.iter(f"{SVG}rect"):
            right = float(each.get("x", 0)) + float(each.get("width"))
            lower = float(each.get("y", 0)) + float(each.get("height"))
            assert right <= width, name
            assert lower <= height, name
        for each in picture.iter(f"{SVG}text"):
            half = 4.2 * len(each.text)  # letters of 16 pixels take about 8.4 on average
            shift = {"start": half, "middle": 0, "end": -half}[each.get("text-anchor")]
            middle = float(each.get("x")) + shift
            assert middle - half >= 0, (name, each.text)
            assert middle + half <= width, (name, each.text)
            assert 0 < float(each.get("y")) < height, (name, each.text)


def test_the_shares_in_the_text_and_in_the_curve_are_those_of_the_record(pytestconfig, figures):
    docs = pytestconfig.rootpath / "docs"
    record = json.loads((docs / "benchmarks" / "synthetic_coverage.json").read_text())
    real, full = (record[name]["popularity"][-1] for name in ("real", "synthetic"))
    text = " ".join((docs / "concepts.md").read_text().split())

    share = real["top_shares"][record["tops"].index(0.01)]
    heights = [
        float(dot.get("cy"))
        for dot in ElementTree.fromstring(figures["coverage.svg"]()).iter(f"{SVG}circle")
    ]

    assert f"the most popular 1 % of the rows get {100 * share:.0f} % of the lookups" in text
    assert full["top_shares"][1] > share  # "in data of the challenge's full size it is more"
    floor, ceiling = 280, 52  # of the axis, in pixels
    for drawn, expected in zip(heights[:3], real["top_shares"], strict=True):
        assert (floor - drawn) / (floor - ceiling) == pytest.approx(expected, abs=0.001)
