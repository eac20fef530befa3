"""How a network's convolutions would be computed on this machine: `daskcnn plan-conv`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from daskcnn.arrays import Device, keep_freed_memory, release_freed_memory, single_threaded_blas
from daskcnn.conv import ConvSpec, plan
from daskcnn.conv.planner import Candidate, candidates
from daskcnn.conv.tuner import tune
from daskcnn.errors import UserError, nearest
from daskcnn.job.network import convolutions
from daskcnn.nn import Sequential, model_problem, sequential_from_spec
from daskcnn.nn.models import MODELS, model_spec
from daskcnn.store import DATASETS, open_dataset

MEASURING = 60.0
"""Seconds for measuring a network's convolutions, when that is what was asked for."""


SINGLE = "conv"
"""In place of a network: one convolution, by the layer's own options."""


def plan_conv(
    model: str,
    *,
    batch: int,
    images: str,
    dtype: str,
    device: Device,
    measure: bool,
    layer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """How each convolution of a network would be computed on this machine, and how else; measured first if asked.

    layer: options of the layer `conv`, for the model "conv". Raises UserError for an unknown network, for images it
    does not take, for wrong options, and for a layer that does not fit the limit.
    """
    try:
        network = _network(model, image_shape(images), layer or {})
        specs = convolutions(network, image_shape(images), batch, dtype)
        if not specs:
            raise ValueError(f"model {model!r}: has no convolutions; name another network")
        if measure:
            _measure([spec for _, spec in specs], device)
        inner = 1 if model != SINGLE else 0  # a network's first layer needs no gradient of its input
        layers = [_planned(name, spec, device, need_dx=i >= inner) for i, (name, spec) in enumerate(specs)]
    except ValueError as error:
        raise UserError(f"plan-conv: {error}") from error
    means = {"device": device.backend.name, "threads": device.pool.threads, "workspace_limit": device.workspace_limit}
    return {"model": model, "batch": batch, "dtype": dtype, **means, "layers": layers}


def _measure(specs: list[ConvSpec], device: Device) -> None:
    """Measure with freed memory kept, as in a run: the times are kept for runs."""
    keep_freed_memory()
    try:
        with single_threaded_blas():
            tune(specs, device, clock=time.perf_counter, seconds=MEASURING, anew=True)
    finally:
        release_freed_memory()


def _network(model: str, image: tuple[int, int, int], layer: Mapping[str, Any]) -> Sequential:
    """The network of this name, or one convolution. Raises ValueError."""
    if model == SINGLE:
        return sequential_from_spec([{"layer": SINGLE, **layer}])
    if layer:
        options = ", ".join(f"--{name}" for name in layer)
        raise ValueError(f"{options}: options of a single convolution; write {SINGLE} in place of {model}")
    if model_problem(model):
        known = [*MODELS, SINGLE]
        raise ValueError(f"model {model!r}: no name, nor C1:C2 such as 50:500{nearest(model, known)}")
    return sequential_from_spec(model_spec(model, image, 10))


def image_shape(images: str) -> tuple[int, int, int]:
    """(H, W, C) of a data set's name, of a prepared one, or of HxWxC. Raises ValueError for anything else."""
    if images in DATASETS:
        return DATASETS[images].shape
    if "://" in images or Path(images).exists():
        return open_dataset(images).shape
    if not (match := re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})x([1-9]\d{0,4})", images)):
        raise ValueError(
            f"dataset {images!r}: write HxWxC, such as 32x32x3, a path or a name{nearest(images, DATASETS)}"
        )
    H, W, C = map(int, match.groups())
    return H, W, C


def _planned(name: str, spec: ConvSpec, device: Device, *, need_dx: bool) -> dict[str, Any]:
    chosen = plan(spec, device, need_dx=need_dx)
    return {
        "layer": name,
        "spec": asdict(spec),
        "algorithm": chosen.algorithm,
        "why": chosen.reason,
        "measured": chosen.measured,
        "seconds": chosen.seconds,
        "gflops_per_second": chosen.flops_per_second / 1e9,
        "workspace": chosen.workspace,
        "candidates": [_candidate(c, need_dx) for c in candidates(spec, device, need_dx=need_dx)],
    }


def _candidate(c: Candidate, need_dx: bool) -> dict[str, Any]:
    measured = c.measured and c.measured.step(need_dx)
    return {
        "algorithm": c.name,
        "workspace": c.workspace,
        "predicted": c.predicted.step(need_dx),
        "measured": measured,
    }
