"""The interface of a layer, and initial weights.

A layer is hyper-parameters and pure functions. Parameters, state and residuals are arguments. Biases start at zero.

Shapes: a *map* is (H, W, N, C), a *vector* (N, F), float32 or float64; `in_shape` and `out_shape` leave N out.
A layer never writes to the arrays it is given, and returns arrays of the dtype it received.

Layers with inner structure, such as `Sequential` and `Residual`, are layers too: their params, state and gradients are
nested by child name. A layer's path is the names from the network down to it: "residual1/path/conv2". A layer may use
the weights of an earlier one beside it (`nn.sequential`).
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array, Device

Initializer: TypeAlias = Callable[[np.random.Generator, tuple[int, ...], int, int], Array]
"""(rng, shape, inputs of a unit, units of an input) -> float64 values on the host."""


def he_normal(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Array:
    """Draw from a normal distribution of variance 2 / fan_in, for weights before a ReLU (He et al. 2015, eq. 10)."""
    return rng.normal(0.0, np.sqrt(2 / fan_in), shape)


def glorot_uniform(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Array:
    """Draw from a uniform distribution of variance 2 / (fan_in + fan_out) (Glorot and Bengio 2010, eq. 16)."""
    limit = np.sqrt(6 / (fan_in + fan_out))
    return rng.uniform(-limit, limit, shape)


def uniform_by_inputs(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Array:
    """Draw from a uniform distribution of variance 1 / (3 · fan_in): PyTorch's start. It suits normalised layers."""
    limit = 1 / np.sqrt(fan_in)
    return rng.uniform(-limit, limit, shape)


def passing_through(w: Array, groups: int = 1) -> Array:
    """Return kernels w (R, S, C / groups, K) of which each group's first ones pass a channel of the group on each.

    These are as many as the group has channels, or kernels if it has fewer: 1 at the centre, 0 elsewhere. This is
    `torch.nn.init.dirac_`: a convolution padded by half its size starts as the identity on these channels.
    """
    R, S, seen, K = w.shape
    through, channels = w.copy(), np.arange(min(seen, K // groups))
    kernels = K // groups * np.arange(groups)[:, None] + channels
    through[..., kernels] = 0
    through[R // 2, S // 2, channels, kernels] = 1
    return through


Params: TypeAlias = dict[str, Any]
State: TypeAlias = dict[str, Any]
Shape: TypeAlias = tuple[int, ...]
Start: TypeAlias = tuple[Params, State, Shape]
"""(params, state, shape of the output), float64 on the host."""
Residual: TypeAlias = Any
Keys: TypeAlias = npt.NDArray[np.uint64]


@dataclass
class Head:
    """A head in the middle of a network in a pass; `gradient`, of the whole loss, comes once that is known."""

    weight: float
    scores: Array
    gradient: Array | None = None


@dataclass(frozen=True)
class Context:
    """The circumstances of a pass.

    Attributes
    ----------
    training : whether the pass is followed by a backward pass
    keys : (N,) uint64 on the host; each identifies one presentation of a sample. Random layers draw from keys and salt.
    salt : identifies the layer's path in the network
    need_dx : if false, backward may return None for dx; a first layer's dx is of no use
    kept : results that depend on the weights alone, shared between passes; None to share nothing
    channel : number of the first channel of what the layer makes, if that is a part of a whole map
    heads : of this pass, by salt; None where only the last layer's scores are trained
    told : is called with the name and the gradients of each child of the network, as the way back finds them
    """

    device: Device
    training: bool = False
    keys: Keys | None = None
    salt: int = 0
    need_dx: bool = True
    kept: dict[Any, Any] | None = None
    channel: int = 0
    heads: dict[int, Head] | None = None
    told: Callable[[str, Params], None] | None = None

    def child(self, name: str, *, need_dx: bool = True) -> Context:
        """Return the context of the child of this name, salted with its path."""
        salt = zlib.crc32(f"{name}/".encode(), self.salt)
        # `replace` takes four times as long, and every layer of every pass has a context
        return Context(self.device, self.training, self.keys, salt, need_dx, self.kept, self.channel, self.heads)


class LayerError(ValueError):
    """A layer does not fit its input: its path, and the reason."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"layer {path}: {reason}")

    @classmethod
    def inside(cls, name: str, error: ValueError) -> LayerError:
        """Return the error of a child of this name."""
        if isinstance(error, cls):
            return cls(f"{name}/{error.path}", error.reason)
        return cls(name, str(error))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.reason)


class Layer(ABC):
    """Base of all layers. A subclass is a frozen dataclass of hyper-parameters without hidden state."""

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return the output's shape without N, by default the input's. Raises ValueError if the input does not fit."""
        return in_shape

    @abstractmethod
    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return (y, new state, residual for backward). The residual is valid only after a pass in training."""

    @abstractmethod
    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Any, Params]:
        """Return (dx or None if not `ctx.need_dx`, gradients nested like params) for the pass of this residual."""

    def init(self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform) -> Start:
        """Return the initial numbers, weights drawn by `initial`. By default there are none."""
        return {}, {}, self.out_shape(in_shape)

    def numbers(self, in_shape: Shape) -> int:
        """Return how many numbers `init` would make, parameters and state, without making them."""
        return 0

    def children(self, in_shape: Shape) -> Iterator[tuple[str, Layer, Shape]]:
        """Yield name, layer and input's shape of what it is made of, in order. Raises LayerError naming a misfit."""
        yield from ()

    def mapped(self, function: Callable[[str, Any], Any]) -> Self:
        """Return the layer with `function` of each child's name and the child in its place. A path remains a path."""
        return self

    def with_relu(self) -> Layer | None:
        """Return a layer that does what this one and a ReLU behind it do, faster on processors; None: there is none."""
        return None

    def operations(self, in_shape: Shape) -> int:
        """Return the multiplications and additions of a pass of one sample through its products; 0 by default."""
        return 0

    @property
    def reach(self) -> int | None:
        """Number of channels to each side that an output channel depends on, besides its own; None: any number.

        A layer of reach 0 may be cut by channels, along which its parameters and state lie too.
        """
        return None

    @property
    def mixes_samples(self) -> bool:
        """True if an output depends on other samples of the minibatch too, so that a minibatch cannot be cut."""
        return False

    @property
    def tied_to(self) -> str | None:
        """Name of the earlier layer beside it whose weights it uses, transposed; None: it has its own, or none."""
        return None

    def initial_before(self, after: Initializer) -> Initializer:
        """Return the initializer for weights in front of this layer; `after` is the one that the next layer asks for.

        Layers that preserve the scale of their input return `after`, a ReLU He's initializer, others Glorot's.
        """
        return after


def walk(layer: Layer, in_shape: Shape, *, composite: bool = False) -> Iterator[tuple[str, Layer, Shape]]:
    """Yield the layers inside a layer, in order: path, layer, shape of the input.

    composite: those too that are made of others, each behind them. Raises LayerError naming the one that does not fit.
    """
    for name, child, shape in layer.children(in_shape):
        alone = True
        try:
            for path, each, given in walk(child, shape, composite=composite):
                alone = False
                yield f"{name}/{path}", each, given
            child.out_shape(shape)
        except ValueError as error:
            raise LayerError.inside(name, error) from error
        if composite or alone:
            yield name, child, shape


def check_at_least(layer: Layer, minimum: float, *fields: str) -> None:
    """Raise ValueError if one of the layer's hyper-parameters, or a number of a pair, is below the minimum."""
    for field in fields:
        value = getattr(layer, field)
        if min(value if isinstance(value, tuple) else (value,)) < minimum:
            raise ValueError(f"{field}={value}: {type(layer).__name__} needs at least {minimum}")


def map_shape(layer: Layer, in_shape: Shape) -> tuple[int, int, int]:
    """Return `in_shape` as (H, W, C). Raises ValueError for a vector."""
    if len(in_shape) != 3:
        raise ValueError(
            f"input shape {in_shape}: {type(layer).__name__} works on maps (H, W, C); put it before dense and flatten"
        )
    H, W, C = in_shape
    return H, W, C
