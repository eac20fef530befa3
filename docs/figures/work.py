"""Figures of who computes what: samples over workers, kernels over workers, algorithms of a convolution."""

from __future__ import annotations

from typing import Any

from common import COLOURS, GREY, RED, panels
from timing import scenario

from daskcnn.conv import ALGORITHMS, ConvSpec
from daskcnn.conv.timings import CPU, predict
from daskcnn.partition import PARTITIONERS
from daskcnn.partition.proportions import balanced_shards, kernel_shards
from daskcnn.sim.papers_costs import ceiling

SECONDS = {"speed 4": 1.0, "speed 2": 2.0, "speed 1": 4.0}
SAMPLES = 2800


def partitioning() -> Any:
    """Samples of three workers after each increment, and how long a round with all of them takes each."""
    figure, axes = panels(3, 2, height=4.2, height_ratios=[2, 1], sharey="row")
    for column, name in zip(axes.T, ("idpa", "idpa-paper", "udpa"), strict=True):
        _increments(column[0], name)
        _round(column[1], name)
    axes[0, 0].set_ylabel("samples")
    axes[0, 0].legend(fontsize=8)
    return figure


def _increments(ax: Any, name: str) -> None:
    partitioner, below = PARTITIONERS[name](1 if name == "udpa" else 4), dict.fromkeys(SECONDS, 0)
    allocation, shades = partitioner.start(SAMPLES, tuple(SECONDS)), (0.45, 0.6, 0.8, 1.0)
    for increment in range(1, partitioner.increments + 1):
        allocation = partitioner.allocate(allocation, SECONDS, increment=increment)
        for i, (worker, has) in enumerate(allocation.sizes().items()):
            label = f"increment {increment}" if name == "idpa" and i == 0 else None
            shade = shades[increment - 1]
            ax.bar(i, has - below[worker], bottom=below[worker], color=COLOURS[0], alpha=shade, label=label)
            below[worker] = has
    ax.set_xticks(range(len(SECONDS)), list(SECONDS))
    ax.set_title(name)


def _round(ax: Any, name: str) -> None:
    partitioner = PARTITIONERS[name](1 if name == "udpa" else 4)
    allocation = partitioner.start(SAMPLES, tuple(SECONDS))
    for increment in range(1, partitioner.increments + 1):
        allocation = partitioner.allocate(allocation, SECONDS, increment=increment)
    taken = [has * SECONDS[worker] for worker, has in allocation.sizes().items()]
    ax.barh(range(len(taken)), taken, color=COLOURS[0])
    ax.barh(range(len(taken)), [max(taken) - t for t in taken], left=taken, color=RED, alpha=0.6)
    ax.set_yticks(range(len(taken)), list(SECONDS))
    ax.invert_yaxis()
    ax.set_xlabel("seconds; red: waiting")
    ax.set_ylabel("")


def layer_sharding() -> Any:
    """Kernels of four workers by two cuts, and the speed-up by the number of workers."""
    figure, (left, right) = panels(2)
    seconds, fixed = (10.0, 15.0, 20.0, 300.0), (0.5, 0.5, 0.5, 6.0)
    cuts = {"Eq. 1": kernel_shards(64, seconds), "with fixed costs": balanced_shards(64, seconds, fixed)}
    for i, (name, kernels) in enumerate(cuts.items()):
        left.bar([w + 0.38 * i - 0.19 for w in range(4)], kernels, 0.36, color=COLOURS[i], label=name)
        for w, k in enumerate(kernels):
            left.text(w + 0.38 * i - 0.19, k + 0.4, str(k), ha="center", fontsize=8)
    left.set_xticks(range(4), [f"{s:g} s" for s in seconds])
    left.set(xlabel="seconds of the whole layer on each worker", ylabel="kernels of 64", title="Who gets which kernels")
    left.legend()
    _speedups(right)
    return figure


def _speedups(ax: Any) -> None:
    devices, links = (1, 2, 3, 4, 6, 8, 12, 16), {"5 MB/s": 5e6, "1 Gb/s": 1.25e8, "10 Gb/s": 1.25e9}
    for colour, (label, bandwidth) in zip(COLOURS, links.items(), strict=False):
        found = [scenario("layer", n, bandwidth, model="500:1500", speed=10) for n in devices]
        ax.plot(devices, [each.star(each.cluster).speedup() for each in found], "o-", ms=3, color=colour, label=label)
    top = ceiling(found[0].star(found[0].cluster).serial)
    ax.axhline(top, color=GREY, ls="--", lw=0.8)
    ax.text(devices[-1], top, f"1/f = {top:.1f}", ha="right", va="bottom", color=GREY)
    ax.set(xlabel="equal workers", ylabel="speed-up", title="500:1500 as the paper shards it, workers of 10 images/s")
    ax.legend()


def convolution() -> Any:
    """Predicted seconds of a training step by the number of channels."""
    figure, axes = panels(2, sharey=True)
    widths = (4, 8, 16, 32, 64, 128, 256, 512)
    for ax, size in zip(axes, (3, 5), strict=True):
        specs = [ConvSpec(N=64, H=32, W=32, C=c, K=c, R=size, S=size, pad=(size // 2, size // 2)) for c in widths]
        names = ["im2col", "spectral-16", *(("winograd-2x3", "winograd-4x3") if size == 3 else ("winograd-4x5",))]
        for colour, name in zip(COLOURS, names, strict=False):
            rates = [3 * spec.flops / predict(ALGORITHMS[name], spec, CPU, 1).step(True) / 1e9 for spec in specs]
            ax.plot(widths, rates, "o-", ms=3, color=colour, label=name)
        ax.set_xscale("log", base=2)
        ax.set_xticks(widths, [str(w) for w in widths])
        ax.set(xlabel="channels and kernels", title=f"{size}×{size} kernels on 32×32 maps, one thread, predicted")
        ax.legend()
    axes[0].set_ylabel("GFLOP/s of the direct convolution")
    return figure
