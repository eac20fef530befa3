"""Runs of numbers, copied and added from one array of one axis to another."""

from __future__ import annotations

from typing import Any

from daskcnn.compiled.loop import inner, uintp


@inner
def copy(source: Any, at: int, target: Any, to: int, n: int) -> None:
    """Copy n numbers. Numba tests signed places for less than zero at each use, and compiles no vectors."""
    here, there = uintp(at), uintp(to)
    for i in range(uintp(n)):
        target[there + i] = source[here + i]


@inner
def add(source: Any, at: int, target: Any, to: int, n: int) -> None:
    """Add n numbers."""
    here, there = uintp(at), uintp(to)
    for i in range(uintp(n)):
        target[there + i] += source[here + i]
