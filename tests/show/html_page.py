"""A page of HTML as a tree of elements, and runs to make pages of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from daskcnn.runs.log import read_events
from daskcnn.show.report_tables import RunReport, tables

ROOT = Path(__file__).parents[2]
LOGS = {
    "sgwu": ROOT / "docs/pictures/run-idpa.jsonl",
    "udpa": ROOT / "docs/pictures/run-udpa.jsonl",
    "agwu": ROOT / "tests/fixtures/version-0.1.0/agwu/events.jsonl",
    "group": ROOT / "tests/fixtures/version-0.1.0/group/events.jsonl",
    "layer": ROOT / "tests/fixtures/version-0.1.0/layer/events.jsonl",
}
"""Logs of real runs."""
_VOID = {"meta", "link", "br", "hr", "img", "input"}


@dataclass
class Element:
    """An element: its tag, attributes, and what is inside, elements and text."""

    tag: str
    attributes: dict[str, str]
    inside: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text inside."""
        return "".join(each if isinstance(each, str) else each.text for each in self.inside)

    def all(self, *tags: str) -> Iterator[Element]:
        """Every element inside with one of these tags, in order; all of them where no tag is given."""
        for each in self.inside:
            if isinstance(each, Element):
                if not tags or each.tag in tags:
                    yield each
                yield from each.all(*tags)


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"{tag}: an attribute twice"
        made = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(made)
        if tag not in _VOID:
            self.open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> where <{self.open[-1].tag}> is open"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


def parsed_page(text: str) -> Element:
    """The tree of a page. Every element must be closed where it should be."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    assert [each.tag for each in parser.open] == [""]
    return parser.open[0]


def report_of(name: str) -> RunReport:
    """The report of one of `LOGS`."""
    return tables(read_events(LOGS[name]))
