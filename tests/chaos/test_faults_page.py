"""The page on faults names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "faults.md").read_text())


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_test_that_the_page_names_is_there(file: str, test: str) -> None:
    assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_every_fault_has_a_test() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    (table,) = re.findall(r"\| fault \| expected \| test \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", page)
    assert all("::test_" in row for row in table.splitlines())
    assert len(table.splitlines()) >= 27
