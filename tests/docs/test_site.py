"""The site: every page is in its navigation, every made page is what its script makes, every figure can be drawn."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT, links

DOCS = ROOT / "docs"
SCRIPTS = sorted(DOCS.glob("generate_*.py"))
CONCEPTS = sorted((DOCS / "concepts").glob("*.md"))
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def load(script: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """A script as a module; its neighbours can be imported while the patch lasts."""
    patch.syspath_prepend(str(script.parent))
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries(nav: Any) -> Iterator[str]:
    """The files that a navigation names."""
    for each in nav:
        for value in each.values():
            if isinstance(value, str):
                yield value
            else:
                yield from entries(value)


def test_the_navigation_has_every_page_once() -> None:
    named = list(entries(SITE["nav"]))
    assert len(named) == len(set(named))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    inside = {page for page in named if not page.startswith("repository/")}
    assert inside == pages
    for page in set(named) - inside:
        assert (ROOT / page.removeprefix("repository/")).is_file(), page


def test_pages_from_outside_are_linked_to() -> None:
    """The site takes in what its pages link to; a page of the navigation that none links to would be missing."""
    seen, left = set(), sorted(DOCS.rglob("*.md"))
    while left:
        page = left.pop()
        if page in seen or not page.is_file():
            continue
        seen.add(page)
        left += [(page.parent / target.partition("#")[0]).resolve() for target in links(page) if ".md" in target]
    outside = {page for page in entries(SITE["nav"]) if page.startswith("repository/")}
    assert {ROOT / page.removeprefix("repository/") for page in outside} <= seen


def test_the_site_is_strict_and_asks_nobody() -> None:
    assert SITE["theme"]["font"] is False
    assert SITE["plugins"] == ["search"]
    assert SITE["validation"]["anchors"] == "warn"  # with --strict a warning ends the build
    assert all(value == "warn" for part in ("links", "nav") for value in SITE["validation"][part].values())
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_made_page_is_what_its_script_makes(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(script, monkeypatch)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run: make docs"


@pytest.mark.parametrize("page", CONCEPTS, ids=lambda page: page.stem)
def test_a_concept_has_a_formula_and_a_figure(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.stem != "README":
        assert "$$" in text or "$O(" in text
        assert any((page.parent / target).resolve().parent == DOCS / "pictures" for target in links(page))


@pytest.mark.slow
def test_figures_can_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    folder = DOCS / "figures"
    for name in ("common", "rules", "timing", "work"):  # other modules of these names are not ours
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = load(folder / "draw_all.py", monkeypatch)
    for name, draw in module.FIGURES.items():
        assert module.save(draw(), name, tmp_path).stat().st_size > 5000
        assert (DOCS / "pictures" / f"concept-{name}.svg").is_file()
    used = {Path(target).stem for page in CONCEPTS for target in links(page) if "concept-" in target}
    assert used == {f"concept-{name}" for name in module.FIGURES}
