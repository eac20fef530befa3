"""Networks of layer-sharding's tests, and jobs that train them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from daskcnn.nn import Layout, Shape, init_network, sequential_from_spec
from daskcnn.sharded.balance import added_traffic
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.pieces import weighted_stages
from daskcnn.sharded.plan_parts import WorkerTraffic
from daskcnn.sharded.stages import samples_first
from daskcnn.sharded.step_plan import StepPlan
from tests.cluster.cluster_jobs import LAYERS, Watch, sharded_by_speed, small_job

REACHING: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 24, "size": 5, "pad": 2},
    {"layer": "lrn", "size": 3, "alpha": 0.5},
    {"layer": "dropout", "rate": 0.2},
    {"layer": "relu"},
    {"layer": "maxpool", "size": 2},
    {"layer": "conv", "kernels": 16, "size": 3, "pad": 1},
    {"layer": "lrn", "size": 3, "alpha": 0.5},
    {"layer": "averagepool", "size": 2},
    {"layer": "dense", "units": 10},
]
"""Every shard needs its neighbours' channels, and draws its own part of dropout's mask."""
TOGETHER = [*LAYERS[:-2], {"layer": "lrn", "size": 5}, {"layer": "flatten"}, {"layer": "dense", "units": 10}]
"""What the last shards make is put together at home, each of them with gradients of its own."""
MERGED: list[dict[str, Any]] = [
    {"layer": "averagepool", "size": 2},
    {"layer": "batchnorm"},
    {"layer": "conv", "kernels": 6, "size": 3, "pad": 1},
    {"layer": "lrn", "size": 5},
    {"layer": "maxpool", "size": 2},
    {"layer": "conv", "kernels": 8, "size": 3, "pad": 1},
    {"layer": "flatten"},
    {"layer": "dense", "units": 16},
    {"layer": "batchnorm"},
    {"layer": "relu"},
    {"layer": "dense", "units": 10},
]
"""It begins without a convolution, few kernels leave normalising to home, and it has state besides parameters."""
NORMALISED: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 12, "size": 3, "pad": 1},
    {"layer": "lrn", "size": 3, "alpha": 0.5},
    {"layer": "relu"},
    {"layer": "maxpool", "size": 4},
    {"layer": "dropout", "rate": 0.2},
    {"layer": "dense", "units": 16},
    {"layer": "batchnorm"},
    {"layer": "relu"},
    {"layer": "dense", "units": 10},
]
"""Its shards need their neighbours' channels, it draws masks, and it has state besides parameters."""

DENSE: list[dict[str, Any]] = [
    {"layer": "averagepool", "size": 2},
    {"layer": "dense", "units": 12},
    {"layer": "relu"},
    {"layer": "dense", "units": 10},
]
"""It has no convolution: each step is a task of one worker."""
UNDIVIDED: dict[str, list[dict[str, Any]]] = {
    "dense": DENSE,
    "one layer": [{"layer": "dense", "units": 10}],
    "normalised": [{"layer": "flatten"}, {"layer": "batchnorm"}, {"layer": "dense", "units": 10}],
    "block": [{"layer": "residual", "path": [{"layer": "relu"}]}, {"layer": "dense", "units": 10}],
    "no dense": [{"layer": "conv", "kernels": 10, "size": 3, "pad": 1}, {"layer": "globalpool"}],
}
"""Networks of which a step is a task or two."""

BLOCKS: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 6, "size": 3, "pad": 1},
    {"layer": "relu"},
    {
        "layer": "residual",
        "path": [
            {"layer": "conv", "kernels": 5, "size": 3, "pad": 1},
            {"layer": "relu"},
            {"layer": "conv", "kernels": 6, "size": 3, "pad": 1},
            {"layer": "dropout", "rate": 0.2},
        ],
    },
    {"layer": "relu"},
    {
        "layer": "residual",
        "path": [
            {"layer": "conv", "kernels": 4, "size": 3, "stride": 2, "pad": 1},
            {"layer": "conv", "kernels": 9, "size": 3, "pad": 1},
        ],
        "shortcut": [{"layer": "conv", "kernels": 9, "size": 1, "stride": 2}],
    },
    {"layer": "tanh"},
    {
        "layer": "residual",
        "path": [{"layer": "conv", "kernels": 12, "size": 3, "stride": 2, "pad": 1}],
        "shortcut": [{"layer": "maxpool", "size": 1, "stride": 2}, {"layer": "pad", "channels": 3}],
    },
    {"layer": "globalpool"},
    {"layer": "dense", "units": 10},
]
"""Residual blocks whose shortcuts are the input, a convolution, and channels with zeros behind them."""
_PASSED_ON: tuple[list[list[dict[str, Any]]], ...] = ([], [[]])
INCEPTION: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 6, "size": 3, "pad": 1},
    {"layer": "lrn", "size": 3, "alpha": 0.5},
    {"layer": "maxpool", "size": 2},
    *(
        {
            "layer": "branches",
            "branches": [
                [{"layer": "conv", "kernels": 3, "size": 1}, {"layer": "tanh"}],
                [
                    {"layer": "conv", "kernels": 4, "size": 1},
                    {"layer": "residual", "path": [{"layer": "conv", "kernels": 4, "size": 3, "pad": 1}]},
                ],
                [
                    {"layer": "pad", "size": 1},
                    {"layer": "averagepool", "size": 3, "stride": 1},
                    {"layer": "conv", "kernels": 5, "size": 1},
                ],
                *more,
            ],
        }
        for more in _PASSED_ON
    ),
    {"layer": "dropout", "rate": 0.2},
    {"layer": "conv", "kernels": 4, "size": 3},
    {"layer": "dense", "units": 10},
]
"""Branches one behind the other, the last of which passes its input on."""


def layer_job(path: str, runs: str = "runs", **sections: dict[str, Any]) -> dict[str, Any]:
    """A small job of strategy `layer`, its shares by speed alone, that reports each step."""
    sections["run"] = {"report_every": 1} | sections.get("run", {})
    return sharded_by_speed(small_job(path, runs, **sections))


def losses_of(watch: Watch) -> list[float]:
    """The losses of the steps that a run has reported."""
    return [event["loss"] for event in watch.of("steps")]


def step_plan(job: dict[str, Any], image: Shape, shards: dict[str, Any]) -> StepPlan:
    """A whole minibatch's step, by the kernels that the run's log has."""
    train, layers = job["train"], job["model"]["layers"]
    model, dtype = sequential_from_spec(layers), job["model"].get("dtype", "float32")
    by_samples = "samples" in {by for own in shards["divided"].values() for by in own.values()}
    stages = samples_first(stages_of(model)) if by_samples else stages_of(model)
    kernels = [{w: n for w, own in shards["kernels"].items() if (n := own.get(s.name))} for s in stages]
    layout = Layout.of(*init_network(model, 0, image, dtype))
    whole = np.dtype(dtype).itemsize
    plan = StepPlan.of(
        stages,
        image,
        kernels,
        shards["home"],
        parts=train.get("sub_batches", 1),
        samples=train["batch_size"],
        itemsize=2 if job["cluster"].get("wire") == "float16" else whole,
        weight_itemsize=whole,
    )
    return replace(plan, weighted=weighted_stages(plan.stages, layout))


def step_bytes(plan: StepPlan) -> dict[str, WorkerTraffic]:
    """Bytes that each worker sends and receives in a step, task by task."""
    messages = (
        {each.sender: WorkerTraffic(each.nbytes, 0), task.worker: WorkerTraffic(0, each.nbytes)}
        for task in plan.tasks
        for each in task.inputs
        if each.nbytes
    )
    return added_traffic([dict.fromkeys((plan.home, *chain(*plan.kernels)), WorkerTraffic(0, 0)), *messages])
