"""Convolution: the problem, the algorithms and the choice between them."""

from daskcnn.conv.algorithms import ALGORITHMS
from daskcnn.conv.im2col import Im2col
from daskcnn.conv.planner import BothForms, BoundPlan, ConvPlan, bound, plan
from daskcnn.conv.spec import ConvAlgorithm, Convolution, ConvSpec, Prepared

__all__ = [
    "ALGORITHMS",
    "BothForms",
    "BoundPlan",
    "ConvAlgorithm",
    "ConvPlan",
    "ConvSpec",
    "Convolution",
    "Im2col",
    "Prepared",
    "bound",
    "plan",
]
