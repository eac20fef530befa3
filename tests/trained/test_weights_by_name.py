"""`TrainedModel.weights` has every number of a network, by the names that a dry run and `model.freeze` use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from daskcnn.job.network import layout_of
from daskcnn.job.resolve import resolve
from daskcnn.nn import summarise
from daskcnn.nn.models import MODELS
from daskcnn.trained.trained_model import TrainedModel
from daskcnn.training.trained_network import Classifier
from tests.export.networks import classifier, every_layer, facts

PLAIN = [{"layer": "conv", "kernels": 3, "size": 3, "pad": 1}, {"layer": "batchnorm"}]
NESTED = [{"layer": "residual", "path": [*PLAIN, {"layer": "residual", "path": PLAIN}]}, {"layer": "dense", "units": 4}]


def laws(trained: Classifier) -> None:
    found = TrainedModel(trained).weights
    rows = [row for row in summarise(trained.model, trained.facts.shape) if row.outputs]
    assert sum(array.size for own in found.values() for array in own.values()) == trained.layout.size
    params = set(trained.layout.names[: trained.layout.parameters])
    counted = {
        layer: sum(array.size for name, array in own.items() if f"{layer}/{name}" in params)
        for layer, own in found.items()
    }
    assert {layer: n for layer, n in counted.items() if n} == {r.name: r.parameters for r in rows if r.parameters}
    assert found.keys() <= {row.name for row in rows}


@pytest.mark.parametrize("name", MODELS)
def test_a_named_network(name: str) -> None:
    model = MODELS[name]
    images = replace(facts(model.image), classes=tuple(map(str, range(model.classes))))
    loss = {"loss": "reconstruction"} if name == "sae" else {}
    job = resolve({"model": {"name": name}, "train": loss})
    laws(Classifier(job, images, np.broadcast_to(np.float32(0), layout_of(job, images).size)))


@pytest.mark.parametrize(("layers", "shape"), [pytest.param(*each[1:], id=each[0]) for each in every_layer()])
def test_a_network_of_each_layer(layers: list[dict[str, object]], shape: tuple[int, int, int]) -> None:
    laws(classifier({"layers": layers}, facts(shape)))


def test_what_lies_in_a_block_of_a_block() -> None:
    """It is a view of the vector that may not be written to."""
    model = TrainedModel(classifier({"layers": NESTED}, facts()))
    inner = model.weights["residual1/path/residual1/path/batchnorm1"]
    assert inner.keys() == {"scale", "shift", "mean", "variance"}
    assert all(np.shares_memory(array, model.vector) and not array.flags.writeable for array in inner.values())
