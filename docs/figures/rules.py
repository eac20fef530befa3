"""Figures of the update rules. Each is computed by the rule that a run uses (`daskcnn.ps`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from common import AMBER, BLUE, COLOURS, GREEN, GREY, RED, panels

from daskcnn.ps import Push
from daskcnn.ps.admm import ADMM
from daskcnn.ps.agwu import AGWU
from daskcnn.ps.easgd import EASGD
from daskcnn.ps.local_sgd import LocalSGD
from daskcnn.ps.parallel_sgd import ParallelSGD
from daskcnn.ps.rule import Local, View
from daskcnn.ps.sgwu import SGWU
from daskcnn.ps.versions import Bases


def push(worker: int, payload: Any, base: int = 0, accuracy: float = 1.0) -> Push:
    """A push as the server gets it."""
    return Push(0, str(worker), 0, 1, base, np.asarray(payload, float), n_samples=1, accuracy=accuracy)


def view(version: int, bases: Sequence[int]) -> View:
    """A server of this version, whose workers train from these versions."""
    known = Bases()
    for worker, base in enumerate(bases):
        known.set(str(worker), base)
    return View(version, len(bases), known)


def weight_updating() -> Any:
    """γ by staleness; and the mean by accuracy of three replicas in a plane."""
    figure, (left, right) = panels(2, width_ratios=[1.25, 1])
    _attenuation(left)
    _accuracy_mean(right)
    return figure


def _attenuation(ax: Any) -> None:
    ages, others = np.arange(0, 9), 3
    for version, colour in zip((10, 100, 1000), (BLUE, GREEN, AMBER), strict=True):
        gammas = [_gamma(AGWU(), version, age, others) for age in ages]
        ax.plot(ages, gammas, "o-", ms=3, color=colour, label=f"paper, v = {version}")
    by_age = AGWU(attenuation="staleness")
    ax.plot(ages, [_gamma(by_age, 1000, age, others) for age in ages], "s--", ms=3, color=RED, label="staleness, any v")
    ax.set(xlabel="staleness v − k of the push", ylabel="γ", ylim=(0, None))
    ax.set_title("AGWU: weight of a push; the three others are current")
    ax.legend()


def _gamma(rule: AGWU, version: int, age: int, others: int) -> float:
    base = version - int(age)
    seen = view(version, [base, *[version] * others])
    return rule.merge(np.zeros(1), {}, [push(0, [1.0], base)], seen).gamma["0"]


def _accuracy_mean(ax: Any) -> None:
    replicas, accuracies = [(0.0, 0.0), (4.0, 0.4), (1.6, 3.0)], [0.2, 0.8, 0.4]
    pushes = [push(i, w, accuracy=q) for i, (w, q) in enumerate(zip(replicas, accuracies, strict=True))]
    seen = view(0, [0, 0, 0])
    weighted = SGWU().merge(np.zeros(2), {}, pushes, seen).center
    mean = SGWU().merge(np.zeros(2), {}, [push(i, w) for i, w in enumerate(replicas)], seen).center
    for (x, y), q in zip(replicas, accuracies, strict=True):
        ax.plot([x, weighted[0]], [y, weighted[1]], color="#dddddd", zorder=0)
        ax.plot(x, y, "o", ms=6 + 14 * q, color=BLUE, alpha=0.85)
        ax.annotate(f"Q = {q}", (x, y), xytext=(9, 8), textcoords="offset points")
    ax.plot(*mean, "x", color=GREY, ms=9, mew=2, label="mean")
    ax.plot(*weighted, "*", color=RED, ms=13, label="SGWU")
    ax.set(xlim=(-0.7, 5.2), ylim=(-0.7, 3.9), xlabel="weight 1", ylabel="weight 2")
    ax.set_title("SGWU: replicas in a plane of two weights")
    ax.legend(loc="upper right")


def easgd() -> Any:
    """Two replicas on a noisy parabola, tied to the center by springs."""
    figure, axes = panels(2, sharey=True)
    for ax, alpha in zip(axes, (0.1, 0.5), strict=True):
        center, replicas = _springs(EASGD(alpha=alpha), steps=60)
        for name, path, colour in zip(("replica 1", "replica 2"), replicas, (BLUE, GREEN), strict=True):
            ax.plot(path, color=colour, lw=1, label=name)
        ax.plot(center, color=RED, lw=2, label="center")
        ax.axhline(0, color=GREY, lw=0.6)
        ax.set(title=f"α = {alpha}", xlabel="steps")
    axes[0].set_ylabel("distance from the minimum")
    axes[1].legend()
    return figure


def _springs(rule: EASGD, steps: int) -> tuple[list[float], list[list[float]]]:
    rng, center = np.random.default_rng(3), np.array([4.0])
    locals_ = [Local(np.array([x]), center.copy()) for x in (5.5, 2.5)]
    seen, path, paths = view(0, [0, 0]), [], [[], []]
    for _ in range(steps):
        for i, local in enumerate(locals_):
            local.weights -= 0.1 * (local.weights + rng.normal(0, 4, 1))
            paths[i].append(float(local.weights[0]))  # before the springs pull
            merged = rule.merge(center, {}, [push(i, local.weights)], seen)
            rule.adopt(local, merged.replies[str(i)], 0)
            center = merged.center
        path.append(float(center[0]))
    return path, paths


def admm() -> Any:
    """Two workers with different parabolas: with ρ the center goes to the minimum of their sum."""
    figure, ax = panels()
    for rho, colour in ((0.0, GREY), (0.5, BLUE), (2.0, GREEN)):
        ax.plot(_consensus(ADMM(rho=rho), meetings=30), "o-", ms=3, color=colour, label=f"ρ = {rho:g}")
    ax.axhline(4, color=RED, lw=0.8, ls="--")
    ax.text(30, 4.04, "minimum of the sum", color=RED, ha="right")
    ax.axhline(3, color=GREY, lw=0.8, ls="--")
    ax.text(30, 3.04, "mean of the two minima", color=GREY, ha="right")
    ax.set(xlabel="meetings", ylabel="center z", title="Losses (w − 1)² / 2 and 3 (w − 5)² / 2", ylim=(0, 4.7))
    ax.legend(loc="lower right")
    return figure


def _consensus(rule: ADMM, meetings: int) -> list[float]:
    center, path, seen = np.zeros(1), [0.0], view(0, [0, 0])
    locals_ = [Local(center.copy(), center.copy()) for _ in range(2)]
    for _ in range(meetings):
        for local, steep, least in zip(locals_, (1.0, 3.0), (1.0, 5.0), strict=True):
            for _ in range(40):
                local.weights -= 0.1 * rule.local_step(steep * (local.weights - least), local)
        pushes = [push(i, rule.payload(local)) for i, local in enumerate(locals_)]
        center = rule.merge(center, {}, pushes, seen).center
        for local in locals_:
            rule.adopt(local, center.copy(), 0)
        path.append(float(center[0]))
    return path


def parallel_sgd() -> Any:
    """The distance of the mean of m replicas from the minimum of a noisy parabola."""
    figure, ax = panels()
    rng, numbers, tries = np.random.default_rng(0), (1, 2, 4, 8, 16, 32), 200
    alone = rng.normal(0, 1, (tries, max(numbers)))  # each is changed below by its own noisy steps
    for _ in range(200):
        alone -= 0.05 * (alone + rng.normal(0, 3, alone.shape))
    errors = [[abs(_mean(ends[:m])) for ends in alone] for m in numbers]
    for m, found in zip(numbers, errors, strict=True):
        ax.plot(m * 2 ** rng.uniform(-0.12, 0.12, tries), found, ".", ms=2.5, color=COLOURS[5], zorder=0)
    means = [float(np.mean(found)) for found in errors]
    ax.plot(numbers, means, "o-", color=BLUE, label="mean of 200 trials")
    ax.plot(numbers, [means[0] / m**0.5 for m in numbers], "--", color=RED, label="1 / √m")
    ax.set_xscale("log", base=2)
    ax.set_xticks(numbers, [str(m) for m in numbers])
    ax.set(xlabel="replicas that are averaged, m", ylabel="distance from the minimum", ylim=(0, None))
    ax.legend()
    return figure


def _mean(ends: Any) -> float:
    pushes = [push(i, [end]) for i, end in enumerate(ends)]
    return float(ParallelSGD().merge(np.zeros(1), {}, pushes, view(0, [0] * len(ends))).center[0])


def local_sgd() -> Any:
    """One machine and four replicas on a noisy parabola, by the samples that all have seen together."""
    figure, ax = panels()
    sides = [
        ("one machine", 1, None, GREY),
        ("4 replicas, μ = 0", 4, 0.0, BLUE),
        ("4 replicas, μ = 0.75", 4, 0.75, RED),
    ]
    for label, replicas, momentum, colour in sides:
        rule = LocalSGD(outer_momentum=momentum)
        seen = [replicas * 5 * meeting for meeting in range(1 + 800 // (replicas * 5))]
        ax.plot(seen, _met(rule, replicas, meetings=len(seen) - 1, steps=5), color=colour, label=label)
    ax.set(xlabel="minibatches of all together", ylabel="distance from the minimum", ylim=(0, None))
    ax.set_title("Meetings after every 5 steps of each; mean of 400 trials")
    ax.legend()
    return figure


def _met(rule: LocalSGD, replicas: int, meetings: int, steps: int) -> list[float]:
    """The mean distance of the center from 0 in 400 trials, which are the numbers of one vector."""
    rng, center, seen = np.random.default_rng(0), np.full(400, 4.0), view(0, [0] * replicas)
    state, path = rule.init(center), [4.0]
    for _ in range(meetings):
        locals_ = [Local(center.copy(), center) for _ in range(replicas)]
        for local in locals_:
            for _ in range(steps):
                local.weights -= 0.01 * (local.weights + rng.normal(0, 6, 400))
        merge = rule.merge(center, state, [push(i, rule.payload(local)) for i, local in enumerate(locals_)], seen)
        center, state = merge.center, merge.state
        path.append(float(np.abs(center).mean()))
    return path
