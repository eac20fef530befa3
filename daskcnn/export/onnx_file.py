"""A trained network as an ONNX model: from images as they are at rest to probabilities, or to images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from onnx import ModelProto, checker, helper

from daskcnn.errors import UserError
from daskcnn.export.onnx_layers import Graph, add_layer
from daskcnn.export.trained_layers import trained_layers, version
from daskcnn.files import replace_file
from daskcnn.nn.losses import SigmoidReconstruction
from daskcnn.store import Described
from daskcnn.store.chunk_facts import mark_of
from daskcnn.training.trained_network import Classifier

OPSET, IR_VERSION = 17, 8
"""Versions of 2022, which every runtime in use reads."""
INPUT, OUTPUT, RECONSTRUCTED = "images", "probabilities", "reconstructed"
_MOST = 2_000_000_000  # bytes that a protobuf message may have, less what is not weights


def write_onnx(classifier: Classifier, run: str, out: Path) -> tuple[Path, ...]:
    """Write the model; returns the file. Raises UserError for a layer without converter, and OSError."""
    replace_file(out, onnx_model(classifier, run).SerializeToString())
    return (out,)


def onnx_model(classifier: Classifier, run: str = "") -> ModelProto:
    """Return the model, in float32.

    Its input `images` is (N, H, W, C) in the number type of the images at rest, with N free. Its output
    `probabilities` is (N, classes). Classes, kind of labels, run and version are in its metadata. The output of a
    network that reconstructs images is `reconstructed` (N, H, W, C), in float32 and the scale of the input.
    """
    if classifier.weights.size * 4 > _MOST:
        raise UserError(
            "--to onnx", f"{classifier.weights.size:,} weights, more than a file of ONNX holds", "use --to safetensors"
        )
    graph, facts = Graph(), classifier.facts
    x = _normalised(graph, facts)
    for trained in trained_layers(classifier):
        x = add_layer(graph, trained, x)
    images = helper.make_tensor_value_info(INPUT, _element_type(facts.dtype), ["N", *facts.shape])
    shape: tuple[int, ...] = facts.shape if classifier.reconstructs else (len(facts.classes),)
    name = _reconstructed(graph, classifier, x) if classifier.reconstructs else _probabilities(graph, facts, x)
    found = helper.make_tensor_value_info(name, _element_type(np.dtype(np.float32)), ["N", *shape])
    model = helper.make_model(
        helper.make_graph(graph.nodes, "daskcnn", [images], [found], graph.constants),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="daskcnn",
        producer_version=version(),
    )
    helper.set_model_props(model, _metadata(facts, run))
    checker.check_model(model, full_check=True)
    return model


def _probabilities(graph: Graph, facts: Described, x: str) -> str:
    if facts.labels == "classes":
        return graph.add("Softmax", OUTPUT, x, axis=1)
    return graph.add("Sigmoid", OUTPUT, x)


def _reconstructed(graph: Graph, classifier: Classifier, x: str) -> str:
    """Scores, maps (N, C, H, W) or vectors (N, H·W·C), to images (N, H, W, C) as they are at rest."""
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
    """Images at rest to maps (N, C, H, W), as `store.normalise` does it."""
    x = graph.add("Cast", "numbers", INPUT, to=_element_type(np.dtype(np.float32)))
    x = graph.add("Sub", "centred", x, graph.constant("mean", facts.mean))
    x = graph.add("Mul", "normalised", x, graph.constant("per_deviation", 1 / facts.deviation))
    if facts.nodata is not None:
        x = graph.add("Where", "complete", _missing(graph, facts), graph.constant("average", 0.0), x)
    return graph.add("Transpose", "maps", x, perm=[0, 3, 1, 2])


def _missing(graph: Graph, facts: Described) -> str:
    """Where images have no data: the value that stands for it, and NaN."""
    assert facts.nodata is not None
    mark, unknown = mark_of(facts.nodata, facts.dtype), graph.add("IsNaN", "not_numbers", "numbers")
    if mark is None:
        return unknown
    if facts.dtype == np.float64:  # float32 has no room for what tells such values apart
        same = graph.add("Equal", "marked", INPUT, graph.constant("nodata", mark, np.float64))
    else:
        same = graph.add("Equal", "marked", "numbers", graph.constant("nodata", mark))
    return graph.add("Or", "missing", same, unknown)


def _element_type(dtype: np.dtype[np.generic]) -> int:
    return helper.np_dtype_to_tensor_dtype(dtype)


def _metadata(facts: Described, run: str) -> dict[str, str]:
    return {"classes": json.dumps(list(facts.classes)), "labels": facts.labels, "run": run, "version": version()}
