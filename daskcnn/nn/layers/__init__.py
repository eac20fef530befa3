"""The layers, and the names that a list of layers uses for them."""

# mypy: implicit-reexport

from daskcnn.nn.layer import Layer
from daskcnn.nn.layers.activations import GELU, LeakyReLU, ReLU, Sigmoid, SiLU, Tanh
from daskcnn.nn.layers.auxiliary import Auxiliary
from daskcnn.nn.layers.conv import Conv
from daskcnn.nn.layers.dense import Dense
from daskcnn.nn.layers.dropout import Dropout
from daskcnn.nn.layers.normalise import LRN, BatchNorm, Multiply
from daskcnn.nn.layers.parallel import Add, Branches, Residual
from daskcnn.nn.layers.pool import AveragePool, GlobalPool, L2Pool, MaxPool
from daskcnn.nn.layers.reshape import Flatten, Pad, Reshape, Upsample

LAYERS: dict[str, type[Layer]] = {
    "conv": Conv,
    "relu": ReLU,
    "sigmoid": Sigmoid,
    "tanh": Tanh,
    "leakyrelu": LeakyReLU,
    "gelu": GELU,
    "silu": SiLU,
    "lrn": LRN,
    "batchnorm": BatchNorm,
    "maxpool": MaxPool,
    "averagepool": AveragePool,
    "l2pool": L2Pool,
    "globalpool": GlobalPool,
    "dense": Dense,
    "dropout": Dropout,
    "flatten": Flatten,
    "reshape": Reshape,
    "upsample": Upsample,
    "scale": Multiply,
    "pad": Pad,
    "residual": Residual,
    "branches": Branches,
    "add": Add,
    "auxiliary": Auxiliary,
}
"""A new layer is a line here."""


def kind_of(layer: Layer) -> str | None:
    """Return the name that a list of layers uses for a layer; None for one that `LAYERS` does not have."""
    return next((kind for kind, each in LAYERS.items() if each is type(layer)), None)
