"""Docstrings: every public class, method and function has one, in the project's words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from inspect import getdoc
from operator import attrgetter
from pathlib import Path

from tests.docs.pages import ROOT

NOT_OURS = re.compile(r"\bso many\b|\bto be had\b|\bnobody\b|\bwhoever\b|^Of |^Who\b|\. Of ", re.MULTILINE)

NOT_FIRST = re.compile(r"(What|Whether|Who|Which|Where|How|That)\b")
"""Words that no docstring begins with: it is a noun phrase or an imperative, as NumPy's are."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    """Every module of the package."""
    files = sorted((ROOT / "daskcnn").rglob("*.py"))
    return [(file, ast.parse(file.read_text(encoding="utf-8"))) for file in files]


def public(node: ast.Module | Definition, above: str = "") -> Iterator[tuple[str, Definition]]:
    """Classes and functions whose names, and those of the classes around them, begin without an underscore."""
    for child in node.body:
        if isinstance(child, Definition) and not child.name.startswith("_"):
            yield above + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{above}{child.name}.")


def inherited(file: Path, name: str) -> str | None:
    """The docstring of the method that this one takes the place of."""
    module = import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    return getdoc(attrgetter(name)(module))


def test_everything_public_has_a_docstring() -> None:
    """A method that takes the place of a documented one may leave its docstring to that."""
    missing = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, tree in trees()
        for name, node in public(tree)
        if ast.get_docstring(node) is None and ("." not in name or not inherited(file, name))
    ]
    assert not missing, "no docstring"


def test_docstrings_are_plain() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {name}: {words.group()!r}"
        for file, tree in trees()
        for name, node in [("module", tree), *public(tree)]
        if (words := NOT_OURS.search(ast.get_docstring(node) or ""))
    ]
    assert not found, "write plain sentences"


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """Private ones too, and those below a constant or a field."""
    found = []
    for file, tree in trees():
        bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | Definition)]
        said = [each.value for body in bodies for each in body if isinstance(each, ast.Expr)]
        texts = [each.value for each in said if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        found += [f"{file.relative_to(ROOT)}: {text}" for text in texts if NOT_FIRST.match(text.lstrip())]
    assert not found
