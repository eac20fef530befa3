"""Networks learn alike with every algorithm, and evaluation transforms their kernels once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device, single_threaded_blas
from daskcnn.conv import ALGORITHMS, planner, spectral
from daskcnn.conv.planner import forget_plans
from daskcnn.conv.timings import Seconds
from daskcnn.job.network import convolutions
from daskcnn.nn import LOSSES, SGD, Context, Layout, build_model, init_network, loss_and_gradients, predict

IMAGE, CLASSES, STEPS, BATCH = (40, 40, 3), 4, 50, 4
TOLERANCE = {"float64": 1e-8, "float32": 1e-3}
Prefer = Callable[[str], None]


@pytest.fixture
def prefer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefer]:
    """Has the planner choose this algorithm wherever it supports the problem."""

    def chosen(name: str) -> None:
        monkeypatch.setattr(planner, "predict", lambda a, *_: Seconds(*[1.0 if a.name == name else 2.0] * 3))
        forget_plans()

    yield chosen
    monkeypatch.undo()
    forget_plans()


def network(dtype: str) -> Any:
    layers: list[dict[str, Any]] = [{"layer": "conv", "kernels": k, "size": 5, "pad": 2} for k in (4, 6)]
    between: list[dict[str, Any]] = [{"layer": "tanh"}, {"layer": "lrn"}, {"layer": "averagepool", "size": 2}]
    model = build_model(
        None, [layers[0], *between, layers[1], *between, {"layer": "dense", "units": CLASSES}], IMAGE, CLASSES
    )
    return model, *init_network(model, 3, IMAGE, dtype)


def curve(dtype: str) -> list[float]:
    """Losses of steps on a few batches, again and again."""
    model, params, state = network(dtype)
    layout = Layout.of(params, state)
    weights, rng, ctx = layout.flatten(params, state), np.random.default_rng(5), Context(Device())
    sgd, losses = SGD(0.9, True, 1e-3), []
    moving = sgd.init(weights[: layout.parameter_size])
    batches = rng.standard_normal((4, *IMAGE[:2], BATCH, IMAGE[2])).astype(dtype)
    labels = rng.integers(0, CLASSES, (4, BATCH))
    for i in range(STEPS):
        params, state = layout.views(weights)
        found = loss_and_gradients(model, params, state, batches[i % 4], labels[i % 4], LOSSES["softmax"], ctx)
        losses.append(float(found[0]))
        parameters = weights[: layout.parameter_size]
        moving = sgd.step(parameters, layout.flatten(found[2], {}), moving, 0.01, ctx.device)
    return losses


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_training_curves_agree_over_all_algorithms(dtype: str, prefer: Prefer) -> None:
    with single_threaded_blas():
        prefer("im2col")
        expected = curve(dtype)
        assert expected[-1] < 0.1 * expected[0]  # else agreeing would prove little
        problems = [spec for _, spec in convolutions(network(dtype)[0], IMAGE, BATCH, dtype)]
        for name in (name for name, a in ALGORITHMS.items() if any(map(a.supports, problems))):
            prefer(name)
            np.testing.assert_allclose(curve(dtype), expected, rtol=TOLERANCE[dtype], err_msg=name)


def test_evaluation_transforms_kernels_once(prefer: Prefer, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer("spectral")
    prepared: list[bool] = []
    prepare = spectral._SpectralLoops.prepare

    def noted(*arguments: Any, keep: bool = False) -> Any:
        prepared.append(keep)
        return prepare(*arguments, keep=keep)

    monkeypatch.setattr(spectral._SpectralLoops, "prepare", noted)
    model, params, state = network("float32")
    x = np.random.default_rng(0).standard_normal((*IMAGE[:2], BATCH, IMAGE[2]), dtype=np.float32)
    alone = [predict(model, params, state, x[:, :, s], Context(Device())) for s in (slice(0, 3), slice(3, 4))]
    assert prepared == [False] * 4
    ctx = Context(Device(), kept={})
    together = [predict(model, params, state, x[:, :, s], ctx) for s in (slice(0, 3), slice(3, 4))]
    assert prepared[4:] == [True] * 2  # one of each layer, whatever the batch
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
