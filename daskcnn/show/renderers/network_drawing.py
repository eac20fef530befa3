"""A network drawn as a graph: a box a layer, from the top down, paths side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path as File

from daskcnn.nn import Layer, Sequential, Shape
from daskcnn.nn.layers import Add, Auxiliary, Branches, Residual
from daskcnn.nn.layers.parallel import Parallel
from daskcnn.nn.network import label
from daskcnn.show.renderers.drawing import COLOURS, need_matplotlib, saved
from daskcnn.show.renderers.network_text import times

WIDTH, HEIGHT, GAP = 3.4, 0.5, 0.22  # inches of a box, and between two boxes
_SIGNS = {Residual: "+", Add: "+", Branches: "side by side"}
_HUES = {"Conv": 0, "Dense": 1, "BatchNorm": 2, "LRN": 2, "MaxPool": 3, "AveragePool": 3, "L2Pool": 3, "GlobalPool": 3}
_OTHERS = "#888888"


@dataclass(frozen=True)
class Box:
    """A box with its middle at (x, y), in inches; y grows downwards."""

    x: float
    y: float
    text: str
    kind: str


@dataclass
class NetworkDrawing:
    """Boxes, lines from (x, y) to (x, y), and the size of all."""

    boxes: list[Box] = field(default_factory=list)
    lines: list[tuple[float, float, float, float]] = field(default_factory=list)
    width: float = WIDTH
    height: float = 0.0


def drawn(model: Sequential, in_shape: Shape) -> NetworkDrawing:
    """Return the places of a network's boxes and lines."""
    drawing = NetworkDrawing(width=_width(model))
    middle = drawing.width / 2
    drawing.boxes.append(Box(middle, HEIGHT / 2, f"images {times(in_shape)}", "input"))
    drawing.height = _place(drawing, model, in_shape, middle, HEIGHT)
    return drawing


def _width(layer: Layer | None) -> float:
    """Inches that a layer takes; an empty path takes a line."""
    if isinstance(layer, Sequential):
        return max(_width(child) for _, child in layer.layers)
    if isinstance(layer, Parallel):
        paths = [_width(path) for _, path in layer.paths]
        return sum(paths) + GAP * (len(paths) - 1)
    if isinstance(layer, Auxiliary):
        return WIDTH + GAP + _width(layer.path)
    return WIDTH if layer is not None else 2 * GAP


def _place(drawing: NetworkDrawing, layer: Sequential, shape: Shape, x: float, top: float) -> float:
    """Place layers in turn below `top`, joined by lines; return where they end."""
    for name, child, given in layer.children(shape):
        if isinstance(child, Parallel):
            top = _place_paths(drawing, child, given, x, top)
        elif isinstance(child, Auxiliary):
            side = x + WIDTH / 2 + GAP + _width(child.path) / 2
            drawing.lines += [(x, top + GAP / 2, side, top + GAP / 2)]
            low = _place(drawing, child.path, given, side, top + GAP / 2)
            drawing.lines.append((x, top, x, low))
            top = low
        else:
            text = f"{name}  {label(child).removesuffix('()')}\n{times(child.out_shape(given))}"
            top = _place_box(drawing, text, type(child).__name__, x, top)
    return top


def _place_paths(drawing: NetworkDrawing, layer: Parallel, shape: Shape, x: float, top: float) -> float:
    """Place paths side by side, and the box in which they meet."""
    widths = [_width(path) for _, path in layer.paths]
    left, begin = x - _width(layer) / 2, top + GAP / 2
    middles = []
    for width in widths:
        middles.append(left + width / 2)
        left += width + GAP
    ends = [
        begin if path is None else _place(drawing, path, shape, middle, begin)
        for (_, path), middle in zip(layer.paths, middles, strict=True)
    ]
    low = max(ends) + GAP / 2
    drawing.lines.append((x, top, x, begin))
    drawing.lines += [(min(*middles, x), y, max(*middles, x), y) for y in (begin, low)]
    drawing.lines += [(middle, end, middle, low) for middle, end in zip(middles, ends, strict=True)]
    return _place_box(drawing, f"{_SIGNS[type(layer)]}  {times(layer.out_shape(shape))}", "join", x, low)


def _place_box(drawing: NetworkDrawing, text: str, kind: str, x: float, top: float) -> float:
    drawing.lines.append((x, top, x, top + GAP))
    drawing.boxes.append(Box(x, top + GAP + HEIGHT / 2, text, kind))
    return top + GAP + HEIGHT


def draw_network(drawing: NetworkDrawing, title: str, file: File) -> File:
    """Draw one picture, SVG or PNG by the file's ending. Raises UserError without matplotlib, DataError on disk."""
    matplotlib = need_matplotlib()
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import FancyBboxPatch

    margin, head = 0.3, 0.5
    size = drawing.width + 2 * margin, drawing.height + 2 * margin + head
    with matplotlib.rc_context({"svg.hashsalt": title, "font.size": 8, "svg.fonttype": "none"}):
        canvas = Canvas(figsize=size)
        axes = canvas.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(-margin, drawing.width + margin)
        axes.set_ylim(drawing.height + margin, -margin - head)
        axes.axis("off")
        axes.text(drawing.width / 2, -margin, title, ha="center", va="center", fontsize=11)
        for x0, y0, x1, y1 in drawing.lines:
            axes.plot([x0, x1], [y0, y1], color="#555555", linewidth=1, zorder=1)
        for box in drawing.boxes:
            width = WIDTH if box.kind not in ("join", "input") else WIDTH / 2
            hue = COLOURS[_HUES[box.kind]] if box.kind in _HUES else _OTHERS
            corner = box.x - width / 2 + 0.06, box.y - HEIGHT / 2 + 0.06
            shape = FancyBboxPatch(corner, width - 0.12, HEIGHT - 0.12, boxstyle="round,pad=0.06", zorder=2)
            shape.set(facecolor="white", edgecolor=hue, linewidth=1.4)
            axes.add_patch(shape)
            axes.text(box.x, box.y, box.text, ha="center", va="center", zorder=3)
        return saved(canvas, file, dpi=100)
