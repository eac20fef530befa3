"""The average of the center: it follows every merge, of any rule, and changes none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.nn.optimizers import SGD, Averaged
from daskcnn.ps import RULES, Code, Join, ParameterServer, Pull, Push, Refuse, Reply, Request, Snapshot
from daskcnn.ps.average import AVERAGE, TRAINED, exchanged
from tests.ps.split_here import SplitServer, WholeServer

EMA, SIZE, ROUNDS = 0.3, 7, 6
WORKERS = ("a", "b", "c")
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in RULES),
    ("downpour", {"server": "adagrad"}),
    ("local-sgd", {"outer_momentum": 0.0}),
]
every_rule = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)


def begin(dtype: str = "float32") -> Any:
    return np.random.default_rng(0).standard_normal(SIZE).astype(dtype)


def pushes(life: int = 0, *, first: int = 1, rounds: int = ROUNDS, seed: int = 1) -> Iterator[Request]:
    """The workers' joins, and their pushes round by round."""
    rng = np.random.default_rng(seed)
    yield from (Join(life, worker, life) for worker in WORKERS)
    for seq in range(1, rounds + 1):
        for i, worker in enumerate(WORKERS):
            payload = rng.standard_normal(SIZE).astype("float32")
            if seq >= first:
                yield Push(life, worker, life, seq - first + 1, 0, payload, 5 + i, 0.5)


def average_of(snapshot: Snapshot) -> Any:
    assert snapshot.state is not None
    return snapshot.state[AVERAGE]


@every_rule
def test_it_is_the_recursion_over_the_centers(name: str, options: dict[str, Any]) -> None:
    """As an average over steps is: that of an optimizer's, whose steps go from center to center."""
    server = ParameterServer(RULES[name](**options), begin(), ema=EMA)
    average, version, steps = begin(), 0, Averaged(SGD(0.0, False, 0.0), EMA)
    params, state = begin(), steps.init(begin())
    for request in pushes():
        server.handle(request)
        snapshot = server.snapshot()
        if snapshot.version > version:
            version = snapshot.version
            kept = min(EMA, (1 + version) / (10 + version))
            average = average + np.float32(1 - kept) * (snapshot.center - average)
            state = steps.step(params, params - snapshot.center, state, 1.0, Device())
            np.testing.assert_array_equal(average_of(snapshot), average)
            np.testing.assert_allclose(average_of(snapshot), state.vectors[-1], rtol=1e-5, atol=1e-6)
    assert version >= ROUNDS
    assert not average_of(server.snapshot()).flags.writeable
    server.validate()


@every_rule
def test_the_centers_are_those_of_a_server_without_it(name: str, options: dict[str, Any]) -> None:
    """Pulls of the average in between change nothing either: a worker's base stays."""
    rule = RULES[name](**options)
    plain, averaging = ParameterServer(rule, begin()), ParameterServer(rule, begin(), ema=EMA)
    for request in pushes():
        expected, found = plain.handle(request), averaging.handle(request)
        assert found == expected
        for worker in WORKERS if isinstance(request, Push) else ():
            (reply,) = averaging.handle(Pull(0, worker, 0, averaged=True))
            assert isinstance(reply, Reply)
            assert reply.weights is average_of(averaging.snapshot())
        averaging.validate()
    np.testing.assert_array_equal(averaging.snapshot().center, plain.snapshot().center)
    assert averaging.snapshot().version == plain.snapshot().version


@every_rule
@pytest.mark.parametrize("parts", [2, 3])
def test_a_split_server_has_the_very_same(name: str, options: dict[str, Any], parts: int) -> None:
    rule = RULES[name](**options)
    whole = WholeServer(rule, begin(), ema=EMA)
    split = SplitServer(rule, Snapshot(begin()), parts=parts, ema=EMA)
    for request in pushes():
        whole.handle(request)
        split.handle(request)
        for server in (whole, split) if isinstance(request, Push) else ():
            (reply,) = server.handle(Pull(0, "b", 0, averaged=True))
            assert isinstance(reply, Reply)
            np.testing.assert_array_equal(server.read(reply), average_of(whole.snapshot()))
        split.validate()
    np.testing.assert_array_equal(average_of(split.snapshot()), average_of(whole.snapshot()))


@every_rule
def test_a_new_server_goes_on_from_it(name: str, options: dict[str, Any]) -> None:
    """Through a checkpoint, where average and trained center have changed places, into a split server too."""
    rule = RULES[name](**options)
    first, undisturbed = ParameterServer(rule, begin(), ema=EMA), ParameterServer(rule, begin(), ema=EMA)
    for request in pushes(rounds=3):
        first.handle(request)
    kept = first.snapshot()
    weights, beside = exchanged(kept.center, kept.state or {})
    np.testing.assert_array_equal(weights, average_of(kept))
    assert beside.keys() == {*rule.init(weights), TRAINED}
    center, state = exchanged(weights, beside)
    again = Snapshot(center, kept.version, kept.life, state)
    servers = ParameterServer.restore(rule, again, ema=EMA), SplitServer(rule, again, life=1, ema=EMA)
    for request in pushes(rounds=ROUNDS):
        undisturbed.handle(request)
    for server in servers:
        for request in pushes(1, first=4):
            server.handle(request)
        found = server.snapshot()
        if RULES[name].barrier:  # the others weigh by versions that workers of this life have not had
            np.testing.assert_array_equal(found.center, undisturbed.snapshot().center)
            np.testing.assert_array_equal(average_of(found), average_of(undisturbed.snapshot()))
    np.testing.assert_array_equal(average_of(servers[0].snapshot()), average_of(servers[1].snapshot()))


def test_it_begins_at_the_center_and_leaves_it_soon() -> None:
    server = ParameterServer(RULES["bsp"](), np.zeros(2), ema=0.999)
    server.handle(Join(0, "a", 1))
    (begun,) = server.handle(Pull(0, "a", 1, averaged=True))
    assert isinstance(begun, Reply)
    assert not begun.weights.any()
    server.handle(Push(0, "a", 1, 1, 0, np.ones(2), 1, 1.0))
    (first,) = server.handle(Pull(0, "a", 1, averaged=True))
    assert isinstance(first, Reply)
    np.testing.assert_allclose(first.weights, 9 / 11)


def test_places_that_no_merge_changes_are_the_same_in_it() -> None:
    center = begin("float64")
    center[2] = -0.0
    server = ParameterServer(RULES["sgwu"](), center, kept=[slice(2, 5)], ema=0.9)
    server.handle(Join(0, "a", 1))
    server.handle(Push(0, "a", 1, 1, 0, center + 1, 1, 1.0))
    average = average_of(server.snapshot())
    assert average[2:5].tobytes() == center[2:5].tobytes()
    assert (np.delete(average, [2, 3, 4]) != np.delete(center, [2, 3, 4])).all()


def test_a_worker_that_is_late_for_a_round_is_given_it_at_once() -> None:
    """It trains from none of it; the center it is given when the round has ended."""
    server = ParameterServer(RULES["sgwu"](), np.zeros(2), ema=EMA)
    server.handle(Join(0, "a", 1))
    server.handle(Join(0, "b", 1))
    server.handle(Push(0, "a", 1, 1, 0, np.ones(2), 1, 1.0))
    assert server.handle(Join(0, "c", 1)) == []
    (reply,) = server.handle(Pull(0, "c", 1, seq=9, averaged=True))
    assert (reply.worker, reply.seq) == ("c", 9)
    server.validate()
    told = server.handle(Push(0, "b", 1, 1, 0, np.ones(2), 1, 1.0))
    assert [(each.worker, each.seq) for each in told] == [("a", 1), ("b", 1), ("c", 0)]
    assert isinstance(server.handle(Pull(0, "d", 1, averaged=True))[0], Refuse)


def test_where_none_is_kept_the_center_is_given() -> None:
    server = ParameterServer(RULES["sgwu"](), begin())
    server.handle(Join(0, "a", 1))
    (reply,) = server.handle(Pull(0, "a", 1, averaged=True))
    assert isinstance(reply, Reply)
    np.testing.assert_array_equal(reply.weights, begin())
    assert exchanged(begin(), {})[1] == {}


@pytest.mark.parametrize("name", ["sgwu", "admm"])
def test_a_merge_whose_average_would_not_be_finite_is_refused(name: str) -> None:
    most = np.full(2, np.finfo("float32").max)
    server = ParameterServer(RULES[name](), most, ema=EMA)
    server.handle(Join(0, "a", 1))
    (refused,) = server.handle(Push(0, "a", 1, 1, 0, -most, 1, 1.0))
    assert isinstance(refused, Refuse)
    assert refused.code == Code.FINITE
    np.testing.assert_array_equal(server.snapshot().center, most)
    np.testing.assert_array_equal(average_of(server.snapshot()), most)
    server.validate()
