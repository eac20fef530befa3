"""The project's pages: their blocks of code, links and paths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(
        ROOT / page
        for page in (
            "data/README.md",
            "benchmarks/README.md",
            "benchmarks/studies/README.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
        )
    ),
    *sorted((ROOT / "deploy").rglob("*.md")),
]
ROOMS = ("daskcnn", "tests", "docs", "deploy", "data", "benchmarks", ".ci")
"""Folders whose files a page may name: a name in backticks that starts with one of them must exist."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words after the language, its text and the line it starts in."""

    language: str
    marks: frozenset[str]
    text: str
    line: int


def name(page: Path) -> str:
    """The page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"(?ms)^```([^\n`]*)\n(.*?)^```$", text):
        words = match[1].split()
        found.append(
            Block(words[0] if words else "", frozenset(words[1:]), match[2], 1 + text[: match.start()].count("\n"))
        )
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"(?ms)^```[^\n`]*\n.*?^```$", "", page.read_text(encoding="utf-8"))


def commands(block: Block) -> Iterator[str]:
    """Command lines of a shell block, without comments and without the text of here-documents."""
    end = None
    for line in block.text.splitlines():
        if end is not None:
            end = None if line == end else end
            continue
        if line.strip() and not line.lstrip().startswith("#"):
            yield line
        if here := re.search(r"<<'?(\w+)'?", line):
            end = here[1]


def told(block: Block) -> str:
    """What a block of Python says that it prints, in comments `# > …`."""
    return "\n".join(re.findall(r"(?m)^# ?> (.*)$", block.text))


def links(page: Path) -> list[str]:
    """Targets of links and pictures that are not addresses of other sites."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def paths(page: Path) -> list[str]:
    """Names in backticks that look like a file or folder of this repository."""
    rooms = "|".join(re.escape(room) for room in ROOMS)
    return re.findall(rf"`((?:{rooms})/[\w./*-]*)`", prose(page))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", prose(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
