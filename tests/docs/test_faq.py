"""The messages that the FAQ explains are messages of the program."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.pages import ROOT, blocks

FAQ = ROOT / "docs/faq.md"
MESSAGES = [line for block in blocks(FAQ) if block.language == "message" for line in block.text.splitlines()]
SHORTEST = 4
"""Letters of a piece that says anything: shorter ones are units and brackets."""


@cache
def texts() -> tuple[str, ...]:
    """Every text in the package's code; in place of what is put in when it runs, a mark."""
    found = []
    for file in sorted((ROOT / "daskcnn").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def pieces(message: str) -> list[str]:
    """The parts of a message that stand in the code as they are: between what is put in, and value, reason, remedy."""
    found = re.split(r"…|; |: |'", message)
    return [piece.strip() for piece in found if len(piece.strip()) >= SHORTEST]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_of_the_program(message: str) -> None:
    assert pieces(message), message
    for piece in pieces(message):
        assert any(piece in text for text in texts()), f"{message}: no text of the program has {piece!r}"


def test_every_message_is_explained() -> None:
    text = FAQ.read_text(encoding="utf-8")
    sections = re.split(r"(?m)^### ", text)[1:]
    assert len(sections) >= 25
    for section in sections:
        heading = section.partition("\n")[0]
        assert re.search(r"```message\n.+?```\n\n\*\*Meaning\.\*\* .+\n\*\*Do\.\*\* ", section, re.DOTALL), heading
