"""Measures the candidates for a convolution where the model alone should not decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import median

import numpy as np

from daskcnn.arrays import Device, Workspace
from daskcnn.conv.algorithms import ALGORITHMS
from daskcnn.conv.planner import Candidate, candidates, forget_plans, versions
from daskcnn.conv.spec import ConvSpec
from daskcnn.conv.timings import Entry, Seconds, believed, key, memory_of

CLOSE = 2.5
"""A candidate is not run if it is predicted to take more than this many times the best one's seconds."""
HOPELESS, SLOWER = 4.0, 1.5
"""A candidate that took more than this many times the best one's seconds, in the warm-up or measured, is dropped."""
RUNS, MOST_RUNS, ENOUGH = 3, 15, 0.2
"""Measured runs of each candidate after a warm-up, if there is time: at least, at most, and seconds of a problem."""
TICK = 1e-9
"""Least seconds of a run, for clocks that are too coarse."""

Clock = Callable[[], float]
Begun = Callable[[int, int, ConvSpec], None]
"""Told how many problems are measured, of how many, and which one comes next."""


def tune(
    specs: Iterable[ConvSpec],
    device: Device,
    *,
    clock: Clock,
    seconds: float = 10.0,
    anew: bool = False,
    begun: Begun = lambda done, of, spec: None,
) -> list[ConvSpec]:
    """Measure the problems that this machine has no times for (all of them with `anew`), and remember the times.

    Small problems come first, duplicates once. A problem for which no time is left keeps the model's choice. Nothing is
    measured if measurements are not `believed`, or the device is not `tuned`. The caller keeps BLAS single-threaded.
    clock: returns seconds. seconds: for all problems together. begun: called before each problem. Returns the problems
    that were measured.
    """
    if not (device.tuned and believed()):
        return []
    device = replace(device, exact=False)  # times are kept for all runs, those that are not exact too
    memory = memory_of(device.backend)
    memory.refresh()
    forget_plans()

    def unknown(spec: ConvSpec) -> bool:
        best = next(iter(candidates(spec, device)), None)  # measured algorithms come first
        return best is not None and best.samples != spec.N

    todo = sorted((s for s in dict.fromkeys(specs) if unknown(s) or anew), key=lambda s: s.flops)
    end = clock() + seconds if todo else 0.0
    found: dict[ConvSpec, dict[str, Seconds]] = {}
    for i, spec in enumerate(todo):
        begun(i, len(todo), spec)
        now = clock()
        found |= {spec: times} if (times := measure(spec, device, clock, now + (end - now) / (len(todo) - i))) else {}
    if found:
        means = device.pool.threads, device.workspace_limit
        entries = {key(s, *means): Entry(versions=versions(s), seconds=t) for s, t in found.items()}
        memory.remember(entries, anew=anew)
        forget_plans()
    return list(found)


def measure(spec: ConvSpec, device: Device, clock: Clock, end: float) -> dict[str, Seconds]:
    """Return median seconds of the candidates worth running; none without a choice, or if `end` comes too soon."""
    names = _worth_running(candidates(spec, device), end - clock())
    if len(names) < 2:
        return {}
    # scratch memory of its own, shared by the candidates: afterwards the device's is as large as it was
    trial = _Trial(spec, replace(device, workspace=Workspace(device.xp)), clock)
    taken: dict[str, list[Seconds]] = {name: [] for name in names}
    warm_up = trial.turns(names, end)
    names = [name for name in names if name not in trial.too_large]
    if len(warm_up) < max(2, len(names)):
        return {}
    names = [name for name in names if _within(HOPELESS, warm_up[name], warm_up)]
    rounds = int(ENOUGH / sum(sum(warm_up[name]) for name in names))
    for _ in range(max(RUNS, min(MOST_RUNS, rounds))):
        runs = trial.turns(names, end)
        if len(runs) < len(names):
            break
        for name, seconds in runs.items():
            taken[name].append(seconds)
        names = [name for name in names if _within(SLOWER, runs[name], runs)]
    complete = all(taken[name] for name in names)
    medians = {n: Seconds(*map(median, zip(*runs, strict=True))) for n, runs in taken.items() if runs}
    return medians if complete else {}


class _Trial:
    """One problem on random data. too_large: algorithms whose scratch memory the device has no room for."""

    def __init__(self, spec: ConvSpec, device: Device, clock: Clock) -> None:
        self.too_large = set[str]()
        self._spec, self._device, self._clock = spec, device, clock
        rng, shapes = np.random.default_rng(0), (spec.x_shape, spec.w_shape, spec.y_shape)
        hosts = (rng.random(shape, np.float32).astype(spec.dtype, copy=False) for shape in shapes)
        self._x, self._w, self._dy = (device.backend.from_host(np.subtract(host, 0.5, out=host)) for host in hosts)

    def turns(self, names: Iterable[str], end: float) -> dict[str, Seconds]:
        """Run each algorithm in turn, as many as begin before `end`. One that finds no memory for it has no time."""
        found = {}
        for name in names:
            if self._clock() >= end:
                break
            try:
                found[name] = self._run(name)
            except MemoryError:
                self.too_large.add(name)
        return found

    def _run(self, name: str) -> Seconds:
        device = self._device
        bound = ALGORITHMS[name].bind(self._spec, device.backend, device.workspace_limit)
        begun = self._now()
        prepared = bound.prepare(self._w, device)
        bound.forward(self._x, prepared, device)
        forward = self._now()
        bound.backward(self._x, self._dy, prepared, device)
        backward = self._now()
        bound.backward_filter(self._x, self._dy, device)
        edges = (begun, forward, backward, self._now())
        return Seconds(*(max(b - a, TICK) for a, b in pairwise(edges)))

    def _now(self) -> float:
        self._device.backend.synchronize()
        return self._clock()


def _worth_running(found: Iterable[Candidate], seconds: float) -> list[str]:
    """Return the algorithms that may be the best, the likeliest first, as many as can run twice in this time."""
    predicted = {c.name: c.predicted for c in found}
    close = [name for name, each in predicted.items() if _within(CLOSE, each, predicted)]
    close.sort(key=lambda name: predicted[name].step(True))
    needed = accumulate(2 * sum(predicted[name]) for name in close)
    return [name for name, so_far in zip(close, needed, strict=True) if so_far <= seconds]


def _within(factor: float, seconds: Seconds, among: Mapping[str, Seconds]) -> bool:
    """Return whether one of the directions takes at most `factor` times the shortest: plans choose for each."""
    least = map(min, zip(*among.values(), strict=True))
    return any(own <= factor * shortest for own, shortest in zip(seconds, least, strict=True))
