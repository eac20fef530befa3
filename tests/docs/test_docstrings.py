"""Docstrings: every public class, method and function has one, in the project's words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

NOT_OURS = re.compile(r"\bso many\b|\bto be had\b|\bnobody\b|\bwhoever\b|^Of |^Who\b|\. Of ", re.MULTILINE)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def files() -> list[Path]:
    return sorted((ROOT / "daskcnn").rglob("*.py"))


def public(node: ast.Module | Definition, above: str = "") -> Iterator[tuple[str, Definition]]:
    """Classes and functions whose names, and those of the classes around them, begin without an underscore."""
    for child in node.body:
        if isinstance(child, Definition) and not child.name.startswith("_"):
            yield above + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{above}{child.name}.")


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(ROOT / "daskcnn")))
def test_everything_public_has_a_docstring(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    missing = [name for name, node in public(tree) if ast.get_docstring(node) is None]
    assert not missing, f"{file.relative_to(ROOT)}: no docstring: {', '.join(missing)}"


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(ROOT / "daskcnn")))
def test_docstrings_are_plain(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for name, node in [("module", tree), *public(tree)]:
        found = NOT_OURS.search(ast.get_docstring(node) or "")
        assert not found, f"{file.relative_to(ROOT)}: {name}: {found.group()!r}: write plain sentences"
