"""Optimizers: pure steps over flat vectors, one file each, and which parameters they step in which way."""

from daskcnn.nn.optimizers.adamw import AdamW
from daskcnn.nn.optimizers.average import Averaged
from daskcnn.nn.optimizers.descent import Descent, Gradients, Span, Treatment
from daskcnn.nn.optimizers.lars import LARS
from daskcnn.nn.optimizers.lookahead import Lookahead
from daskcnn.nn.optimizers.optimizer import Optimizer, OptimizerState, StepPace
from daskcnn.nn.optimizers.sgd import SGD

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adamw": AdamW,
    "lars": LARS,
}

__all__ = [
    "LARS",
    "OPTIMIZERS",
    "SGD",
    "AdamW",
    "Averaged",
    "Descent",
    "Gradients",
    "Lookahead",
    "Optimizer",
    "OptimizerState",
    "Span",
    "StepPace",
    "Treatment",
]
