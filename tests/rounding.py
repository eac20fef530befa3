"""How far rounding may take a result: derived from the number type and the lengths of sums, for every library.

An operation rounds to the nearest number. Its error is spread evenly over half a unit in the last place on either side,
which is at most u = eps / 2 of the result, so its variance is at most u² / 3. Errors of different operations are
independent, with the mean 0 (Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci.
Comput. 41, 2019, model 2.1). So variances are added up, and errors grow as the root of a sum's length.

Terms are drawn around 0, so a sum has the variance i after i terms (Higham and Mary, Sharper probabilistic backward
error analysis for basic linear algebra kernels with random data, SIAM J. Sci. Comput. 42, 2020). Added one by one, n
products have errors of n + (2 + 3 + … + n) times u² / 3, where their sum has n: less than (n + 1) / 2 + 1 roundings of
the result. Every other order of additions has fewer, and so has a processor that rounds a product with its addition.
So the limits hold for every kernel of every BLAS.

A fast convolution Cᵀ[(A x) ⊙ (B w)] computes with numbers that are larger than its results, by the norms of the rows of
its own matrices: Σ C² ‖A‖² ‖B‖² where the definition has one for each tap (after Barabasz et al., Error Analysis and
Improving the Accuracy of Winograd Convolution for Deep Neural Networks, 2020, which has the worst case).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf, log, prod, sqrt

import numpy as np
import numpy.typing as npt

from daskcnn.conv import ALGORITHMS, ConvSpec
from daskcnn.conv.fourier import Tiling
from daskcnn.conv.minimal import Matrix, Minimal
from daskcnn.conv.spec import LONGEST
from daskcnn.conv.spectral import Spectral
from daskcnn.conv.winograd import Winograd

CHANCE = 1e-9
"""The chance that one of a result's numbers is beyond the limit of the largest error."""


@dataclass(frozen=True)
class Limits:
    """Limits of a result's errors, as shares of the norm and of the largest number of the result."""

    norm: float
    largest: float


def limits(roundings: float, size: int, dtype: npt.DTypeLike) -> Limits:
    """Return the limits of `size` numbers after so many roundings of their own size.

    The norm of independent errors is known to √(1 / 2 size); four such deviations more are allowed. The largest number
    is at least twice as large as numbers are where errors are largest.
    """
    deviation = float(np.finfo(dtype).eps) / 2 * sqrt(roundings / 3)
    return Limits(deviation * (1 + 4 / sqrt(2 * size)), deviation * sqrt(2 * log(2 * size / CHANCE)) / 2)


def of_sum(terms: float, together: float = inf) -> float:
    """Return the roundings of a sum of products, one by one; or of so many together first, then of these sums."""
    inner = min(terms, together)
    return (inner + 1) / 2 + 1 + (terms / inner - 1) / 2


def of_pass(algorithm: str, spec: ConvSpec, direction: str, *, compiled: bool) -> float:
    """Return the roundings of a direction's results.

    Compiled loops add up LONGEST numbers of a kernel gradient at most, then sums; array expressions leave whole sums
    to a library.
    """
    if algorithm.startswith("grouped-"):
        return of_pass(algorithm.removeprefix("grouped-"), spec.group, direction, compiled=compiled)
    chosen, together = ALGORITHMS[algorithm.removeprefix("dilated-")], LONGEST if compiled else inf
    if isinstance(chosen, Winograd):
        return _of_tiles(chosen._f, spec, direction, together)
    if isinstance(chosen, Spectral):
        return _of_frequencies(Tiling(replace(spec, dilation=(1, 1)), chosen._tile), direction, together)
    if direction == "backward_filter":
        return of_sum(prod(spec.y_shape[:3]), together)
    return of_sum(spec.R * spec.S * (spec.C if direction == "forward" else spec.K) / spec.groups)


def of_direction(algorithm: str, spec: ConvSpec, direction: str, *, compiled: bool) -> Limits:
    """Return the limits of a direction's results, in the problem's dtype."""
    shape = {"forward": spec.y_shape, "backward_data": spec.x_shape, "backward_filter": spec.w_shape}[direction]
    return limits(of_pass(algorithm, spec, direction, compiled=compiled), prod(shape), spec.dtype)


def _of_tiles(f: Minimal, spec: ConvSpec, direction: str, together: float) -> float:
    """Return the roundings of Winograd's tiles: of three transforms and of sums at every point."""
    f = f.backward or f if direction == "backward_data" else f
    kernels = f.g[f.kernels_of[: f.tile.points]]
    if direction == "backward_filter":
        axes = zip(spec.y_shape[:2], spec.dilation, strict=True)
        tiles = prod(d * ceil(ceil(n / d) / f.tile.outputs) for n, d in axes)
        sums, terms, (out, one, other) = of_sum(tiles * spec.N, together), f.tile.outputs, (kernels, f.bt, f.a)
    else:
        of_each = spec.C if direction == "forward" else spec.K
        sums, terms, (out, one, other) = of_sum(of_each), np.count_nonzero(f.g, axis=1).max(), (f.a, f.bt, kernels)
    squares = np.square(out).T @ (np.square(one).sum(axis=1) * np.square(other).sum(axis=1))
    amplified = float(squares.mean()) / terms
    return (sums + sum(map(_of_transform, (out.T, one, other)))) * amplified**2


def _of_transform(matrix: Matrix) -> float:
    """Return the roundings of a transform along both axes at once, and of the matrix's own numbers."""
    return of_sum(int(np.count_nonzero(matrix, axis=1).max()) ** 2) + 1


def _of_frequencies(tiling: Tiling, direction: str, together: float) -> float:
    """Return the roundings of Fourier transforms, along one axis after the other, and of sums at every frequency.

    Three products of real numbers make one of complex ones, out of numbers of twice its variance. A transform by FFT
    has log2 of the length roundings in place of the length's.
    """
    s = tiling.spec
    transform = sum(of_sum(axis.length) + 1 for axis in tiling.axes)
    if direction == "backward_filter":
        sums = of_sum(tiling.tiles * s.N, together)
    else:
        sums = of_sum(s.C if direction == "forward" else s.K)
    return 2 * (sums + 3 * transform)


def assert_rounds(found: npt.NDArray[np.floating], exact: npt.NDArray[np.floating], allowed: Limits, name: str) -> None:
    """Both errors of a result are within their limits."""
    error = np.abs(found - exact.astype(np.promote_types(exact.dtype, np.float64)))
    share = float(np.linalg.norm(error) / np.linalg.norm(exact))
    assert share <= allowed.norm, f"{name}: an error of {share:.3g} of the norm, {allowed.norm:.3g} is allowed"
    share = float(error.max() / np.abs(exact).max())
    assert share <= allowed.largest, f"{name}: {share:.3g} of the largest number, {allowed.largest:.3g} is allowed"
