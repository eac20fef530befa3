"""The benchmarks, which no other test runs, ask the package for names that it has."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_benchmark_imports_names_that_exist(file: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    missing = [
        f"{node.module}.{alias.name}"
        for node in imports
        if node.module is not None and node.module.partition(".")[0] == "daskcnn"
        for alias in node.names
        if not hasattr(import_module(node.module), alias.name) and not _is_module(node.module, alias.name)
    ]
    assert not missing


def _is_module(package: str, name: str) -> bool:
    try:
        import_module(f"{package}.{name}")
    except ImportError:
        return False
    return True
