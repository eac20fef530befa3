"""The layers, and the names that a list of layers uses for them."""

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

__all__ = [
    "GELU",
    "LAYERS",
    "LRN",
    "Add",
    "Auxiliary",
    "AveragePool",
    "BatchNorm",
    "Branches",
    "Conv",
    "Dense",
    "Dropout",
    "Flatten",
    "GlobalPool",
    "L2Pool",
    "LeakyReLU",
    "MaxPool",
    "Multiply",
    "Pad",
    "ReLU",
    "Reshape",
    "Residual",
    "SiLU",
    "Sigmoid",
    "Tanh",
    "Upsample",
]
