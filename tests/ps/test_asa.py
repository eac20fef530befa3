"""Replicas that meet peer to peer come to what the server would have made of their pushes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.ps import Join, Local, ParameterServer, Push, Reply
from daskcnn.ps.bsp import ASA, BSP, SCALE
from daskcnn.ps.split import spans

combines = st.sampled_from(["average", "sum"])


def meet(asa: ASA, replicas: Sequence[Local], samples: Sequence[int]) -> None:
    """One meeting: cut, send, add up, send, adopt."""
    cuts = spans(len(replicas[0].weights), len(replicas))
    said = [asa.contribution(local) for local in replicas]
    merged = [
        asa.add_up(local.base[lo:hi], [piece[lo:hi] for piece in said], samples)
        for local, (lo, hi) in zip(replicas, cuts, strict=True)
    ]
    for local in replicas:
        for span, part in zip(cuts, merged, strict=True):
            assert part.dtype == asa.wire
            asa.adopt(local, span, part)


def replicas_of(base: np.ndarray, steps: Sequence[np.ndarray]) -> list[Local]:
    return [Local(base + step, base.copy()) for step in steps]


def through_the_server(rule: BSP, base: np.ndarray, replicas: Sequence[Local], samples: Sequence[int]) -> np.ndarray:
    server = ParameterServer(rule, base)
    names = [f"w{i:02}" for i in range(len(replicas))]
    for name in names:
        server.handle(Join(0, name, 1))
    for name, local, n in zip(names, replicas, samples, strict=True):
        last = server.handle(Push(0, name, 1, 1, 0, rule.payload(local), n, 1.0))
    assert all(isinstance(each, Reply) for each in last)
    return server.snapshot().center


@given(
    combine=combines,
    samples=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    size=st.integers(6, 50),
    seed=st.integers(0, 99),
)
def test_asa_is_the_server_s_merge_to_the_last_bit(combine: str, samples: list[int], size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rule = BSP.model_validate({"combine": combine, "exchange": "asa"})
    base = rng.normal(size=size).astype(np.float32)
    replicas = replicas_of(base, [rng.normal(size=size).astype(np.float32) for _ in samples])
    expected = through_the_server(rule, base, replicas, samples)
    meet(ASA(rule, np.dtype("float32")), replicas, samples)
    for local in replicas:
        np.testing.assert_array_equal(local.weights, expected, strict=True)
        if combine == "sum":  # a mean of weights has no use for it
            np.testing.assert_array_equal(local.base, expected, strict=True)


@given(combine=combines, k=st.integers(1, 5), exponent=st.integers(-7, 1), seed=st.integers(0, 99))
def test_asa16_loses_little_of_an_increment_of_any_size_and_nothing_of_the_weights(
    combine: str, k: int, exponent: int, seed: int
) -> None:
    """Two casts, of at most half a part in 1,024 each; the increments are summed in more than float16."""
    rng = np.random.default_rng(seed)
    rule = BSP.model_validate({"combine": combine, "exchange": "asa16"})
    base = rng.normal(size=40).astype(np.float32)
    steps = [np.abs(rng.normal(size=40)) + 0.1 for _ in range(k)]
    replicas = [Local(np.zeros(40), np.zeros(40)) for _ in steps]
    for local, step in zip(replicas, steps, strict=True):
        local.weights[...], local.base[...] = base + step * 10.0**exponent, base
    samples = list(range(1, k + 1))
    expected = through_the_server(rule, replicas[0].base, replicas, samples) - replicas[0].base
    meet(ASA(rule, np.dtype("float16")), replicas, samples)
    for local in replicas:
        np.testing.assert_allclose(local.weights - base, expected, rtol=1.1e-3, atol=1e-9)
        np.testing.assert_array_equal(local.weights, replicas[0].weights)


def test_a_replica_alone_goes_on_from_its_own_weights() -> None:
    (local,) = replicas_of(np.ones(5, np.float32), [np.full(5, 0.125, np.float32)])
    meet(ASA(BSP(exchange="asa"), np.dtype("float32")), [local], [3])
    np.testing.assert_array_equal(local.weights, np.full(5, 1.125, np.float32))


def test_long_vectors_go_through_block_by_block() -> None:
    size = 300_001
    rng = np.random.default_rng(0)
    base = rng.normal(size=size).astype(np.float32)
    steps = [rng.normal(size=size).astype(np.float32) for _ in range(2)]
    for wire, tolerance in (("float32", 0.0), ("float16", 4e-3)):
        replicas = replicas_of(base, steps)
        expected = through_the_server(BSP(), base, replicas, [1, 3])
        meet(ASA(BSP(exchange="asa"), np.dtype(wire)), replicas, [1, 3])
        np.testing.assert_allclose(replicas[1].weights, expected, rtol=0, atol=tolerance)


def test_what_float16_cannot_hold_is_infinite_for_all() -> None:
    replicas = replicas_of(np.zeros(4, np.float32), [np.full(4, 2.0**17 / SCALE, np.float32), np.zeros(4, np.float32)])
    meet(ASA(BSP(exchange="asa16"), np.dtype("float16")), replicas, [1, 1])
    assert all(np.isinf(local.weights).all() for local in replicas)


@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_pieces_that_were_sent_are_not_written_to(wire: str) -> None:
    asa = ASA(BSP(exchange="asa"), np.dtype(wire))
    (local,) = replicas_of(np.ones(8, np.float32), [np.full(8, 0.5, np.float32)])
    pieces = [asa.contribution(local).copy() for _ in range(3)]
    for piece in pieces:
        piece.flags.writeable = False
    local.base.flags.writeable = False
    assert np.isfinite(asa.add_up(local.base, pieces, [1, 2, 3])).all()
