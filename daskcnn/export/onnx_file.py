"""A trained network as an ONNX model: from images as they are at rest to probabilities, or to images.

`CONVERTERS` makes nodes of each kind of layer. Maps are (N, C, H, W) there, vectors (N, F).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, checker, helper, numpy_helper

from daskcnn.errors import UserError
from daskcnn.export.trained_layers import TrainedLayer, converter_of, trained_layers, version
from daskcnn.files import output_file, replace_file
from daskcnn.nn.losses import SigmoidReconstruction
from daskcnn.store import Described
from daskcnn.store.chunk_facts import mark_of
from daskcnn.training.trained_network import Classifier


class Graph:
    """The nodes and constants of a graph that is being built. Values are known by name."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def constant(self, name: str, value: npt.ArrayLike, dtype: npt.DTypeLike = np.float32) -> str:
        """Add a constant and return its name."""
        array = np.ascontiguousarray(np.asarray(value), dtype).reshape(np.shape(value))
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def add(self, kind: str, name: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output, and return the name of both."""
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name


Converter: TypeAlias = Callable[[Graph, TrainedLayer, str], str]
"""(graph, layer, name of its input) -> name of its output."""


def add_layer(graph: Graph, trained: TrainedLayer, x: str) -> str:
    """Add a layer behind the value x and return the name of its output. Raises UserError for one without converter."""
    return converter_of(trained, CONVERTERS, "ONNX", "daskcnn/export/onnx_file.py")(graph, trained, x)


def _conv(graph: Graph, trained: TrainedLayer, x: str) -> str:
    s, name, inputs = trained.problem, trained.name, [x]
    inputs.append(graph.constant(f"{name}.w", trained.values["w"].transpose(3, 2, 0, 1)))
    if trained.layer.bias:
        inputs.append(graph.constant(f"{name}.b", trained.values["b"]))
    pads = [*s.pad, s.pad[0] + s.pad_end[0], s.pad[1] + s.pad_end[1]]
    window = {"kernel_shape": [s.R, s.S], "strides": s.stride, "pads": pads, "dilations": s.dilation}
    return graph.add("Conv", name, *inputs, group=s.groups, **window)


def _dense(graph: Graph, trained: TrainedLayer, x: str) -> str:
    layer, name = trained.layer, trained.name
    if trained.owner is not None:
        return _tied(graph, trained, trained.owner, x)
    if len(trained.in_shape) == 3:
        x = graph.add("Flatten", f"{name}.flat", x)
    inputs = [x, graph.constant(f"{name}.w", trained.w_chw)]
    if layer.bias:
        inputs.append(graph.constant(f"{name}.b", trained.values["b"]))
    return graph.add("Gemm", name, *inputs)


def _tied(graph: Graph, trained: TrainedLayer, owner: TrainedLayer, x: str) -> str:
    """Add a product with the owner's constant, transposed. That of a map comes in the order of channels-first maps."""
    name, of_map = trained.name, len(owner.in_shape) == 3
    product = f"{name}.product" if of_map or "b" in trained.values else name
    y = graph.add("Gemm", product, x, f"{owner.name}.w", transB=1)
    if of_map:
        H, W, C = owner.in_shape
        y = graph.add("Reshape", f"{name}.map", y, graph.constant(f"{name}.shape", [-1, C, H, W], int))
        y = graph.add("Transpose", f"{name}.nhwc", y, perm=[0, 2, 3, 1])
        y = graph.add("Flatten", f"{name}.vector" if "b" in trained.values else name, y)
    if "b" not in trained.values:
        return y
    return graph.add("Add", name, y, graph.constant(f"{name}.b", trained.values["b"]))


def _lrn(graph: Graph, trained: TrainedLayer, x: str) -> str:
    """Add a node of this name, or several: runtimes refuse vectors, windows of an even size, and α or β of 0 or less.

    The mean of the squares over a window is then an average pool along the channels, edges counted as zeros.
    """
    layer, name, C = trained.layer, trained.name, trained.in_shape[-1]
    if len(trained.in_shape) == 3 and layer.size % 2 and np.float32(layer.alpha) > 0 < np.float32(layer.beta):
        numbers = {"alpha": layer.alpha, "beta": layer.beta, "bias": layer.k}
        return graph.add("LRN", name, x, size=layer.size, **{key: float(value) for key, value in numbers.items()})
    before, after = layer.size // 2, (layer.size - 1) // 2
    squares = graph.add("Mul", f"{name}.squares", x, x)
    column_shape = graph.constant(f"{name}.column_shape", [-1, 1, C, prod(trained.in_shape[:-1])], int)
    column = graph.add("Reshape", f"{name}.column", squares, column_shape)
    pads = {"pads": [before, 0, after, 0], "count_include_pad": 1}
    means = graph.add("AveragePool", f"{name}.window", column, kernel_shape=[layer.size, 1], strides=[1, 1], **pads)
    shape = [-1, C, *trained.in_shape[:-1]]
    means = graph.add("Reshape", f"{name}.means", means, graph.constant(f"{name}.shape", shape, int))
    scaled = graph.add("Mul", f"{name}.scaled", means, graph.constant(f"{name}.alpha", layer.alpha))
    scale = graph.add("Add", f"{name}.scale", scaled, graph.constant(f"{name}.k", layer.k))
    power = graph.add("Pow", f"{name}.power", scale, graph.constant(f"{name}.beta", layer.beta))
    return graph.add("Div", name, x, power)


def _batchnorm(graph: Graph, trained: TrainedLayer, x: str) -> str:
    layer, name, values = trained.layer, trained.name, dict(trained.values)
    values["scale"], values["shift"] = trained.scale_and_shift
    values["variance"] = np.maximum(values["variance"], 0)  # as the layer itself does
    constants = [graph.constant(f"{name}.{key}", values[key]) for key in ("scale", "shift", "mean", "variance")]
    return graph.add("BatchNormalization", name, x, *constants, epsilon=float(layer.epsilon))


def node(kind: str, attributes: Callable[[Any], dict[str, Any]] = lambda layer: {}) -> Converter:
    """Return the converter to one node, with attributes from the layer's options."""
    return lambda graph, trained, x: graph.add(kind, trained.name, x, **attributes(trained.layer))


def _window(layer: Any) -> dict[str, Any]:
    return {"kernel_shape": [layer.size] * 2, "strides": [layer.step] * 2}


def _gelu(graph: Graph, trained: TrainedLayer, x: str) -> str:
    """Return x · (1 + erf(x / √2)) / 2: the operator of this name came with a later version than runtimes have."""
    name = trained.name
    scaled = graph.add("Mul", f"{name}.scaled", x, graph.constant(f"{name}.scale", 0.5**0.5))
    error = graph.add("Erf", f"{name}.error", scaled)
    twice = graph.add("Add", f"{name}.twice", error, graph.constant(f"{name}.one", 1.0))
    share = graph.add("Mul", f"{name}.share", twice, graph.constant(f"{name}.half", 0.5))
    return graph.add("Mul", name, x, share)


def _reshape(graph: Graph, trained: TrainedLayer, x: str) -> str:
    layer, name = trained.layer, trained.name
    rows = graph.add("Reshape", f"{name}.nhwc", x, graph.constant(f"{name}.shape", [-1, *layer.shape], int))
    return graph.add("Transpose", name, rows, perm=[0, 3, 1, 2])


def _upsample(graph: Graph, trained: TrainedLayer, x: str) -> str:
    layer, name = trained.layer, trained.name
    factors = graph.constant(f"{name}.factors", [1, 1, layer.factor, layer.factor])
    if layer.mode == "bilinear":
        how = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
    else:
        how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return graph.add("Resize", name, x, "", factors, **how)


def _paths(graph: Graph, trained: TrainedLayer, x: str) -> list[str]:
    """Return the outputs of the paths, in order; an empty one's is x."""
    inner, ends = {child.name.rpartition(".")[2]: child for child in trained.children}, []
    for name, path in trained.layer.paths:
        children = inner[name].children if path is not None else ()
        ends.append(reduce(lambda y, child: add_layer(graph, child, y), children, x))
    return ends


def _pad(graph: Graph, trained: TrainedLayer, x: str) -> str:
    layer = trained.layer
    around = [0, 0, layer.size, layer.size, 0, layer.channels, layer.size, layer.size]
    return graph.add("Pad", trained.name, x, graph.constant(f"{trained.name}.pads", around, int))


CONVERTERS: dict[str, Converter] = {
    "conv": _conv,
    "relu": node("Relu"),
    "sigmoid": node("Sigmoid"),
    "tanh": node("Tanh"),
    "leakyrelu": node("LeakyRelu", lambda layer: {"alpha": float(layer.slope)}),
    "gelu": _gelu,
    "silu": lambda graph, layer, x: graph.add("Mul", layer.name, x, graph.add("Sigmoid", f"{layer.name}.share", x)),
    "lrn": _lrn,
    "batchnorm": _batchnorm,
    "maxpool": node("MaxPool", _window),
    "averagepool": node("AveragePool", _window),
    "l2pool": node("LpPool", lambda layer: _window(layer) | {"p": 2}),
    "globalpool": lambda graph, layer, x: graph.add(
        "Flatten", layer.name, graph.add("GlobalAveragePool", f"{layer.name}.pixel", x)
    ),
    "dense": _dense,
    "dropout": lambda graph, trained, x: x,
    "flatten": lambda graph, layer, x: graph.add(
        "Flatten", layer.name, graph.add("Transpose", f"{layer.name}.nhwc", x, perm=[0, 2, 3, 1])
    ),
    "reshape": _reshape,
    "upsample": _upsample,
    "scale": lambda graph, trained, x: graph.add(
        "Mul", trained.name, x, graph.constant(f"{trained.name}.factor", trained.layer.factor)
    ),
    "pad": _pad,
    "residual": lambda graph, trained, x: graph.add("Sum", trained.name, *_paths(graph, trained, x)),
    "branches": lambda graph, trained, x: graph.add("Concat", trained.name, *_paths(graph, trained, x), axis=1),
    "add": lambda graph, trained, x: graph.add("Sum", trained.name, *_paths(graph, trained, x)),
    "auxiliary": lambda graph, trained, x: x,
}
"""Converters by the kinds of `LAYERS`. A new layer is a new entry."""


OPSET, IR_VERSION = 17, 8
"""Versions of 2022, which every runtime in use reads."""
INPUT, OUTPUT, RECONSTRUCTED = "images", "probabilities", "reconstructed"
_MOST = 2_000_000_000  # bytes that a protobuf message may have, less what is not weights


def write_onnx(classifier: Classifier, run: str, out: Path) -> tuple[Path, ...]:
    """Write the model and return the file. Raises UserError for a layer without converter, and OSError."""
    replace_file(output_file(out), onnx_model(classifier, run).SerializeToString())
    return (out,)


def onnx_model(classifier: Classifier, run: str = "") -> ModelProto:
    """Return the model, in float32.

    Its input `images` is (N, H, W, C) in the number type of the images at rest, with N free. Its output
    `probabilities` is (N, classes). Classes, kind of labels, run and version are in its metadata. The output of a
    network that reconstructs images is `reconstructed` (N, H, W, C), in float32 and the scale of the input.
    """
    if (count := classifier.weights.size) * 4 > _MOST:
        raise UserError("--to onnx", f"{count:,} weights, more than a file of ONNX holds", "use --to safetensors")
    graph, facts = Graph(), classifier.facts
    x = reduce(lambda x, trained: add_layer(graph, trained, x), trained_layers(classifier), _normalised(graph, facts))
    images = helper.make_tensor_value_info(INPUT, helper.np_dtype_to_tensor_dtype(facts.dtype), ["N", *facts.shape])
    shape: tuple[int, ...] = facts.shape if classifier.reconstructs else (len(facts.classes),)
    if classifier.reconstructs:
        name = _reconstructed(graph, classifier, x)
    else:
        name = graph.add("Softmax", OUTPUT, x, axis=1) if facts.labels == "classes" else graph.add("Sigmoid", OUTPUT, x)
    found = helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *shape])
    model = helper.make_model(
        helper.make_graph(graph.nodes, "daskcnn", [images], [found], graph.constants),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="daskcnn",
        producer_version=version(),
    )
    metadata = {"classes": json.dumps(list(facts.classes)), "labels": facts.labels, "run": run, "version": version()}
    helper.set_model_props(model, metadata)
    checker.check_model(model, full_check=True)
    return model


def _reconstructed(graph: Graph, classifier: Classifier, x: str) -> str:
    """Add nodes from scores, maps (N, C, H, W) or vectors (N, H·W·C), to images (N, H, W, C) as they are at rest."""
    facts = classifier.facts
    if len(classifier.model.out_shape(facts.shape)) == 3:
        x = graph.add("Transpose", "pixels", x, perm=[0, 2, 3, 1])
    else:
        x = graph.add("Reshape", "pixels", x, graph.constant("image_shape", [-1, *facts.shape], int))
    if isinstance(classifier.loss, SigmoidReconstruction):
        x = graph.add("Sigmoid", "shares", x)
    x = graph.add("Mul", "scaled", x, graph.constant("deviation", facts.deviation))
    return graph.add("Add", RECONSTRUCTED, x, graph.constant("offset", facts.mean))


def _normalised(graph: Graph, facts: Described) -> str:
    """Add nodes from images at rest to maps (N, C, H, W), as `store.normalise` does it."""
    wide = _wide(facts)
    x = graph.add("Cast", "numbers", INPUT, to=helper.np_dtype_to_tensor_dtype(wide))
    x = graph.add("Sub", "centred", x, graph.constant("mean", facts.mean, wide))
    x = graph.add("Mul", "normalised", x, graph.constant("per_deviation", 1 / facts.deviation, wide))
    if wide != np.float32:
        x = graph.add("Cast", "narrow", x, to=TensorProto.FLOAT)
    if facts.nodata is not None:
        x = graph.add("Where", "complete", _missing(graph, facts), graph.constant("average", 0.0), x)
    return graph.add("Transpose", "maps", x, perm=[0, 3, 1, 2])


def _wide(facts: Described) -> np.dtype[Any]:
    """The type in which images are normalised: float32 has no room for what tells values of float64 apart."""
    return np.dtype(np.float64 if facts.dtype == np.float64 else np.float32)


def _missing(graph: Graph, facts: Described) -> str:
    """Add nodes that tell where images have no data: NaN, and the value that stands for it."""
    assert facts.nodata is not None
    mark, unknown = mark_of(facts.nodata, facts.dtype), graph.add("IsNaN", "not_numbers", "numbers")
    if mark is None:
        return unknown
    same = graph.add("Equal", "marked", "numbers", graph.constant("nodata", mark, _wide(facts)))
    return graph.add("Or", "missing", same, unknown)
