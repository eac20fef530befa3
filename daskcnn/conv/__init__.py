"""Convolution: the problem, the algorithms and the choice between them."""

from daskcnn.conv.algorithms import ALGORITHMS
from daskcnn.conv.im2col import Im2col
from daskcnn.conv.planner import BothForms, ConvPlan, plan
from daskcnn.conv.spec import ConvAlgorithm, ConvSpec, Prepared

__all__ = ["ALGORITHMS", "BothForms", "ConvAlgorithm", "ConvPlan", "ConvSpec", "Im2col", "Prepared", "plan"]
