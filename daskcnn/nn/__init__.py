"""Layers, networks, losses, optimizers, schedules and the flat vector of a network's weights."""

# mypy: implicit-reexport
# ruff: noqa: F401 - names for those who import the room

from daskcnn.nn.layer import Context, Layer, Params, Shape, State, walk
from daskcnn.nn.layers import LAYERS
from daskcnn.nn.losses import LOSSES, Loss, correct, labels_for
from daskcnn.nn.metrics import METRICS
from daskcnn.nn.models import MODELS, build_model, model_problem
from daskcnn.nn.network import (
    LayerSummary,
    describe,
    first_not_finite,
    freeze,
    init_network,
    loss_and_gradients,
    predict,
    summarise,
)
from daskcnn.nn.optimizers import OPTIMIZERS, SGD, Descent, Optimizer, OptimizerState, StepPace
from daskcnn.nn.schedule import SCHEDULES, RateSchedule
from daskcnn.nn.sequential import Sequential
from daskcnn.nn.spec import SpecError, sequential_from_spec
from daskcnn.nn.vector import Layout, inside, layout_of, leaves, map_leaves
