"""Activations: functions of single numbers, for maps and vectors of any shape."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import Any, ClassVar

from daskcnn.arrays import Array
from daskcnn.compiled import program
from daskcnn.compiled.program import LEAKY_RELU, RELU, SIGMOID, SILU, TANH
from daskcnn.nn.layer import Context, Initializer, Residual, check_at_least, glorot_uniform, he_normal
from daskcnn.nn.local import LocalLayer


class Activation(LocalLayer):
    """Base of the activations: array expressions, and a loop where there is one.

    saturates: true if its derivative goes to 0 on both sides. Glorot's initial weights suit it then, else He's.
    """

    saturates: ClassVar[bool] = False

    def initial_before(self, after: Initializer) -> Initializer:
        """Return Glorot's initializer or He's."""
        return glorot_uniform if self.saturates else he_normal


@dataclass(frozen=True)
class ReLU(Activation):
    """max(x, 0); the derivative at 0 is 0."""

    code = RELU

    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Residual]:
        """Return max(x, 0)."""
        y = ctx.device.xp.maximum(x, 0)
        return y, y

    def array_backward(self, residual: Residual, dy: Array, ctx: Context) -> Array:
        """Return dy where y > 0, else 0."""
        return dy * (residual > 0)


@dataclass(frozen=True)
class Sigmoid(Activation):
    """1 / (1 + e^-x)."""

    code = SIGMOID
    saturates = True

    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Residual]:
        """Return (1 + tanh(x / 2)) / 2, which does not overflow."""
        y = (1 + ctx.device.xp.tanh(x * 0.5)) * 0.5
        return y, y

    def array_backward(self, residual: Residual, dy: Array, ctx: Context) -> Array:
        """Return dy · y · (1 - y)."""
        return dy * residual * (1 - residual)


@dataclass(frozen=True)
class Tanh(Activation):
    """tanh x."""

    code = TANH
    saturates = True

    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Residual]:
        """Return tanh x."""
        y = ctx.device.xp.tanh(x)
        return y, y

    def array_backward(self, residual: Residual, dy: Array, ctx: Context) -> Array:
        """Return dy · (1 - y²)."""
        return dy * (1 - residual * residual)


@dataclass(frozen=True)
class LeakyReLU(Activation):
    """x where x > 0, else slope · x; the derivative at 0 is the slope. Maas, Hannun and Ng 2013."""

    code = LEAKY_RELU
    slope: float = 0.01

    def __post_init__(self) -> None:
        check_at_least(self, 0, "slope")

    @property
    def constants(self) -> tuple[float, ...]:
        """The slope."""
        return (float(self.slope),)

    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Residual]:
        """Return x or slope · x."""
        y = ctx.device.xp.where(x > 0, x, x * self.slope)
        return y, y

    def array_backward(self, residual: Residual, dy: Array, ctx: Context) -> Array:
        """Return dy or slope · dy, by the sign of y, which is that of x."""
        return ctx.device.xp.where(residual > 0, dy, dy * self.slope)


@dataclass(frozen=True)
class GELU(Activation):
    """x · Φ(x) with Φ of the standard normal distribution, exact, not by tanh. Hendrycks and Gimpel 2016, section 2."""

    code = program.GELU

    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Residual]:
        """Return x · Φ(x); the residual is x."""
        return x * _normal(x, ctx.device.xp), x

    def array_backward(self, residual: Residual, dy: Array, ctx: Context) -> Array:
        """Return dy · (Φ(x) + x · φ(x))."""
        x, xp = residual, ctx.device.xp
        return dy * (_normal(x, xp) + x * xp.exp(-0.5 * x * x) * (0.5 / pi) ** 0.5)


@dataclass(frozen=True)
class SiLU(Activation):
    """x / (1 + e^-x), also called swish. Elfwing, Uchibe and Doya 2018, equation 8."""

    code = SILU

    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Residual]:
        """Return x · σ(x); the residual is x."""
        return x * (1 + ctx.device.xp.tanh(x * 0.5)) * 0.5, x

    def array_backward(self, residual: Residual, dy: Array, ctx: Context) -> Array:
        """Return dy · σ(x) · (1 + x · (1 - σ(x)))."""
        share = (1 + ctx.device.xp.tanh(residual * 0.5)) * 0.5
        return dy * share * (1 + residual * (1 - share))


_SCALED_TAIL = (
    *(0.5107913526210118, 0.34358034220690836, 0.13973604627798958, 0.01822111575317758),
    *(-0.01075533094226255, -0.0032395925271002444, 0.0015453059753188013, 0.00041864794708416925),
    *(-0.00033153616788940356, -1.7185119637696467e-05, 7.223171416354293e-05, -1.7077104664392366e-05),
    *(-1.0833613266623645e-05, 8.068150082404166e-06, -6.008504902047535e-07, -1.8366068429287337e-06),
    *(1.0687423327634055e-06, 1.7166502464110393e-08, -3.6759117022970176e-07, 1.4887008618273484e-07),
    *(6.433468752905662e-08, -5.118327608464229e-08, -4.613483902032081e-09, 6.560741693045815e-09),
)
"""e^(z²) · erfc(z) / t at z = 2 · (1 - t) / t: a polynomial in 2·t - 1 that interpolates it at Chebyshev's points."""


def _normal(x: Array, xp: Any) -> Array:
    """Return the part of the standard normal distribution below x. CuPy's own error function is no part of `xp`."""
    t = 2 / (2 + abs(x) * 0.5**0.5)
    u = 2 * t - 1
    p = u * 0 + _SCALED_TAIL[-1]
    for factor in _SCALED_TAIL[-2::-1]:
        p = p * u + factor
    tail = 0.5 * t * p * xp.exp(-0.5 * x * x)
    return xp.where(x < 0, tail, 1 - tail)
