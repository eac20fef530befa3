"""The gradient noise scale, from the gradients that a server merges anyway. No I/O, no clock.

The scale is B = tr(Σ) / |G|² (McCandlish et al. 2018, arXiv 1812.06162): G is the gradient of the loss over all
samples, Σ the covariance of a single sample's gradient. A step of fewer samples than B is mostly noise, and one of more
gains little.

One meeting. Worker i has the mean gradient g_i of b_i samples, and g = Σ b_i g_i / b is the mean of all b = Σ b_i. As
E|g_i|² = |G|² + tr(Σ) / b_i, and likewise for g, worker i and all together give a pair of unbiased estimates
(McCandlish et al., appendix A.1, with b_i and b as the two batches)::

    G_i = (b |g|² - b_i |g_i|²) / (b - b_i)            of |G|²
    S_i = (|g_i|² - |g|²) / (1 / b_i - 1 / b)          of tr(Σ)

Unequal workers' pairs are of unequal worth and depend on each other. In the way of Cannikin (Nie et al. 2024, arXiv
2402.05302) their means are taken by weights w_i, Σ w_i = 1, of least variance. Derivation: let g_i = G + e_i with
independent errors of covariance Σ / b_i. To first order in them G_i - |G|² = 2 G · Σ_{j≠i} b_j e_j / (b - b_i). The
mean by w has the error 2 G · Σ_j b_j v_j e_j with v_j = Σ_{i≠j} w_i / (b - b_i), and Σ b_j v_j = 1. Its variance is in
proportion to Σ b_j v_j², which is least if all v_j are 1 / b. So, for n workers::

    w_i = (b - b_i) / ((n - 1) b)
    tr(Σ) ≈ Σ w_i S_i = (Σ b_i |g_i|² - b |g|²) / (n - 1)
    |G|²  ≈ Σ w_i G_i = |g|² - tr(Σ) / b

By the same weights the mean of S_i is the variance between workers, Σ b_i |g_i - g|² / (n - 1), which has the least
variance of all unbiased estimates where errors are Gaussian. With equal workers w_i is 1 / n. All of it is linear in
the squared norms, so those of a vector's ranges may be added up.

Smoothing. Numerator and denominator are averaged over meetings each by itself, as a mean of quotients would be biased.
Gradients shrink by orders of magnitude in a run, and the large ones of its beginning would outweigh all later ones. So
both are divided by what |g|² was in the meetings before, which does not depend on the noise of this one. The error is
that of a quotient of two means, by the spread of the single estimates and by their covariance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Final, NamedTuple, Self

_FIRST: Final = 100
"""Meetings whose norms are all taken, so that a short run knows its noise. They take a fifth of a meeting's time."""
_EVERY: Final = 4
"""Meetings from one whose norms are taken to the next, after those."""
_NEWEST: Final = 1 / _FIRST
"""The least part of the averages that the newest estimate makes up. Fewer than these all count alike."""
_NEWEST_SIZE: Final = 0.1
"""The same of the average of |g|², by which estimates are divided."""
_KNOWN: Final = 2.0
"""Standard errors by which |G|² has to be above 0 before the scale is known."""
NOISE: Final = "gradient.noise"
"""Name of the smoothed estimates among the vectors that a checkpoint keeps of a server. No rule may have it."""


class NoiseScale(NamedTuple):
    """The gradient noise scale and its standard error, in samples. Both are infinite where |G|² is within its error."""

    scale: float
    error: float

    @property
    def known(self) -> bool:
        """True if |G|² is clearly above 0."""
        return math.isfinite(self.scale)


WITHIN_ERROR: Final = NoiseScale(math.inf, math.inf)


def takes_norms(meeting: int) -> bool:
    """Return True if the norms of this meeting's gradients are to be taken. meeting: the run's, from 0."""
    return meeting < _FIRST or meeting % _EVERY == 0


def estimates(samples: Sequence[int], squares: Sequence[float]) -> tuple[float, float]:
    """Return unbiased estimates of |G|² and tr(Σ) by one meeting of two workers or more.

    samples: b_i. squares: |g_i|² of each worker, and |g|² of all together.
    """
    *own, merged = squares
    total, between = sum(samples), sum(b * square for b, square in zip(samples, own, strict=True))
    trace = max(0.0, between - total * merged) / (len(samples) - 1)  # below 0 by rounding alone
    return merged - trace / total, trace


def added_up(parts: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return squared norms of whole vectors by those of their ranges; none where there are none."""
    return tuple(map(sum, zip(*parts, strict=True)))


@dataclass(slots=True)
class GradientNoise:
    """The smoothed estimates.

    count: meetings so far. size: average of |g|². part: Σ of the squares of the meetings' parts in the other averages.
    square, trace: averages of the estimates of |G|² and tr(Σ), each in the size before it; spread, covariance,
    trace_spread: their variances and covariance, about the averages.
    """

    count: float = 0.0
    size: float = 0.0
    part: float = 0.0
    square: float = 0.0
    trace: float = 0.0
    spread: float = 0.0
    covariance: float = 0.0
    trace_spread: float = 0.0

    @classmethod
    def of(cls, kept: Sequence[float]) -> Self:
        """Return the estimates of a snapshot. None, or damaged ones, begin anew."""
        return cls(*kept) if len(kept) == NOISE_SIZE and all(map(math.isfinite, kept)) else cls()

    def kept(self) -> tuple[float, ...]:
        """Return the numbers for a snapshot; empty before the first meeting."""
        return astuple(self) if self.count else ()

    def met(self, samples: Sequence[int], squares: Sequence[float]) -> None:
        """Take in a meeting of two workers or more: `estimates` says by which numbers."""
        unit = self.size or squares[-1]
        if not (
            unit > 0 and math.isfinite(sum(each / unit * each / unit for each in squares))
        ):  # no spread can be told
            return
        square, trace = estimates(samples, [each / unit for each in squares])
        self.count += 1
        self.size += max(1 / self.count, _NEWEST_SIZE) * (squares[-1] - self.size)
        new = max(1 / self.count, _NEWEST)
        old, off, trace_off = 1 - new, square - self.square, trace - self.trace
        self.part = old * old * self.part + new * new
        self.square += new * off
        self.trace += new * trace_off
        self.spread = old * (self.spread + new * off * off)
        self.covariance = old * (self.covariance + new * off * trace_off)
        self.trace_spread = old * (self.trace_spread + new * trace_off * trace_off)

    @property
    def scale(self) -> NoiseScale | None:
        """The noise scale; None before a second meeting."""
        if self.count < 2:
            return None
        of_mean = self.part / (1 - self.part)  # variance of an average, in those of single estimates about it
        if self.square <= _KNOWN * math.sqrt(of_mean * self.spread):
            return WITHIN_ERROR
        scale = self.trace / self.square
        spread = self.trace_spread - 2 * scale * self.covariance + scale * scale * self.spread
        return NoiseScale(scale, math.sqrt(of_mean * max(0.0, spread)) / self.square)


NOISE_SIZE: Final = len(astuple(GradientNoise()))
"""Numbers that `GradientNoise.kept` returns."""
