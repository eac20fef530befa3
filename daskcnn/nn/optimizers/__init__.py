"""Optimizers: pure steps over flat vectors, and which parameters they step in which way."""

# mypy: implicit-reexport
# ruff: noqa: F401 - names for those who import the room

from daskcnn.nn.optimizers.center import OWN, CenterDescent
from daskcnn.nn.optimizers.descent import Descent, Gradients, Span, Treatment
from daskcnn.nn.optimizers.optimizer import Optimizer, OptimizerState, StepPace
from daskcnn.nn.optimizers.steps import LARS, SGD, AdamW
from daskcnn.nn.optimizers.wrappers import Averaged, Lookahead

OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adamw": AdamW, "lars": LARS}
