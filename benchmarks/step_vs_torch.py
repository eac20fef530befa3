"""A whole training step against PyTorch's: the same network, weights, batch, threads and machine, in one run.

    python -m benchmarks.step_vs_torch [--models 50:500] [--batches 64] [--threads 2] [--json FILE]

A step is forward, softmax cross entropy, backward, and SGD with Nesterov momentum and weight decay. Ours and every mode
of PyTorch take turns; what counts is the median of the rounds' ratios, the least one of PyTorch's modes. The losses of
the first steps must agree. Then fresh processes tell by how much a step of ours, and of PyTorch's fastest mode, raises
the peak of a process's memory.
--scaling compares ours with itself instead: one process with all threads, and as many processes of one thread each.
--evaluation measures a forward pass and the loss alone, as evaluation and prediction run it, against the same bars.
Exit 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import (
    LR,
    NO_TORCH,
    Budget,
    Configuration,
    Results,
    configurations,
    in_fresh_process,
    parser,
    start,
    take_turns,
)
from daskcnn.arrays import single_threaded_blas
from daskcnn.job.tables import Train
from daskcnn.nn import Context, Layer, Params, Sequential, StepPace, layers, predict
from daskcnn.nn.layers.parallel import Parallel
from daskcnn.store import Batch
from daskcnn.training.replica import Replica

try:
    import torch
    from torch import nn
except ModuleNotFoundError as missing:
    raise SystemExit(NO_TORCH) from missing

Step = Callable[[], float]
"""Train on the batch once; the loss before it."""
Make = Callable[[str, Replica, Batch], Step]

OURS, MODES = "ours", ("eager", "channels_last", "compiled", "compiled_channels_last")
ALIKE = 1e-4
"""How far the losses of the first steps may be apart, relatively. A network without its LRN is 5e-4 away at once."""
STUB = Configuration("1:1", 2, 1)
"""A step of this one loads what libraries load on their first use."""
BARS: dict[tuple[str, int], tuple[float, float]] = {
    **{("quick", batch): (1.3, 1.3) for batch in (64, 256)},
    **{("lenet5", batch): (1.2, 1.2) for batch in (64, 256)},
    ("vgg11", 128): (2.0, 2.0),
    ("plain20", 128): (1.1, 1.1),
    ("resnet20", 128): (1.0, 1.0),
    ("vgg11-bn", 128): (1.8, 1.8),
    ("resnet18", 128): (1.8, 1.8),
    ("alexnet", 32): (1.0, 1.0),
    ("googlenet", 32): (1.0, 1.0),
    ("50:500", 64): (3.8, 3.4),
    ("150:800", 64): (4.3, 4.2),
    ("300:1000", 64): (4.5, 4.3),
    ("500:1500", 64): (4.6, 4.6),
}
"""How many times faster than PyTorch a step should be on one thread and on two, by network and batch."""
MEMORY_BAR, MORE, SCALING_BAR = 1.25, 32 << 20, 0.95
"""The most memory: this factor of PyTorch's, or this many bytes more, whichever is larger."""
READY = 600.0
"""Seconds that a process waits for the others of --scaling before it gives up."""
WARM_UPS = 2
"""Steps of each mode before the first that counts: memory that was never touched is slow for more than one."""
REPEATS = 3
"""How often the two sides of --scaling take turns."""


def bar(c: Configuration) -> float | None:
    """What the ratio should reach, if anything."""
    bars = BARS.get((c.model, c.batch)) if c.lrn else None
    return bars[c.threads - 1] if bars and c.threads <= len(bars) else None


# --- the two sides ---


def make_step(mode: str, replica: Replica, batch: Batch) -> Step:
    """A step of ours or of a mode of PyTorch, from the replica's present weights."""
    if mode == OURS:
        return lambda: replica.step(batch, StepPace(LR))[0]
    return torch_step(mode, replica, batch)


def torch_step(mode: str, replica: Replica, batch: Batch, device: str = "cpu") -> Step:
    """PyTorch's step, on as many threads as the replica has, or on a GPU ("cuda")."""
    torch.set_num_threads(replica.device.pool.threads)
    layout = torch.channels_last if "channels_last" in mode else torch.contiguous_format
    model = twin(replica).to(device, memory_format=layout)
    x = torch.from_numpy(batch.x.transpose(2, 3, 0, 1)).contiguous(memory_format=layout).to(device)
    labels = torch.from_numpy(batch.labels).to(device)
    sgd = sgd_of(model, replica.job.train, LR)

    heads = [module for module in model.modules() if isinstance(module, SideHead)]

    def loss_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), labels)
        for head in heads:
            loss = loss + head.weight * nn.functional.cross_entropy(head.scores, labels)
        return loss

    forward = torch.compile(loss_of) if "compiled" in mode else loss_of

    def step() -> float:
        sgd.zero_grad(set_to_none=True)
        loss = forward(x, labels)
        loss.backward()
        sgd.step()
        return loss.item()

    return step


def make_evaluation(mode: str, replica: Replica, batch: Batch) -> Step:
    """An evaluation by ours or by a mode of PyTorch, with the replica's weights. Both give the mean loss."""
    if mode == OURS:
        params, state = replica.layout.views(replica.weights)
        ctx = Context(replica.device, kept={})  # the kernels of all batches are prepared once
        return lambda: float(replica.loss(predict(replica.model, params, state, batch.x, ctx), batch.labels, np)[0])
    torch.set_num_threads(replica.device.pool.threads)
    layout = torch.channels_last if "channels_last" in mode else torch.contiguous_format
    model = twin(replica).to(memory_format=layout).eval()
    x = torch.from_numpy(batch.x.transpose(2, 3, 0, 1)).contiguous(memory_format=layout)
    labels, forward = torch.from_numpy(batch.labels), torch.compile(model) if "compiled" in mode else model

    def evaluate() -> float:
        with torch.inference_mode():
            return nn.functional.cross_entropy(forward(x), labels).item()

    return evaluate


def sgd_of(model: nn.Module, train: Train, lr: float) -> torch.optim.SGD:
    """PyTorch's optimizer of a job."""
    return torch.optim.SGD(model.parameters(), lr, train.momentum, 0, train.weight_decay, train.nesterov, fused=True)


def twin(replica: Replica) -> nn.Sequential:
    """The same network for images (N, C, H, W), with a copy of the weights."""
    params, _ = replica.layout.views(replica.host_weights())
    return _in_turn(replica.model, params)


def _modules(layer: Layer, params: Params) -> list[nn.Module]:
    return TWINS[type(layer)](layer, params)


def _in_turn(layer: Sequential, params: Params) -> nn.Sequential:
    return nn.Sequential(*(m for name, each in layer.layers for m in _modules(each, params.get(name, {}))))


class Joined(nn.Module):
    """Paths that take the same input, added up or side by side."""

    def __init__(self, layer: Parallel, params: Params) -> None:
        super().__init__()
        self.adds = not isinstance(layer, layers.Branches)
        self.paths = nn.ModuleList(
            nn.Identity() if path is None else _in_turn(path, params.get(name, {})) for name, path in layer.paths
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The joined outputs."""
        first, *others = (path(x) for path in self.paths)
        if not self.adds:
            return torch.cat([first, *others], 1)
        for other in others:
            first = first + other
        return first


class SideHead(nn.Module):
    """Passes its input on, and keeps the scores that its path makes of it."""

    def __init__(self, layer: layers.Auxiliary, params: Params) -> None:
        super().__init__()
        self.path, self.weight = _in_turn(layer.path, params["path"]), layer.weight
        self.scores: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input."""
        self.scores = self.path(x)
        return x


def _conv(layer: layers.Conv, params: Params) -> list[nn.Module]:
    R, S, C, K = params["w"].shape
    options = {"dilation": layer.dilation, "groups": layer.groups, "bias": layer.bias}
    conv = nn.Conv2d(C * layer.groups, K, (R, S), layer.stride, layer.pad, **options)
    return [_with(conv, params["w"].transpose(3, 2, 0, 1), params.get("b"))]


def _dense(layer: layers.Dense, params: Params) -> list[nn.Module]:
    """Behind a map the weights (H, W, C, units) are those of a vector of channels, rows and columns."""
    w, units = params["w"], layer.units
    matrix = (w.transpose(3, 2, 0, 1) if w.ndim == 4 else w.T).reshape(units, -1)
    linear = _with(nn.Linear(matrix.shape[1], units, bias=layer.bias), matrix, params.get("b"))
    return [nn.Flatten(), linear] if w.ndim == 4 else [linear]


def _with(module: nn.Module, w: np.ndarray, b: np.ndarray | None) -> nn.Module:
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(np.ascontiguousarray(w)))
        if b is not None:
            module.bias.copy_(torch.from_numpy(b))
    return module


def _batchnorm(layer: layers.BatchNorm, params: Params) -> list[nn.Module]:
    """PyTorch's has scale and shift or neither; a scale that ours lacks stays 1."""
    norm = nn.BatchNorm2d(len(params["shift"]), layer.epsilon, layer.momentum)
    norm.weight.requires_grad_(layer.scale)
    return [norm]


class Scaled(nn.Module):
    """Multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """factor · x."""
        return x * self.factor


def _pad(layer: layers.Pad, _: Params) -> list[nn.Module]:
    return [nn.ConstantPad3d((*[layer.size] * 4, 0, layer.channels), 0.0)]


TWINS: Mapping[type[Layer], Callable[[Any, Params], list[nn.Module]]] = {
    layers.Conv: _conv,
    layers.Dense: _dense,
    layers.BatchNorm: _batchnorm,
    layers.ReLU: lambda layer, _: [nn.ReLU()],
    layers.Tanh: lambda layer, _: [nn.Tanh()],
    layers.GELU: lambda layer, _: [nn.GELU()],
    layers.Multiply: lambda layer, _: [Scaled(layer.factor)],
    layers.LRN: lambda layer, _: [nn.LocalResponseNorm(layer.size, layer.alpha, layer.beta, layer.k)],
    layers.MaxPool: lambda layer, _: [nn.MaxPool2d(layer.size, layer.step)],
    layers.AveragePool: lambda layer, _: [nn.AvgPool2d(layer.size, layer.step)],
    layers.GlobalPool: lambda layer, _: [nn.AdaptiveAvgPool2d(1), nn.Flatten()],
    layers.Dropout: lambda layer, _: [nn.Dropout(layer.rate)],
    layers.Pad: _pad,
    layers.Residual: lambda layer, params: [Joined(layer, params)],
    layers.Branches: lambda layer, params: [Joined(layer, params)],
    layers.Auxiliary: lambda layer, params: [SideHead(layer, params)],
}


# --- time ---


def measure(c: Configuration, modes: Sequence[str], budget: Budget, make: Make = make_step) -> dict[str, Any]:
    """Median and least seconds of a step, or of what else is made, of ours and of these modes, which take turns.

    Raises RuntimeError where the losses of the first steps differ.
    """
    losses: dict[str, list[float]] = defaultdict(list)

    def noting(mode: str, step: Step) -> Callable[[], None]:
        return lambda: losses[mode].append(step())

    with single_threaded_blas():
        replica, batch = start(c)
        works = {mode: noting(mode, make(mode, replica, batch)) for mode in (OURS, *modes)}
        for _ in range(WARM_UPS):
            for work in works.values():
                work()
        taken = take_turns(works, budget)
    check_losses(losses)
    seconds = {mode: median(turns) for mode, turns in taken.items()}
    figures = {"rounds": len(taken[OURS]), "seconds": seconds, "least": {m: min(t) for m, t in taken.items()}}
    return figures | {"losses": losses[OURS][:3]} | compare(taken)


def compare(taken: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """PyTorch's fastest mode, and how many times faster we are: the median of the rounds' ratios.

    A machine whose speed changes for some rounds changes it for both sides.
    """
    ratios = {
        mode: median(theirs / own for theirs, own in zip(turns, taken[OURS], strict=True))
        for mode, turns in taken.items()
        if mode != OURS
    }
    best = min(ratios, key=lambda mode: ratios[mode])
    return {"best": best, "ratio": ratios[best]}


def check_losses(losses: Mapping[str, list[float]]) -> None:
    """Raise RuntimeError where the first three differ: it would not be the same computation."""
    ours = np.array(losses[OURS][:3])
    for mode, theirs in losses.items():
        if np.any(np.abs(theirs[:3] - ours) > ALIKE * np.abs(ours)):
            raise RuntimeError(f"{mode}: losses {theirs[:3]}, ours {ours.tolist()}: not the same computation")


# --- memory ---


def memory(c: Configuration, mode: str) -> int:
    """Bytes at the peak of a step, beyond what this process held before the network was made.

    Linux only. The first step is left out, with what the compiler, the planner and libraries need once.
    """
    with single_threaded_blas():
        make_step(mode, *start(STUB))()
        gc.collect()
        before = _status("VmRSS")
        step = make_step(mode, *start(c))
        step()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts anew from what is held now
        step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """A size of this process in bytes. getrusage's peak would be that of the parent where it was larger."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def measure_memory(c: Configuration, best: str) -> dict[str, Any]:
    """Bytes of ours and of PyTorch's fastest mode, each in a process of its own, and their ratio."""
    found = {mode: in_fresh_process(memory, c, mode) for mode in (OURS, best)}
    over = found[OURS] - max(MEMORY_BAR * found[best], found[best] + MORE)
    return {"memory": found, "memory_ratio": found[OURS] / found[best], "memory_over": over}


# --- scaling ---

_barrier: Any = None


def _share(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def ends(c: Configuration, seconds: float) -> list[float]:
    """When steps ended, in seconds since all processes were ready; two at least."""
    with single_threaded_blas():
        step = make_step(OURS, *start(c))
        for _ in range(2):
            step()
        _barrier.wait()
        begun, found = time.perf_counter(), []
        while len(found) < 2 or found[-1] < seconds:
            step()
            found.append(time.perf_counter() - begun)
    return found


def rate(c: Configuration, processes: int, seconds: float) -> float:
    """Steps a second of so many processes together."""
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, _share, (context.Barrier(processes, timeout=READY),)) as pool:
        return combined([f.result() for f in [pool.submit(ends, c, seconds) for _ in range(processes)]])


def combined(found: Sequence[Sequence[float]]) -> float:
    """The sum of the rates, over the time in which all were at work."""
    last = min(e[-1] for e in found)
    inside = [[end for end in e if end <= last] for e in found]
    return sum(len(e) / e[-1] for e in inside if e)


def measure_scaling(c: Configuration, seconds: float) -> dict[str, Any]:
    """Steps a second of one process with all threads and of as many with one thread each, in turn; medians."""
    one, many = [], []
    for _ in range(REPEATS):
        one.append(rate(c, 1, seconds / REPEATS / 2))
        many.append(rate(replace(c, threads=1), c.threads, seconds / REPEATS / 2))
    together = {"one_process": median(one), "processes_of_one_thread": median(many)}
    return {"steps_per_second": together, "scaling": median(one) / median(many)}


# --- output ---


def verdict(value: float, bar: float | None) -> str:
    """The value, and whether it keeps the bar."""
    if bar is None:
        return f"{value:5.2f}        "
    return f"{value:5.2f} ≥ {bar:<4g} {' ' if value >= bar else '✗'}"


def missed(c: Configuration, figures: Mapping[str, Any]) -> bool:
    """Whether a figure is on the wrong side of its bar."""
    return (
        figures.get("ratio", np.inf) < (bar(c) or 0)
        or figures.get("memory_over", 0) > 0
        or figures.get("scaling", np.inf) < SCALING_BAR
    )


def head(modes: Sequence[str]) -> str:
    """The first line of the table of steps."""
    times = "".join(f"{mode + ' ms':>{_width(mode)}}" for mode in (OURS, *modes))
    return f"{'network':15} batch threads{times}    ratio, bar       MiB, ours / PyTorch's"


def row(c: Configuration, figures: Mapping[str, Any]) -> str:
    """A line of that table; * marks the mode that counts."""
    marks = {figures["best"]: "*"}
    times = "".join(f"{s * 1e3:{_width(m) - 1}.1f}{marks.get(m, ' ')}" for m, s in figures["seconds"].items())
    line = f"{c}{times}   {verdict(figures['ratio'], bar(c))}"
    if "memory" not in figures:
        return line
    ours, theirs = (f"{size / 2**20:.0f}" for size in figures["memory"].values())
    kept = "" if figures["memory_over"] <= 0 else " ✗"
    return f"{line} {ours:>5} / {theirs:>5} = {figures['memory_ratio']:.2f}{kept}"


def _width(mode: str) -> int:
    return max(10, len(mode) + 5)


def time_and_memory(c: Configuration, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of a configuration against PyTorch."""
    make = make_evaluation if options.evaluation else make_step
    figures = in_fresh_process(measure, c, options.modes, Budget(options.rounds, options.seconds), make)
    if not options.no_memory and not options.evaluation:
        figures |= measure_memory(c, figures["best"])
    print(row(c, figures), flush=True)
    return figures


HEAD = f"{'network':15} batch threads one process one-thread processes, steps/s    ratio, bar"


def scaling(c: Configuration, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of a configuration against as many processes as it has threads."""
    figures = measure_scaling(c, options.seconds)
    one, many = figures["steps_per_second"].values()
    print(f"{c} {one:11.3f} {many:31.3f}   {verdict(figures['scaling'], SCALING_BAR)}", flush=True)
    return figures


def arguments() -> argparse.Namespace:
    """The command line."""
    options = parser(__doc__, seconds=20.0, what="a configuration")
    options.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="of PyTorch; default: all")
    options.add_argument("--no-lrn", action="store_true", help="measure C1:C2 without normalising layers too")
    options.add_argument("--no-memory", action="store_true", help="measure time only")
    options.add_argument("--evaluation", action="store_true", help="measure the forward pass alone; time only")
    options.add_argument("--scaling", action="store_true", help="measure what threads gain instead")
    return options.parse_args()


def main() -> int:
    """Exit code 1 where a bar is missed."""
    options = arguments()
    results, failed = Results(options.json), False
    work = scaling if options.scaling else time_and_memory
    print(
        "network         batch threads  one process  one-thread processes: steps/s, gain, bar"
        if options.scaling
        else head(options.modes)
    )
    for c in configurations(options, no_lrn=options.no_lrn):
        if options.scaling and c.threads == 1:
            continue
        figures = work(c, options)
        results.add(asdict(c), figures)
        failed |= missed(c, figures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
