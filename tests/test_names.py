"""A name means one thing: no two classes of the package share one, and no module has a name that says nothing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import daskcnn

PACKAGE = Path(daskcnn.__file__).parent
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
