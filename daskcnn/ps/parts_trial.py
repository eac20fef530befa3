"""The trial of whether parts of pushes that go ahead make steps shorter: over a fast link they do not."""

from __future__ import annotations

from statistics import median
from typing import Final

TRIED: Final = 24
"""Steps with parts, and as many without, that are compared."""
TURN: Final = 4
"""Steps of a turn. What the first one takes is in part that of the answer to the step before."""
TRIED_AGAIN: Final = 4000
"""Versions after which the comparison counts no longer."""


class PartsTrial:
    """Steps with and without parts take turns, then medians decide for some thousand steps.

    A step is known by the version of the center that it begins from. It lasts until the next version is there.
    """

    def __init__(self) -> None:
        self._seconds: tuple[list[float], list[float]] = ([], [])  # with parts, and without
        self._pays: bool | None = None
        self._until = 0
        self._version, self._since = -1, 0.0

    def sends(self, version: int) -> bool:
        """Return True if parts of the step from this version go ahead."""
        return self._in_parts(version) if self._pays is None else self._pays

    def reached(self, version: int, at: float) -> None:
        """Take in that this version was there by then; it may be told again."""
        if version <= self._version:
            return
        if self._pays is not None and version >= self._until:
            self._seconds, self._pays = ([], []), None
        elif self._pays is None and version == self._version + 1:
            self._note(at - self._since)
        self._version, self._since = version, at

    @staticmethod
    def _in_parts(version: int) -> bool:
        return version // TURN % 2 == 0

    def _note(self, seconds: float) -> None:
        """Take in what the step from the present version took."""
        if self._version % TURN:
            self._seconds[0 if self._in_parts(self._version) else 1].append(seconds)
        if min(map(len, self._seconds)) >= TRIED:
            with_parts, whole = map(median, self._seconds)
            self._pays, self._until = with_parts < whole, self._version + TRIED_AGAIN
