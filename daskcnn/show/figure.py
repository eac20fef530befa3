"""A figure as numbers: curves or bars over one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Curve = tuple[Sequence[float], Sequence[float]]
"""Values of x, and of y."""


@dataclass(frozen=True)
class Figure:
    """Curves by name over one axis. like: the figures of the papers that it repeats. doubling: x goes in powers of 2.

    stacked: they are parts that add up, drawn as bars. rates: both axes go in powers of 10. ticks: what stands below
    the x of the first curve, if not its numbers. levels: lines across, by name; marks: lines up, by name; points: like
    curves, of which each point stands by itself. colours: the number of a curve's colour, where it is not that of its
    place. top: the largest y that is shown, if not the largest one. Nothing is below 0.
    """

    name: str
    title: str
    like: str
    x: str
    y: str
    curves: Mapping[str, Curve]
    doubling: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)
    marks: Mapping[str, float] = field(default_factory=dict)
    stacked: bool = False
    rates: bool = False
    ticks: Sequence[str] = ()
    points: Mapping[str, Curve] = field(default_factory=dict)
    colours: Mapping[str, int] = field(default_factory=dict)
    top: float | None = None
