"""A page of the documentation that a script makes of the package's own models."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(path: Path, text: str, arguments: list[str]) -> int:
    """Write the page, or with `--check` say where it is stale. Returns the exit code."""
    if arguments != ["--check"]:
        path.write_text(text, encoding="utf-8")
        return 0
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        print(f"{path}: does not say what the models say; write it anew with `make docs`", file=sys.stderr)
        return 1
    return 0
