"""Examples of every layer for the law suites: small, odd-sized, with every option off its default somewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from daskcnn.arrays import NUMPY, Array, Device, Pool
from daskcnn.nn import Context, Layer, Params, Sequential, Shape, State
from daskcnn.nn.layers import (
    GELU,
    LRN,
    Add,
    Auxiliary,
    AveragePool,
    BatchNorm,
    Branches,
    Conv,
    Dense,
    Dropout,
    Flatten,
    GlobalPool,
    L2Pool,
    LeakyReLU,
    MaxPool,
    Multiply,
    Pad,
    ReLU,
    Reshape,
    Residual,
    Sigmoid,
    SiLU,
    Tanh,
    Upsample,
)

MAP, VECTOR = (5, 4, 3), (7,)


def in_turn(*layers: Layer) -> Sequential:
    """The layers in turn, by number."""
    return Sequential(tuple((f"layer{i}", layer) for i, layer in enumerate(layers)))


BASIC = Residual(in_turn(Conv(3, 3, pad=1), BatchNorm(), ReLU(), Conv(3, 3, pad=1), BatchNorm()))
PROJECTED = Residual(in_turn(Conv(4, 3, stride=2, pad=1), Tanh()), in_turn(Conv(4, 1, stride=2, bias=False)))
BASIC_VECTOR = Residual(in_turn(Dense(3), Sigmoid()))
THERE_AND_BACK = Residual(
    Sequential((("dense1", Dense(3)), ("sigmoid1", Sigmoid()), ("dense2", Dense(7, tied="dense1"))))
)

CASES: dict[str, list[tuple[Layer, Shape]]] = {
    "conv": [
        (Conv(4, 3), MAP),
        (Conv(2, 3, stride=2, pad=1), MAP),
        (Conv(3, 2, bias=False), MAP),
        (Conv(2, 1), (3, 3, 1)),
        (Conv(2, (3, 1), stride=(1, 2), pad=(1, 0)), MAP),
        (Conv(6, 3, pad="same", groups=3), MAP),
        (Conv(4, (2, 3), stride=2, pad="same", groups=2), (5, 4, 6)),
        (Conv(2, (2, 3), dilation=(3, 1)), MAP),
    ],
    "relu": [(ReLU(), MAP), (ReLU(), VECTOR)],
    "sigmoid": [(Sigmoid(), MAP), (Sigmoid(), VECTOR)],
    "tanh": [(Tanh(), MAP), (Tanh(), VECTOR)],
    "leakyrelu": [(LeakyReLU(), MAP), (LeakyReLU(0.3), VECTOR)],
    "gelu": [(GELU(), MAP), (GELU(), VECTOR)],
    "silu": [(SiLU(), MAP), (SiLU(), VECTOR)],
    "lrn": [
        (LRN(alpha=0.5), (2, 3, 7)),
        (LRN(size=3, alpha=0.5, beta=0.6, k=2), MAP),
        (LRN(size=4, alpha=0.5), MAP),
        (LRN(size=1, alpha=0.5), MAP),
        (LRN(alpha=0.5), VECTOR),
    ],
    "batchnorm": [
        (BatchNorm(), MAP),
        (BatchNorm(momentum=0.3, epsilon=0.01), VECTOR),
        (BatchNorm(fixed=True), MAP),
        (BatchNorm(scale=False), MAP),
        (BatchNorm(shift=False), VECTOR),
        (BatchNorm(scale=False, shift=False), MAP),
    ],
    "maxpool": [(MaxPool(2), MAP), (MaxPool(3, 2), (7, 6, 2)), (MaxPool(2, 3), MAP), (MaxPool(1), MAP)],
    "averagepool": [(AveragePool(2), MAP), (AveragePool(3, 2), (7, 6, 2)), (AveragePool(2, 3), MAP)],
    "l2pool": [(L2Pool(2), MAP), (L2Pool(3, 2), (7, 6, 2)), (L2Pool(2, 3), MAP)],
    "globalpool": [(GlobalPool(), MAP), (GlobalPool(), (1, 1, 4))],
    "dense": [(Dense(3), MAP), (Dense(3), VECTOR), (Dense(3, bias=False), MAP), (Dense(17), (5, 4, 1))],
    "dropout": [(Dropout(0.4), MAP), (Dropout(0.4), VECTOR), (Dropout(0.0), MAP)],
    "flatten": [(Flatten(), MAP), (Flatten(), (1, 1, 4))],
    "reshape": [(Reshape((3, 2, 4)), (24,)), (Reshape((1, 1, 7)), VECTOR)],
    "upsample": [
        (Upsample(), MAP),
        (Upsample(3), (2, 1, 5)),
        (Upsample(1), MAP),
        (Upsample(2, "bilinear"), MAP),
        (Upsample(3, "bilinear"), (2, 1, 5)),
    ],
    "scale": [(Multiply(0.125), MAP), (Multiply(-3), VECTOR)],
    "pad": [(Pad(1), MAP), (Pad(0, channels=2), MAP), (Pad(2, 3), (1, 2, 1))],
    "residual": [
        (BASIC, MAP),
        (PROJECTED, MAP),
        (Residual(in_turn(Dense(7), Tanh())), VECTOR),
        (THERE_AND_BACK, VECTOR),
    ],
    "branches": [
        (Branches((in_turn(Conv(2, 1)), None, in_turn(MaxPool(1), Conv(4, 3, pad=1), ReLU()))), MAP),
        (Branches((in_turn(Flatten()), in_turn(GlobalPool(), BASIC_VECTOR))), MAP),
        (Branches((None, in_turn(Dropout(0.4)))), VECTOR),
    ],
    "add": [(Add((in_turn(Conv(3, 3, pad=1), LRN(size=3)), None, in_turn(BASIC))), MAP), (Add((None, None)), VECTOR)],
    "auxiliary": [(Auxiliary(in_turn(Conv(2, 3), ReLU(), Dense(4))), MAP), (Auxiliary(in_turn(Dense(4)), 0.5), VECTOR)],
}

NESTED = Sequential(
    (
        ("conv1", Conv(3, 3, pad=1)),
        ("stage", Sequential((("norm", BatchNorm()), ("relu", ReLU()), ("pool", MaxPool(2)), ("drop", Dropout(0.3))))),
        ("dense1", Dense(4)),
    )
)

TIED = Sequential(
    (
        ("there", Dense(6)),
        ("unit", Sigmoid()),
        ("inner", Dense(4)),
        ("back", Dense(6, tied="inner")),
        ("out", Dense(60, bias=False, tied="there")),
    )
)

COMPOSITES = [(NESTED, MAP), (TIED, MAP)]

ALL: list[tuple[Layer, Shape]] = [
    *((layer, shape) for cases in CASES.values() for layer, shape in cases),
    *COMPOSITES,
]


def in_blocks(nbytes: int, threads: int = 1) -> Device:
    """A device whose blocks have so few bytes that small maps have several."""
    return Device(replace(NUMPY, block_bytes=nbytes), Pool(threads))


def label(value: object) -> str:
    """Names of cases in pytest's output."""
    return type(value).__name__ if not isinstance(value, tuple) else "x".join(map(str, value))


def cast(tree: Params, dtype: str) -> Params:
    """The tree's arrays in another dtype."""
    return {k: cast(v, dtype) if isinstance(v, dict) else v.astype(dtype) for k, v in tree.items()}


def values(rng: np.random.Generator, shape: int | Shape, dtype: str = "float64") -> Array:
    """Random numbers."""
    return rng.standard_normal(shape).astype(dtype)


def example(
    layer: Layer,
    in_shape: Shape,
    device: Device,
    *,
    dtype: str = "float64",
    N: int = 3,
    training: bool = True,
    seed: int = 0,
) -> tuple[Params, State, Array, Array, Context]:
    """(params, state, x, dy, ctx) on the host, with random parameters, biases included."""
    rng = np.random.default_rng(seed)
    params, state, out_shape = layer.init(rng, in_shape)
    params = cast({k: _shaken(v, rng) for k, v in params.items()}, dtype)
    x, dy = (values(rng, (*shape[:-1], N, shape[-1]), dtype) for shape in (in_shape, out_shape))
    keys = rng.integers(0, 1 << 63, N, dtype=np.uint64)
    return params, cast(state, dtype), x, dy, Context(device, training=training, keys=keys)


def _shaken(value: Any, rng: np.random.Generator) -> Any:
    if isinstance(value, dict):
        return {k: _shaken(v, rng) for k, v in value.items()}
    return value + 0.1 * rng.standard_normal(value.shape)
