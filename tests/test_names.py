"""A name means one thing, and a module is one subject: neither too long to be held in mind nor part of a circle."""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import daskcnn

PACKAGE = Path(daskcnn.__file__).parent
LONGEST = 450
QUALIFIED = {PACKAGE / "training/coordinator" / name for name in ("facts.py", "orders.py")}
"""Vocabularies of the coordinator: which `Join` or `Judged` is meant is said by the module, as `facts.Judged`."""
MEANINGLESS = {
    *("simulating", "simulated", "figures", "pictures", "tools", "memory", "hosting", "start", "parcel"),
    *("layer_place", "layer_travel"),
}


def classes() -> dict[str, list[str]]:
    """Where each class stands, private and inner ones too, by its name."""
    found = defaultdict(list)
    for path in sorted({*PACKAGE.rglob("*.py")} - QUALIFIED):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    return found


def test_no_two_classes_share_a_name() -> None:
    assert not {name: places for name, places in classes().items() if len(places) > 1}


def test_modules_say_what_is_inside() -> None:
    assert not [path for path in PACKAGE.rglob("*.py") if path.stem in MEANINGLESS]


def test_no_module_is_longer_than_a_reader_holds_in_mind() -> None:
    lines = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert not {path: count for path, count in lines.items() if count > LONGEST}


def modules() -> dict[str, Path]:
    """Every module but the package's face, by its name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del found[PACKAGE.name]
    return found


def test_no_imports_go_in_a_circle() -> None:
    """Those inside functions and those for the type checker count."""
    known = modules()
    graph: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted = [f"{node.module}.{alias.name}" for alias in node.names]
                graph[name] |= {each if each in known else node.module for each in wanted} & known.keys()
    TopologicalSorter({name: needed - {name} for name, needed in graph.items()}).prepare()
