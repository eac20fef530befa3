"""Chooses the algorithm of a convolution, and says why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from daskcnn.arrays import Array, Backend, Device
from daskcnn.conv.algorithms import ALGORITHMS
from daskcnn.conv.spec import ConvAlgorithm, Convolution, ConvSpec, Prepared
from daskcnn.conv.timings import CPU, RATES, Seconds, believed, key, memory_of, predict

EXACT = 2e-6
"""The most rounding of an algorithm that is as exact as products of matrices."""
NEAR = 2.0
"""Times with at most so many times as many samples, or as few, count in proportion where no nearer ones are known."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm that fits a problem: its bytes of scratch memory, and its seconds by the model and as measured.

    samples: with which it was measured; of other than the problem's, the seconds are in proportion. 0: not measured.
    """

    name: str
    workspace: int
    predicted: Seconds
    measured: Seconds | None
    samples: int = 0

    @property
    def seconds(self) -> Seconds:
        """Measured, or else predicted."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True, slots=True)
class ConvPlan:
    """The decision for one problem: an algorithm that makes y, one that makes dx and dw, and the reason for them.

    `bind` makes it a convolution that can be called. workspace, workspace_limit: bytes of scratch memory that they
    need, and may use. seconds: of a training step, with dx if `need_dx`, measured if `measured`, or else predicted.
    """

    spec: ConvSpec
    forward_algorithm: str
    backward_algorithm: str
    workspace: int
    workspace_limit: int
    reason: str
    seconds: float
    measured: bool
    need_dx: bool

    @property
    def algorithm(self) -> str:
        """The algorithm's name, or both: "winograd-4x5, backward spectral"."""
        forward, backward = self.forward_algorithm, self.backward_algorithm
        return forward if forward == backward else f"{forward}, backward {backward}"

    @property
    def flops_per_second(self) -> float:
        """Operations of the direct convolution per second, whatever the algorithm saves; measured or predicted."""
        return (3 if self.need_dx else 2) * self.spec.flops / self.seconds

    def explain(self) -> str:
        """Return the decision in one line."""
        s, more = self.spec, unusual(self.spec)
        need, limit = (f"{n / 2**20:.1f} MiB" for n in (self.workspace, self.workspace_limit))
        return (
            f"{s.R}×{s.S} {s.C}→{s.K} on {s.H}×{s.W}, batch {s.N}, stride {s.stride}, pad {s.pad}{more}, {s.dtype}: "
            f"{self.algorithm} ({self.reason}); {s.flops / 1e9:.3g} GFLOP a direction, "
            f"{self.flops_per_second / 1e9:.3g} GFLOP/s, workspace {need} to {limit}"
        )

    def bind(self, backend: Backend) -> BoundPlan:
        """Return the chosen algorithms for this problem, on devices of this backend."""
        names = dict.fromkeys((self.forward_algorithm, self.backward_algorithm))
        there, *back = (ALGORITHMS[name].bind(self.spec, backend, self.workspace_limit) for name in names)
        return BoundPlan(self, there, *back or [there])


@dataclass(frozen=True, slots=True)
class BothForms:
    """Kernels in the form of a plan's algorithm for each way."""

    forward: Prepared
    backward: Prepared


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """A plan's algorithms, bound to its problem and its limit: planned once, called at every pass."""

    plan: ConvPlan
    there: Convolution
    back: Convolution

    def prepare(self, w: Array, device: Device, *, keep: bool = False) -> BothForms:
        """Return the kernels w (R, S, C / groups, K) in the algorithms' forms; `keep`: for many forward passes."""
        _expect("w", w, self.plan.spec.w_shape)
        form = self.there.prepare(w, device, keep=keep)
        return BothForms(form, form if self.back is self.there else self.back.prepare(w, device))

    def forward(self, x: Array, prepared: BothForms, device: Device, *, bias: Array | None = None) -> Array:
        """Return y (out_H, out_W, N, K) from x (H, W, N, C), and from bias (K,) if given."""
        _expect("x", x, self.plan.spec.x_shape)
        return self.there.forward(x, prepared.forward, device, bias=bias)

    def backward_data(self, dy: Array, prepared: BothForms, device: Device) -> Array:
        """Return dx (H, W, N, C) from dy (out_H, out_W, N, K)."""
        _expect("dy", dy, self.plan.spec.y_shape)
        return self.back.backward_data(dy, prepared.backward, device)

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, C / groups, K) from x (H, W, N, C) and dy (out_H, out_W, N, K)."""
        _expect("x", x, self.plan.spec.x_shape)
        _expect("dy", dy, self.plan.spec.y_shape)
        return self.back.backward_filter(x, dy, device)

    def backward(self, x: Array, dy: Array, prepared: BothForms, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw) from x (H, W, N, C) and dy (out_H, out_W, N, K). Work that both share is done once."""
        _expect("x", x, self.plan.spec.x_shape)
        _expect("dy", dy, self.plan.spec.y_shape)
        return self.back.backward(x, dy, prepared.backward, device)


def plan(spec: ConvSpec, device: Device, *, workspace_limit: int | None = None, need_dx: bool = True) -> ConvPlan:
    """Choose the fastest algorithm for each way of a training step, measured on this machine or else predicted.

    workspace_limit: bytes of scratch memory; the device's by default. need_dx: True if the step includes dx; false for
    a first layer. Raises ValueError if no algorithm fits the limit.
    """
    limit = device.workspace_limit if workspace_limit is None else workspace_limit
    return _plan(spec, limit, device.backend, device.pool.threads, device.exact, device.tuned, need_dx)


def bound(spec: ConvSpec, device: Device, *, need_dx: bool = True) -> BoundPlan:
    """Plan a problem and bind its plan, once for all devices of this backend, number of threads and limit."""
    return _bound(
        spec, device.workspace_limit, device.backend, device.pool.threads, device.exact, device.tuned, need_dx
    )


def candidates(spec: ConvSpec, device: Device, *, need_dx: bool = True) -> list[Candidate]:
    """Return all algorithms that support the problem, fit the device's limit and are as exact as it asks, best first.

    Measured algorithms come before all others: a prediction is not compared with a measurement.
    """
    return _candidates(
        spec, device.workspace_limit, device.backend, device.pool.threads, device.exact, device.tuned, need_dx
    )


def versions(spec: ConvSpec) -> dict[str, int]:
    """Return the algorithms that support a problem, with the versions that entries of the memory name."""
    return {name: a.version for name, a in ALGORITHMS.items() if a.supports(spec)}


def forget_plans() -> None:
    """Forget all plans, because the memory has new times."""
    _plan.cache_clear()
    _bound.cache_clear()


@lru_cache(maxsize=1024)
def _plan(
    spec: ConvSpec, limit: int, backend: Backend, threads: int, exact: bool, tuned: bool, need_dx: bool
) -> ConvPlan:
    fit = _candidates(spec, limit, backend, threads, exact, tuned, need_dx)
    if not fit:
        raise _nothing_fits(spec, limit, exact)
    measured = fit[0].measured is not None
    alike = [c for c in fit if (c.measured is not None) == measured]
    there = min(alike, key=lambda c: c.seconds.forward)
    back = min(alike, key=lambda c: c.seconds.way_back(need_dx))
    seconds = there.seconds.forward + back.seconds.way_back(need_dx)
    others = alike[1:] if there is back else alike
    near = f"measured with {fit[0].samples} samples, in proportion"
    how = "predicted" if not measured else "measured" if fit[0].samples == spec.N else near
    text = f"{how} {readable(seconds)}"
    text += "".join(f" against {c.name}'s {readable(c.seconds.step(need_dx))}" for c in others[:1])
    reason, workspace = "; ".join([text, *_left_out(spec, fit, exact)]), max(there.workspace, back.workspace)
    return ConvPlan(spec, there.name, back.name, workspace, limit, reason, seconds, measured, need_dx)


@lru_cache(maxsize=1024)
def _bound(
    spec: ConvSpec, limit: int, backend: Backend, threads: int, exact: bool, tuned: bool, need_dx: bool
) -> BoundPlan:
    return _plan(spec, limit, backend, threads, exact, tuned, need_dx).bind(backend)


def _candidates(
    spec: ConvSpec, limit: int, backend: Backend, threads: int, exact: bool, tuned: bool, need_dx: bool
) -> list[Candidate]:
    rates = RATES.get(backend.name, CPU)
    samples, measured = _measured(spec, limit, backend, threads) if tuned and believed() else (0, {})
    found = []
    for name, algorithm in ALGORITHMS.items():
        if algorithm.supports(spec) and _allowed(algorithm, exact) and (need := algorithm.workspace(spec)) <= limit:
            known = (samples, measured[name]) if name in measured else (0, None)
            found.append(Candidate(name, need, predict(algorithm, spec, rates, threads), *known[::-1]))
    return sorted(found, key=lambda c: (c.measured is None, c.seconds.step(need_dx)))


def _measured(spec: ConvSpec, limit: int, backend: Backend, threads: int) -> tuple[int, Mapping[str, Seconds]]:
    """Return the number of samples next to the problem's that was measured, and the algorithms' seconds by that.

    A worker's share of a step changes by one from step to step, and with the workers' speeds: none is measured anew.
    """
    named, entries = versions(spec), memory_of(backend).near(key(spec, threads, limit))
    known = {n: entry for n, entry in entries.items() if entry.versions == named}
    ratios = {n: max(n, spec.N) / min(n, spec.N) for n in known}
    nearest = min(ratios, key=ratios.__getitem__, default=0)
    if not nearest or ratios[nearest] > NEAR:
        return 0, {}
    part = spec.N / nearest
    return nearest, {name: Seconds(*(part * s for s in each)) for name, each in known[nearest].seconds.items()}


def _allowed(algorithm: ConvAlgorithm, exact: bool) -> bool:
    return not exact or algorithm.rounding <= EXACT


def _nothing_fits(spec: ConvSpec, limit: int, exact: bool) -> ValueError:
    needs = {name: a.workspace(spec) for name, a in ALGORITHMS.items() if a.supports(spec) and _allowed(a, exact)}
    name, need = min(needs.items(), key=lambda item: item[1])
    return ValueError(
        f"workspace_limit={limit} bytes: {name}, the least demanding algorithm, needs {need} for {spec}; "
        f"raise the limit or use a smaller batch"
    )


def _left_out(spec: ConvSpec, fit: Sequence[Candidate], exact: bool) -> Iterator[str]:
    """Yield why there was no choice, and which algorithms would take too much memory or are not exact."""
    supported, fitting = versions(spec), {c.name for c in fit}
    plain = replace(spec, stride=(1, 1), dilation=(1, 1))
    others = [name for name, a in ALGORITHMS.items() if name not in supported and a.supports(plain)]
    if len(supported) == 1 and others:
        reasons = [f"{name} {getattr(spec, name)}" for name in ("stride", "dilation") if getattr(spec, name) != (1, 1)]
        yield f"{' with '.join(reasons)} is not supported by {', '.join(others)}"
    if rough := [name for name in supported if not _allowed(ALGORITHMS[name], exact)]:
        yield f"not exact enough: {', '.join(rough)}"
    if large := [name for name in supported if name not in fitting and name not in rough]:
        yield f"more than the workspace limit for {', '.join(large)}"


def unusual(spec: ConvSpec) -> str:
    """Return ', dilation 2×2, groups 4, padding at the end 1×1': of these what a problem has."""
    pairs = {"dilation": (spec.dilation, (1, 1)), "padding at the end": (spec.pad_end, (0, 0))}
    found = [f"{name} {a}×{b}" for name, ((a, b), usual) in pairs.items() if (a, b) != usual]
    found += [f"groups {spec.groups}"] if spec.groups > 1 else []
    return "".join(f", {each}" for each in found)


def readable(seconds: float) -> str:
    """Return '1.2 ms', '3.4 s': three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _expect(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}: the plan is for {shape}; plan again for these shapes")
