"""Layers, losses and descent against PyTorch, where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

from daskcnn.arrays import Array, Device
from daskcnn.nn import LOSSES, SGD, Context, Layer, build_model, init_network, leaves, loss_and_gradients
from daskcnn.nn.layers import (
    GELU,
    LRN,
    AveragePool,
    BatchNorm,
    Conv,
    Dense,
    L2Pool,
    LeakyReLU,
    MaxPool,
    Multiply,
    ReLU,
    Sigmoid,
    SiLU,
    Tanh,
    Upsample,
)
from daskcnn.nn.losses import SoftmaxCrossEntropy
from daskcnn.nn.optimizers import AdamW
from daskcnn.nn.optimizers.optimizer import clip
from tests.nn.nn_cases import MAP, TIED, cast, values

torch = pytest.importorskip("torch")
Tensor: TypeAlias = Any  # of PyTorch, which few environments have
F = torch.nn.functional

CTX = Context(Device(), training=True)


def nchw(x_hwnc: Array) -> Tensor:
    return torch.tensor(x_hwnc.transpose(2, 3, 0, 1).copy(), requires_grad=True)


def hwnc(x_nchw: Tensor) -> Array:
    return x_nchw.detach().numpy().transpose(2, 3, 0, 1)


def oihw(w_rsck: Array) -> Tensor:
    return torch.tensor(w_rsck.transpose(3, 2, 0, 1).copy(), requires_grad=True)


ON_MAPS = [
    (ReLU(), F.relu),
    (Sigmoid(), torch.sigmoid),
    (Tanh(), torch.tanh),
    (LeakyReLU(0.2), lambda x: F.leaky_relu(x, 0.2)),
    (GELU(), F.gelu),
    (SiLU(), F.silu),
    (LRN(), lambda x: F.local_response_norm(x, 5, 1e-4, 0.75, 1.0)),
    (LRN(4, 0.5, 0.75, 1.0), lambda x: F.local_response_norm(x, 4, 0.5, 0.75, 1.0)),
    (LRN(3, 0.5, 0.6, 2.0), lambda x: F.local_response_norm(x, 3, 0.5, 0.6, 2.0)),
    (MaxPool(2), lambda x: F.max_pool2d(x, 2)),
    (MaxPool(3, 2), lambda x: F.max_pool2d(x, 3, 2)),
    (MaxPool(2, 3), lambda x: F.max_pool2d(x, 2, 3)),
    (AveragePool(2), lambda x: F.avg_pool2d(x, 2)),
    (AveragePool(3, 2), lambda x: F.avg_pool2d(x, 3, 2)),
    (L2Pool(2), lambda x: F.lp_pool2d(x, 2.0, 2)),
    (L2Pool(3, 2), lambda x: F.lp_pool2d(x, 2.0, 3, 2)),
    (Multiply(0.125), lambda x: 0.125 * x),
    (Upsample(3), lambda x: F.interpolate(x, scale_factor=3)),
    (Upsample(2, "bilinear"), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)),
    (Upsample(5, "bilinear"), lambda x: F.interpolate(x, scale_factor=5, mode="bilinear", align_corners=False)),
]


@pytest.mark.parametrize(("layer", "reference"), ON_MAPS, ids=lambda v: repr(v) if hasattr(v, "init") else "")
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
def test_layers_without_parameters(
    layer: Layer, reference: Callable[[Tensor], Tensor], ties: bool, rng: np.random.Generator
) -> None:
    x = values(rng, (7, 6, 4, 9))
    if ties:  # few values: windows have several maxima
        x = 1.0 + np.round(np.abs(x))
    y, _, residual = layer.forward({}, {}, x, CTX)
    dy = values(rng, y.shape)
    dx, _ = layer.backward({}, residual, dy, CTX)
    x_t = nchw(x)
    y_t = reference(x_t)
    y_t.backward(nchw(dy).detach())
    np.testing.assert_allclose(y, hwnc(y_t), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dx, hwnc(x_t.grad), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    "layer",
    [
        *(Conv(4, 5, 1, 2), Conv(4, 3, 2, 1), Conv(4, 2, 3, 0)),
        *(Conv(4, (3, 1), (1, 2), (1, 0)), Conv(4, (2, 3), pad="same"), Conv(4, 2, pad="same", dilation=(3, 2))),
        *(Conv(4, 3, groups=2, dilation=2), Conv(8, (1, 3), 2, (0, 1), groups=4), Conv(4, 3, pad="same", groups=4)),
    ],
    ids=repr,
)
def test_convolution(layer: Conv, rng: np.random.Generator) -> None:
    params, _, _ = layer.init(rng, (7, 6, 4))
    params["b"] = values(rng, layer.kernels)
    x = values(rng, (7, 6, 2, 4))
    y, _, residual = layer.forward(params, {}, x, CTX)
    dy = values(rng, y.shape)
    dx, grads = layer.backward(params, residual, dy, CTX)
    assert dx is not None
    x_t, w_t, b_t = nchw(x), oihw(params["w"]), torch.tensor(params["b"], requires_grad=True)
    y_t = F.conv2d(x_t, w_t, b_t, layer.stride, layer.pad, layer.dilation, layer.groups)
    y_t.backward(nchw(dy).detach())
    np.testing.assert_allclose(y, hwnc(y_t), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dx, hwnc(x_t.grad), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(grads["w"].transpose(3, 2, 0, 1), w_t.grad.numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(grads["b"], b_t.grad.numpy(), rtol=1e-9)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("shift", [True, False])
def test_batch_norm_over_two_steps_and_an_evaluation(scale: bool, shift: bool, rng: np.random.Generator) -> None:
    layer, reference = BatchNorm(scale=scale, shift=shift), torch.nn.BatchNorm2d(3, dtype=torch.float64)
    params, state, _ = layer.init(rng, (4, 5, 3))
    for name, own in params.items():  # what is left out stays 1 or 0 there
        own[...] = values(rng, 3)
        with torch.no_grad():
            {"scale": reference.weight, "shift": reference.bias}[name].copy_(torch.tensor(own))
    for _ in range(2):
        x = 2 + 3 * values(rng, (4, 5, 6, 3))
        y, state, residual = layer.forward(params, state, x, CTX)
        dy = values(rng, y.shape)
        dx, grads = layer.backward(params, residual, dy, CTX)
        assert dx is not None
        x_t = nchw(x)
        y_t = reference(x_t)
        reference.zero_grad()
        y_t.backward(nchw(dy).detach())
        np.testing.assert_allclose(y, hwnc(y_t), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(dx, hwnc(x_t.grad), rtol=1e-8, atol=1e-12)
        assert grads.keys() == params.keys()
        theirs = {"scale": reference.weight.grad, "shift": reference.bias.grad}
        for name, found in grads.items():
            np.testing.assert_allclose(found, theirs[name].numpy(), rtol=1e-9)
    np.testing.assert_allclose(state["mean"], reference.running_mean.numpy(), rtol=1e-9)
    np.testing.assert_allclose(state["variance"], reference.running_var.numpy(), rtol=1e-9)
    y, _, _ = layer.forward(params, state, x, Context(Device()))
    np.testing.assert_allclose(y, hwnc(reference.eval()(nchw(x))), rtol=1e-9, atol=1e-12)


def test_dense(rng: np.random.Generator) -> None:
    layer = Dense(5)
    params, _, _ = layer.init(rng, (7,))
    x, dy = values(rng, (3, 7)), values(rng, (3, 5))
    y, _, residual = layer.forward(params, {}, x, CTX)
    dx, grads = layer.backward(params, residual, dy, CTX)
    assert dx is not None
    x_t, w_t = torch.tensor(x, requires_grad=True), torch.tensor(params["w"].T.copy(), requires_grad=True)
    y_t = F.linear(x_t, w_t, torch.tensor(params["b"]))
    y_t.backward(torch.tensor(dy))
    np.testing.assert_allclose(y, y_t.detach().numpy(), rtol=1e-9)
    np.testing.assert_allclose(dx, x_t.grad.numpy(), rtol=1e-9)
    np.testing.assert_allclose(grads["w"], w_t.grad.numpy().T, rtol=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_softmax_cross_entropy(smoothing: float, rng: np.random.Generator) -> None:
    scores, labels = 5 * values(rng, (6, 4)), np.array([0, 1, 2, 3, 3, 0])
    loss, dscores = SoftmaxCrossEntropy(smoothing)(scores, labels)
    scores_t = torch.tensor(scores, requires_grad=True)
    loss_t = F.cross_entropy(scores_t, torch.tensor(labels), label_smoothing=smoothing)
    loss_t.backward()
    np.testing.assert_allclose(loss, loss_t.item(), rtol=1e-12)
    np.testing.assert_allclose(dscores, scores_t.grad.numpy(), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("weights", [None, np.array([0.5, 2.0, 0.0, 1.0, 3.0, 0.25])])
def test_sigmoid_cross_entropy(weights: np.ndarray | None, rng: np.random.Generator) -> None:
    scores, labels = 5 * values(rng, (6, 4)), rng.integers(0, 2, (6, 4)).astype(np.uint8)
    loss, dscores = LOSSES["sigmoid"](scores, labels, np, weights)
    scores_t, given = torch.tensor(scores, requires_grad=True), torch.tensor(np.ones(6) if weights is None else weights)
    each = F.binary_cross_entropy_with_logits(scores_t, torch.tensor(labels, dtype=torch.float64), reduction="none")
    loss_t = (each.sum(dim=1) * given).mean()
    loss_t.backward()
    np.testing.assert_allclose(loss, loss_t.item(), rtol=1e-12)
    np.testing.assert_allclose(dscores, scores_t.grad.numpy(), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("weights", [None, np.array([0.5, 2.0, 0.0, 1.0])])
@pytest.mark.parametrize("of_maps", [True, False], ids=["maps", "vectors"])
@pytest.mark.parametrize(
    ("name", "reference"),
    [("reconstruction", F.mse_loss), ("sigmoid-reconstruction", F.binary_cross_entropy_with_logits)],
)
def test_reconstruction(
    name: str, reference: Any, of_maps: bool, weights: np.ndarray | None, rng: np.random.Generator
) -> None:
    images, scores = rng.random((3, 2, 4, 5)), 3 * values(rng, (3, 2, 4, 5))
    given = scores if of_maps else scores.transpose(2, 0, 1, 3).reshape(4, -1)
    loss, dscores = LOSSES[name](given, images, np, weights)
    scores_t, images_t = (torch.tensor(a.transpose(2, 0, 1, 3).reshape(4, -1).copy()) for a in (scores, images))
    scores_t.requires_grad_()
    each = reference(scores_t, images_t, reduction="none").mean(dim=1)
    loss_t = (each * torch.tensor(np.ones(4) if weights is None else weights)).mean()
    loss_t.backward()
    if weights is None:
        np.testing.assert_allclose(loss, reference(scores_t, images_t).item(), rtol=1e-12)
    np.testing.assert_allclose(loss, loss_t.item(), rtol=1e-12)
    found = dscores.transpose(2, 0, 1, 3).reshape(4, -1) if of_maps else dscores
    np.testing.assert_allclose(found, scores_t.grad.numpy(), rtol=1e-9, atol=1e-15)


def test_tied_weights(rng: np.random.Generator) -> None:
    params, state, _ = TIED.init(rng, MAP)
    x, dy = values(rng, (5, 4, 2, 3)), values(rng, (2, 60))
    y, _, residual = TIED.forward(params, state, x, CTX)
    dx, grads = TIED.backward(params, residual, dy, CTX)
    assert dx is not None
    p = {name: torch.tensor(a, requires_grad=True) for name, a in leaves(params)}
    x_t = torch.tensor(x.transpose(2, 0, 1, 3).reshape(2, -1), requires_grad=True)
    there = p["there/w"].reshape(60, 6)
    code = torch.sigmoid(x_t @ there + p["there/b"]) @ p["inner/w"] + p["inner/b"]
    y_t = (code @ p["inner/w"].T + p["back/b"]) @ there.T
    y_t.backward(torch.tensor(dy))
    np.testing.assert_allclose(y, y_t.detach().numpy(), rtol=1e-9)
    np.testing.assert_allclose(dx.transpose(2, 0, 1, 3).reshape(2, -1), x_t.grad.numpy(), rtol=1e-9, atol=1e-12)
    for name, found in leaves(grads):
        np.testing.assert_allclose(found, p[name].grad.numpy(), rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_descent(options: dict[str, Any], weight_decay: float, rng: np.random.Generator) -> None:
    params = values(rng, 5)
    params_t = torch.tensor(params.copy(), requires_grad=True)
    ours = SGD(weight_decay=weight_decay, **options)
    state = ours.init(params)
    theirs = torch.optim.SGD([params_t], lr=0.1, weight_decay=weight_decay, **options)
    for lr in (0.1, 0.1, 0.05, 0.01):
        gradient = values(rng, 5)
        params_t.grad = torch.tensor(gradient)
        theirs.param_groups[0]["lr"] = lr
        theirs.step()
        state = ours.step(params, gradient, state, lr, Device())
    np.testing.assert_allclose(params, params_t.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize("options", [{}, {"betas": (0.8, 0.95), "eps": 1e-4}])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_adamw(options: dict[str, Any], weight_decay: float, rng: np.random.Generator) -> None:
    params = values(rng, 5)
    params_t = torch.tensor(params.copy(), requires_grad=True)
    (beta1, beta2), eps = options.get("betas", (0.9, 0.999)), options.get("eps", 1e-8)
    ours = AdamW(beta1, beta2, eps, weight_decay)
    state = ours.init(params)
    theirs = torch.optim.AdamW([params_t], lr=0.1, weight_decay=weight_decay, **options)
    for lr in (0.1, 0.1, 0.05, 0.01):
        gradient = values(rng, 5)
        params_t.grad = torch.tensor(gradient)
        theirs.param_groups[0]["lr"] = lr
        theirs.step()
        state = ours.step(params, gradient, state, lr, Device())
    np.testing.assert_allclose(params, params_t.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(state.vectors[1], theirs.state[params_t]["exp_avg_sq"].numpy(), rtol=1e-12)


def test_clipping(rng: np.random.Generator) -> None:
    grads = [values(rng, 4), values(rng, 7)]
    tensors = [torch.zeros(len(grad), dtype=torch.float64, requires_grad=True) for grad in grads]
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = torch.tensor(grad)
    torch.nn.utils.clip_grad_norm_(tensors, 0.7)
    whole = np.concatenate(grads)
    clip(whole, [slice(0, 4), slice(4, 11)], 0.7, Device())
    expected = np.concatenate([tensor.grad.numpy() for tensor in tensors])
    np.testing.assert_allclose(whole, expected, rtol=1e-5)  # theirs divides by norm + 1e-6


def quick_in_torch(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """`quick` on NCHW, from our parameters' tensors."""
    x = F.relu(F.max_pool2d(F.conv2d(x, p["conv1/w"], p["conv1/b"], padding=2), 2))
    x = F.avg_pool2d(F.relu(F.conv2d(x, p["conv2/w"], p["conv2/b"], padding=2)), 2)
    x = F.avg_pool2d(F.relu(F.conv2d(x, p["conv3/w"], p["conv3/b"], padding=2)), 2)
    return x.permute(0, 2, 3, 1).flatten(1) @ p["dense1/w"].flatten(0, 2) + p["dense1/b"]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-3)])
def test_a_whole_step_of_quick(dtype: str, tolerance: float, rng: np.random.Generator) -> None:
    model = build_model("quick", None, (16, 16, 3), 10)
    params, state = init_network(model, 0, (16, 16, 3), dtype)
    x, labels = values(rng, (16, 16, 8, 3), dtype), np.arange(8)
    loss, _, grads, _ = loss_and_gradients(model, cast(params, dtype), state, x, labels, LOSSES["softmax"], CTX)
    p = {
        n: oihw(a) if a.ndim == 4 and n != "dense1/w" else torch.tensor(a, requires_grad=True)
        for n, a in leaves(params)
    }
    loss_t = F.cross_entropy(quick_in_torch(p, nchw(x)), torch.tensor(labels))
    loss_t.backward()
    np.testing.assert_allclose(loss, loss_t.item(), rtol=tolerance)
    for name, found in leaves(grads):
        expected = p[name].grad.numpy()
        expected = expected.transpose(2, 3, 1, 0) if expected.ndim == 4 and name != "dense1/w" else expected
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * abs(expected).max(), err_msg=name)
