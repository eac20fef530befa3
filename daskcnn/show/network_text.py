"""Tables of networks for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from daskcnn.show.text import aligned, size


def readable_model(result: dict[str, Any]) -> str:
    """A line a layer: output, parameters, operations of a sample there and back, memory of a batch's outputs."""
    rows = [("layer", "", "output", "parameters", "FLOP forward", "FLOP backward", "memory")]
    for row in result["layers"]:
        alone = bool(row["outputs"])
        numbers = (_count(row["parameters"]), operations(row["forward"]), operations(row["backward"]))
        shown = (*numbers, size(row["memory"])) if alone else ("", "", "", "")
        rows.append((row["name"], row["layer"], times(row["out_shape"]), *shown))
    total = {key: sum(row[key] for row in result["layers"]) for key in ("parameters", "forward", "backward", "memory")}
    sums = (f"{total['parameters']:,}", operations(total["forward"]), operations(total["backward"]))
    rows.append(("total", "", "", *sums, size(total["memory"])))
    head = f"{result['model']} for images of {times(result['image'])}, batch {result['batch']}, {result['dtype']}"
    drawn = [f"figure {result['picture']}"] if result["picture"] else []
    note = "FLOP: products of one image; memory: outputs that a step of training keeps at most."
    return "\n".join([head, "", *aligned(rows, left=2), "", note, *drawn])


def readable_models(rows: Sequence[dict[str, Any]]) -> str:
    """A line a network."""
    table = [("model", "images", "parameters", "FLOP forward", "from")]
    table += [
        (row["name"], times(row["image"]), f"{row['parameters']:,}", operations(row["forward"]), row["origin"])
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        f"{name:<{widths[0]}}  {image:>{widths[1]}}  {count:>{widths[2]}}  {flop:>{widths[3]}}  {origin}"
        for name, image, count, flop, origin in table
    ]
    return "\n".join([*lines, "C1:C2, such as 50:500: two 5×5 convolutions of C1 and C2 kernels (Marques et al.)"])


def operations(count: int) -> str:
    """'1.23 G': three digits; '-' for none."""
    for unit, many in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * many:
            return f"{count / many:.3g} {unit}"
    return str(count) if count else "-"


def times(shape: Sequence[int]) -> str:
    """'32×32×3'."""
    return "×".join(map(str, shape))


def _count(parameters: int) -> str:
    return f"{parameters:,}" if parameters else "-"
