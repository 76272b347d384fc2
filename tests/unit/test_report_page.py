"""The report: self-contained, complete, and legible to a parser; charts that say what they show."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from support.folded import folded
from support.run_log import START_MS, small_run

from odradek.infra.observe.charts import Axis, Point, Series, area, columns, compact, histogram, ticks, xy
from odradek.infra.observe.fold import RunFold
from odradek.infra.observe.report import render
from odradek.infra.observe.sessions import SessionBook


def page(**sizes: int) -> str:
    fold, book = folded(small_run(**sizes))
    return render(fold, book, START_MS)


class Shape(HTMLParser):
    """Tags that must be closed are."""

    VOID = frozenset(("meta", "br", "line", "circle", "rect", "polyline", "polygon"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def shape(html: str) -> Shape:
    parser = Shape()
    parser.feed(html)
    assert parser.open == []
    return parser


def test_the_page_needs_no_network_no_script_and_no_other_file() -> None:
    html = page()
    assert not re.search(r"https?://|//[a-z]|url\(|@import|<script|<link|<img|<iframe|srcset", html)
    assert not [attrs for _, attrs in shape(html).seen if "src" in attrs or "href" in attrs]


def test_the_page_has_every_part_that_was_asked_for() -> None:
    html = page()
    for heading in (
        "Solve rate against weight version", "Solve rate against sampled tokens", "Solve rate against training time",
        "Mean reward against weight version", "Mean reward against sampled tokens", "Mean reward against training time",
        "Turns with parallel calls", "Reads before the first edit", "Sampling", "Tool calls", "Grading", "Training",
        "Staleness of what was trained", "Length of what was not trained on", "Batches", "Events by type", "Clocks",
    ):  # fmt: skip
        assert f">{heading}<" in html, heading
    assert "nothing on the log" not in html
    assert "left out: flat" in html and "discarded: infrastructure" in html
    assert re.search(r"sampled tokens of \d+ finished members: \d+ to \d+, median \d+", html)


def test_every_chart_says_what_it_counts_and_has_a_name_for_a_screen_reader() -> None:
    seen = shape(page()).seen
    charts = [attrs for tag, attrs in seen if tag == "svg"]
    figures = [attrs for tag, attrs in seen if tag == "figure"]
    captions = [attrs for tag, attrs in seen if tag == "figcaption"]
    assert len(charts) == len(figures) == len(captions) == 15
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in charts)


def test_the_same_log_gives_the_same_page() -> None:
    assert page() == page()


def test_numbers_of_the_page_are_those_of_the_log() -> None:
    log = small_run()
    fold, book = folded(log)
    html = render(fold, book, START_MS)
    for kind, count in (fold.events + book.events).items():
        assert f"<code>{kind}</code></td><td>{count:,}</td>" in html
    assert f"{len(log.records) - len(log.of('tasks.v1')):,} records from" in html
    evaluation = fold.evaluations[3, "new_combinations"]
    assert f"{evaluation.solved} of {evaluation.sessions}" in html


def test_an_empty_log_gives_a_page_that_says_so() -> None:
    html = render(RunFold(), SessionBook(), START_MS)
    shape(html)
    assert "an empty log" in html and "no batch on the log yet" in html


def test_names_from_the_log_are_text_never_markup() -> None:
    log = small_run(versions=1)
    fold, book = folded(log)
    hostile = '<img src=x onerror="alert(1)">'
    fold.evaluations[9, hostile] = fold.evaluations[0, "new_combinations"]
    fold.dropped[hostile] = 1
    html = render(fold, book, START_MS)
    assert "<img" not in html and "&lt;img" in html
    shape(html)


def test_records_whose_clock_is_not_believed_are_listed() -> None:
    log = small_run(versions=1)
    log.of("rewards.v1")[7].timestamp_ms += 365 * 86_400_000
    fold, book = folded(log)
    html = render(fold, book, START_MS)
    assert "1 records carry a stamp" in html and "ahead; placed at 2026" in html


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0), (-3.5, 12), (0, 1e7), (5, 5), (0.001, 0.002)])
def test_ticks_are_few_and_cover_the_range(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high
    assert 2 <= len(found) <= 9 and found == sorted(set(found))


def marks(svg: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(svg[svg.index("<svg") :])
    return [e for e in root.iter() if e.tag in ("circle", "rect", "polyline", "polygon", "line")]


def test_marks_lie_inside_the_drawing() -> None:
    series = [
        Series("a", [Point(i, i / 9, f"{i}", 0.0, 1.0) for i in range(10)]),
        Series("b", [Point(9, 0.5, "b & <b>")], joined=False),
        Series("c", [Point(0, 0.5, "c")], joined=False),
    ]
    pictures = [
        xy(series, Axis("x"), Axis("y", 0.0, 1.0), "lines"),
        area([(0.0, 1.0), (5.0, 3.0)], Axis("x"), Axis("y"), "area"),
        histogram([("a", [1, 2, 3]), ("b", [3, 900])], Axis("x", 0.0), 10, "histogram"),
        columns([("0", 0.9, "t"), ("1", 0.1, "t")], "x", Axis("", 0.0), "columns"),
    ]
    for svg in pictures:
        for mark in marks(svg):
            for name, value in mark.attrib.items():
                if name in ("x", "y", "cx", "cy", "x1", "x2", "y1", "y2"):
                    assert 0 <= float(value) <= 380, (mark.tag, mark.attrib)
    assert len([m for m in marks(pictures[0]) if m.tag == "circle"]) == 12


def test_a_chart_of_nothing_says_so() -> None:
    for svg in (
        xy([Series("a", [])], Axis("x"), Axis("y"), "empty"),
        area([], Axis("x"), Axis("y"), "empty"),
        histogram([("a", [])], Axis("x"), 10, "empty"),
        columns([], "x", Axis(""), "empty"),
    ):
        assert "nothing on the log yet" in svg


def test_numbers_are_shown_short() -> None:
    assert [compact(v) for v in (0, 0.25, 12, 3400, 1_250_000, 2e9)] == ["0", "0.25", "12", "3.4k", "1.25M", "2G"]
