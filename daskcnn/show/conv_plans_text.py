"""Plans of convolutions for people."""

from __future__ import annotations

from typing import Any

from daskcnn.conv import ConvSpec
from daskcnn.conv.planner import readable, unusual


def readable_conv_plans(result: dict[str, Any]) -> str:
    """A line a convolution, under it why, and the seconds a training step would take otherwise."""
    rows = [("layer", "convolution", "algorithm", "step", "GFLOP/s", "workspace"), *map(_row, result["layers"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    limit = result["workspace_limit"] / 2**20
    head = (
        f"{result['model']}, batch {result['batch']}, {result['dtype']}, on {result['device']}: "
        f"threads {result['threads']}, workspace up to {limit:,.0f} MiB"
    )
    for i in range(len(result["layers"]), 0, -1):
        lines[i + 1 : i + 1] = [f"{'':<{widths[0]}}  {line}" for line in _reasons(result["layers"][i - 1])]
    return "\n".join([head, "", *lines])


def _row(layer: dict[str, Any]) -> tuple[str, ...]:
    s = layer["spec"]
    down, right = s["stride"]
    stride = "" if down == right == 1 else f" stride {down}" if down == right else f" stride {down}×{right}"
    return (
        layer["layer"],
        f"{s['R']}×{s['S']} {s['C']}→{s['K']} on {s['H']}×{s['W']}{stride}{unusual(ConvSpec(**s))}",
        layer["algorithm"],
        readable(layer["seconds"]),
        f"{layer['gflops_per_second']:.0f}",
        f"{layer['workspace'] / 2**20:.1f} MiB",
    )


def _reasons(layer: dict[str, Any]) -> list[str]:
    others = [c for c in layer["candidates"] if c["algorithm"] != layer["algorithm"]]
    return [layer["why"], *([f"others: {', '.join(map(_alternative, others))}"] if others else [])]


def _alternative(c: dict[str, Any]) -> str:
    kind = "predicted" if c["measured"] is None else "measured"
    return f"{c['algorithm']} {readable(c[kind])} ({kind})"
