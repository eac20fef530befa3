"""Cutting a range of samples, kernels or points into slices."""

from __future__ import annotations


def ranges_of(size: int, step: int) -> list[slice]:
    """Cut range(size) into slices of `step`; the last one may be shorter."""
    return [slice(i, min(i + step, size)) for i in range(0, size, step)]


def nearly_equal(size: int, at_most: int) -> int:
    """Return the step that cuts range(size) into as few slices of `at_most` as possible, nearly equal."""
    return -(-size // -(-size // at_most))
