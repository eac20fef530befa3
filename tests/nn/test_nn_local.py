"""Local layers run together in blocks: what each alone computes, whatever the blocks, threads and shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from daskcnn.arrays import Array, Device, derive, mix64, uniform
from daskcnn.nn import Context, Layer, Sequential, Shape, leaves, map_leaves
from daskcnn.nn.layer import Keys
from daskcnn.nn.layers import LRN, AveragePool, BatchNorm, Conv, Dense, Dropout, L2Pool, MaxPool, ReLU, Sigmoid, Tanh
from daskcnn.nn.local import Chain
from tests.nn.nn_cases import MAP, example, in_blocks, label, values
from tests.standin import elsewhere


def chain(*layers: Layer) -> Sequential:
    return Sequential(tuple((f"layer{i}", layer) for i, layer in enumerate(layers)))


CHAINS = [
    (chain(ReLU(), LRN(alpha=0.5), MaxPool(2)), (6, 8, 7)),
    (chain(MaxPool(2), ReLU()), (4, 6, 3)),
    (chain(ReLU(), MaxPool(2)), (7, 9, 200)),  # pixels in no window, several runs to a pixel
    (chain(ReLU(), AveragePool(2)), (6, 8, 300)),
    (chain(Tanh(), AveragePool(2)), (5, 4, 7)),
    (chain(LRN(size=3, alpha=0.5), Tanh(), AveragePool(3), Sigmoid()), (9, 6, 5)),
    (chain(Dropout(0.3), MaxPool(2), Dropout(0.5), L2Pool(3)), (6, 12, 5)),
    (chain(Tanh(), ReLU(), Dropout(0.4), ReLU()), (7,)),
    (chain(Tanh(), MaxPool(2), ReLU(), MaxPool(2)), (9, 8, 3)),  # the first tiles the map, the second not
    (chain(ReLU(), MaxPool(3, 2), LRN(size=9, alpha=1.0)), (7, 7, 4)),
    (chain(Dropout(0.2), L2Pool(3, 2), Tanh(), AveragePool(3, 1), Dropout(0.4)), (11, 9, 3)),  # overlap in overlap
    (chain(AveragePool(2, 3), Sigmoid(), MaxPool(2)), (9, 12, 5)),  # pixels between the windows
]
HEADED = [
    (chain(BatchNorm(), ReLU(), MaxPool(2)), (6, 8, 7)),
    (chain(BatchNorm(), MaxPool(2)), (4, 6, 300)),
    (chain(BatchNorm(), AveragePool(2)), (4, 6, 5)),
    (chain(BatchNorm(), ReLU(), MaxPool(2)), (7, 5, 3)),  # pixels in no window count for the moments
    (chain(BatchNorm(), Tanh(), AveragePool(3, 2), Dropout(0.3)), (7, 9, 4)),
    (chain(BatchNorm(fixed=True), ReLU(), LRN(alpha=0.5), MaxPool(3, 2)), (7, 9, 4)),
    (chain(BatchNorm(), Sigmoid()), (9,)),
]
every_headed_chain = pytest.mark.parametrize(("net", "in_shape"), HEADED, ids=label)
every_chain = pytest.mark.parametrize(("net", "in_shape"), CHAINS, ids=label)


def layer_by_layer(net: Sequential, x: Array, dy: Array, ctx: Context) -> tuple[Array, Array]:
    """(y, dx) with every layer alone."""
    residuals = []
    for name, layer in net.layers:
        x, _, kept = layer.forward({}, {}, x, ctx.child(name))
        residuals.append(kept)
    if ctx.training:
        for (name, layer), kept in zip(reversed(net.layers), reversed(residuals), strict=True):
            dy, _ = layer.backward({}, kept, dy, ctx.child(name))
    return x, dy


def together(net: Sequential, x: Array, dy: Array, ctx: Context) -> tuple[Array, Array]:
    """(y, dx) of the network."""
    y, _, residual = net.forward({}, {}, x, ctx)
    if not ctx.training:
        return y, dy
    dx, _ = net.backward({}, residual, dy, ctx)
    assert dx is not None
    return y, dx


@every_chain
@pytest.mark.parametrize("block", [1, 300, 1 << 20])
@pytest.mark.parametrize("N", [1, 5])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_chain_is_its_layers_one_by_one(net: Sequential, in_shape: Shape, block: int, N: int, training: bool) -> None:
    _, _, x, dy, ctx = example(net, in_shape, Device(), N=N, training=training)
    alone = layer_by_layer(net, x, dy, ctx)
    for found, expected in zip(together(net, x, dy, replace(ctx, device=in_blocks(block))), alone, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@every_headed_chain
@pytest.mark.parametrize("block", [1, 300, 1 << 20])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_chain_behind_batch_normalising_is_its_layers_one_by_one(
    net: Sequential, in_shape: Shape, block: int, training: bool
) -> None:
    params, state, x, dy, ctx = example(net, in_shape, Device(), N=5, training=training)
    (name, norm), *others = net.layers
    middle, new, kept = norm.forward(params[name], state[name], x, ctx.child(name))
    rest = Sequential(tuple(others))
    y, back = layer_by_layer(rest, middle, dy, ctx)
    found, state_found, residual = net.forward(params, state, x, replace(ctx, device=in_blocks(block)))
    np.testing.assert_allclose(found, y, rtol=1e-11, atol=1e-13)
    np.testing.assert_equal(state_found, {name: new})
    if training:
        dx, grads = norm.backward(params[name], kept, back, ctx)
        for device in (in_blocks(block), in_blocks(block, threads=3)):
            own_dx, own = net.backward(params, residual, dy, replace(ctx, device=device))
            assert own_dx is not None
            assert dx is not None
            np.testing.assert_allclose(own_dx, dx, rtol=1e-10, atol=1e-12)
            for parameter in ("scale", "shift"):
                np.testing.assert_allclose(own[name][parameter], grads[parameter], rtol=1e-11)


@every_headed_chain
@pytest.mark.parametrize("given", [slice(1, 3), slice(None)])
def test_going_back_through_batch_normalising_from_some_channels_to_some(
    net: Sequential, in_shape: Shape, given: slice
) -> None:
    params, state, x, dy, ctx = example(net, in_shape, in_blocks(300), N=3)
    _, _, residual = net.forward(params, state, x, ctx)
    whole = np.zeros_like(dy)
    whole[..., given] = dy[..., given]
    expected, grads = net.backward(params, residual, whole, ctx)
    assert expected is not None
    of, wanted = in_shape[-1], slice(1, 2)
    found, own = net.backward_of(params, residual, dy[..., given], ctx, given=given, of=of, wanted=wanted)
    np.testing.assert_allclose(found, expected[..., wanted], rtol=1e-12)
    for (path, one), (_, other) in zip(leaves(own), leaves(grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, err_msg=str(path))  # some channels are summed in other parts


@every_headed_chain
@elsewhere
def test_devices_agree_on_chains_behind_batch_normalising(net: Sequential, in_shape: Shape, device: Device) -> None:
    params, state, x, dy, ctx = example(net, in_shape, device)
    move, host = device.backend.from_host, device.backend.to_host
    y, _, residual = net.forward(params, state, x, replace(ctx, device=Device()))
    dx, _ = net.backward(params, residual, dy, replace(ctx, device=Device()))
    there = map_leaves(move, params), map_leaves(move, state)
    found, _, kept = net.forward(*there, move(x), ctx)
    np.testing.assert_allclose(host(found), y, rtol=1e-9, atol=1e-12)
    found_dx, _ = net.backward(there[0], kept, move(dy), ctx)
    assert dx is not None
    assert found_dx is not None
    np.testing.assert_allclose(host(found_dx), dx, rtol=1e-9, atol=1e-12)


@every_chain
@pytest.mark.parametrize("block", [1, 300, 1 << 20])
@pytest.mark.parametrize("given", [slice(1, 3), slice(0, 2), slice(None)])
def test_going_back_from_some_channels_to_some(net: Sequential, in_shape: Shape, block: int, given: slice) -> None:
    _, _, x, dy, ctx = example(net, in_shape, Device(), N=3, training=True)
    ctx, C, wanted = replace(ctx, device=in_blocks(block)), in_shape[-1], slice(1, 2)
    _, _, residual = net.forward({}, {}, x, ctx)
    whole = np.zeros_like(dy)
    whole[..., given] = dy[..., given]
    expected, _ = net.backward({}, residual, whole, ctx)
    assert expected is not None
    found, grads = net.backward_of({}, residual, dy[..., given], ctx, given=given, of=C, wanted=wanted)
    np.testing.assert_array_equal(found, expected[..., wanted])
    assert found.flags.c_contiguous
    assert grads == {}


@every_chain
@elsewhere
def test_devices_agree_on_chains(net: Sequential, in_shape: Shape, device: Device) -> None:
    _, _, x, dy, ctx = example(net, in_shape, device)
    move, host = device.backend.from_host, device.backend.to_host
    expected = together(net, x, dy, replace(ctx, device=Device()))
    for found, own in zip(together(net, move(x), move(dy), ctx), expected, strict=True):
        np.testing.assert_allclose(host(found), own, rtol=1e-9, atol=1e-12)
    part, (_, _, residual) = {"given": slice(0, 2), "wanted": slice(1, 2)}, net.forward({}, {}, move(x), ctx)
    some, _ = net.backward_of({}, residual, move(dy[..., :2]), ctx, of=in_shape[-1], **part)
    assert some.shape == (*x.shape[:-1], 1)


@every_chain
def test_chains_do_not_depend_on_threads(net: Sequential, in_shape: Shape) -> None:
    _, _, x, dy, ctx = example(net, in_shape, in_blocks(100), dtype="float32", N=6)
    three = replace(ctx, device=in_blocks(100, threads=3))
    for _ in range(2):  # the second time with the first's scratch memory
        np.testing.assert_equal(together(net, x, dy, three), together(net, x, dy, ctx))


@every_chain
def test_chains_write_to_nothing_they_are_given_and_go_back_twice(net: Sequential, in_shape: Shape) -> None:
    _, _, x, dy, ctx = example(net, in_shape, Device())
    given = x.copy(), dy.copy()
    _, _, residual = net.forward({}, {}, x, ctx)
    first, _ = net.backward({}, residual, dy, ctx)
    again, _ = net.backward({}, residual, dy, ctx)
    np.testing.assert_equal((x, dy, again), (*given, first))


def test_a_chain_keeps_its_input_alone() -> None:
    net = chain(ReLU(), LRN(), MaxPool(2), Dense(3), Tanh())
    params, state, x, _, ctx = example(net, (4, 4, 3), Device())
    _, _, ((kept, scaling), _, _) = net.forward(params, state, x, ctx)
    assert kept is x
    assert scaling is None


def test_a_chain_ends_before_what_is_not_local_and_batch_normalising_begins_one() -> None:
    def lengths(*layers: Layer) -> int:
        return len(Chain.of(layers).layers)

    assert lengths(ReLU(), MaxPool(2), Tanh()) == 3
    assert lengths(ReLU(), MaxPool(3, 2), Dense(2), Tanh()) == 2
    assert lengths(BatchNorm(), ReLU(), MaxPool(2), BatchNorm()) == 3
    assert lengths(Conv(1, 1), ReLU()) == 0


def reference_mask(shape: Shape, keys: Keys, salt: int, rate: float) -> npt.NDArray[np.bool]:
    """Dropout's mask of a whole map or of vectors, drawn at once."""

    def spread(keys: Keys, numbers: Keys) -> Keys:
        return mix64(np, keys + (2 * numbers + 1) * np.uint64(0x9E3779B97F4A7C15))

    drawn = spread(derive(np, keys, salt)[:, None], np.arange(shape[-1], dtype=np.uint64))
    for extent in reversed(shape[:-2]):
        drawn = spread(drawn, np.arange(extent, dtype=np.uint64).reshape(-1, *(1,) * drawn.ndim))
    return uniform(np, drawn) >= rate


@pytest.mark.parametrize("block", [1, 500, 1 << 20])
@pytest.mark.parametrize("in_shape", [(6, 4, 5), (9,)])
def test_dropout_draws_the_same_bits_in_every_block(in_shape: Shape, block: int) -> None:
    pool = [MaxPool(2)] if len(in_shape) == 3 else []
    net = chain(Tanh(), *pool, Dropout(0.4))
    _, _, x, dy, ctx = example(net, in_shape, in_blocks(block), N=4)
    assert ctx.keys is not None
    before, _, _ = chain(*(layer for _, layer in net.layers[:-1])).forward({}, {}, x, ctx)
    kept = reference_mask(before.shape, ctx.keys, ctx.child(net.layers[-1][0]).salt, 0.4)
    np.testing.assert_array_equal(net.forward({}, {}, x, ctx)[0], before * kept * (1 / (1 - 0.4)))
    alone = Dropout(0.4)
    _, _, residual = alone.forward({}, {}, before, replace(ctx, salt=7))
    dx, _ = alone.backward({}, residual, dy, replace(ctx, salt=7))
    np.testing.assert_array_equal(dx != 0, reference_mask(before.shape, ctx.keys, 7, 0.4))


def test_max_pooling_in_a_chain_gives_the_gradient_to_the_first_of_equal_pixels() -> None:
    x = np.array([[-1.0, 2, -7, -7], [2, 2, -7, 7]]).reshape(2, 4, 1, 1)
    net = chain(ReLU(), MaxPool(2))
    dy = np.array([3.0, 5.0]).reshape(1, 2, 1, 1)
    _, dx = together(net, x, dy, Context(Device(), training=True))
    np.testing.assert_array_equal(dx[..., 0, 0], [[0, 3, 0, 0], [0, 0, 0, 5]])


def test_max_pooling_lets_not_a_number_through_and_gives_its_window_no_gradient() -> None:
    x = np.array([[1.0, np.nan], [3, 2]]).reshape(2, 2, 1, 1)
    ctx = Context(Device(), training=True)
    y, dx = together(chain(MaxPool(2)), x, np.full((1, 1, 1, 1), 4.0), ctx)
    assert np.isnan(y).all()
    np.testing.assert_array_equal(dx[..., 0, 0], np.zeros((2, 2)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("size", [3, 4, 5, 12])
def test_lrn_keeps_what_is_not_finite_to_its_own_sample(bad: float, size: int, rng: np.random.Generator) -> None:
    x = values(rng, (2, 1, 3, 6))
    layer, ctx = LRN(size=size, alpha=0.5), Context(Device(), training=True)
    clean, dclean = together(chain(layer), x, np.ones_like(x), ctx)
    x[:, :, 1] = bad
    with np.errstate(invalid="ignore"):
        y, dx = together(chain(layer), x, np.ones_like(x), ctx)
    for found, expected in ((y, clean), (dx, dclean)):
        np.testing.assert_array_equal(found[:, :, ::2], expected[:, :, ::2])
        assert np.isnan(found[:, :, 1]).all()


@pytest.mark.parametrize("beta", [0.75, 0.6])
def test_powers_by_roots_are_powers(beta: float, rng: np.random.Generator) -> None:
    x = 30 * values(rng, (1, 1, 50, 1), "float32")
    y, _, _ = LRN(size=1, alpha=1.0, beta=beta).forward({}, {}, x, Context(Device()))
    np.testing.assert_allclose(y, x * (1 + x.astype("float64") ** 2) ** -beta, rtol=1e-6)


@pytest.mark.parametrize("C", [1, 2, 3, 4, 5, 11])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 9])
def test_lrn_windows_of_every_size_over_every_number_of_channels(size: int, C: int, rng: np.random.Generator) -> None:
    x, dy = values(rng, (1, 2, 2, C)), values(rng, (1, 2, 2, C))
    layer, window = LRN(size=size, alpha=0.7, beta=0.5), np.zeros((C, C))
    for c in range(C):
        window[max(0, c - size // 2) : c + (size - 1) // 2 + 1, c] = 1  # from channel, to channel
    y, dx = together(chain(layer), x, dy, Context(Device(), training=True))
    scale = 1 + 0.7 / size * (x**2 @ window)
    np.testing.assert_allclose(y, x * scale**-0.5, rtol=1e-12)
    crossed = (dy * x * scale**-1.5) @ window.T
    np.testing.assert_allclose(dx, dy * scale**-0.5 - 0.7 / size * x * crossed, rtol=1e-11, atol=1e-13)


def test_scratch_memory_stays_within_what_blocks_need() -> None:
    net = chain(ReLU(), LRN(), MaxPool(2))
    _, _, x, dy, ctx = example(net, (16, 32, 8), in_blocks(2048), dtype="float32", N=4)
    together(net, x, dy, ctx)
    assert 0 < ctx.device.workspace.nbytes < x.nbytes


def test_dropout_in_a_chain_says_what_it_needs() -> None:
    _, _, x, _, ctx = example(Dropout(0.5), MAP, in_blocks(1, threads=2))
    with pytest.raises(ValueError, match="keys=None"):
        Dropout(0.5).forward({}, {}, x, replace(ctx, keys=None))
