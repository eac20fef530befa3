"""Parts of pushes that come before the rest change nothing of what is decided, only when it is known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.arrays import Device
from daskcnn.job.network import center_descent_of
from daskcnn.job.resolve import resolve
from daskcnn.nn import StepPace, sequential_from_spec
from daskcnn.nn.vector import layout_of
from daskcnn.ps import CenterPart, Join, Leave, ParameterServer, Push, PushPart, Reply
from daskcnn.ps.bsp import BSP
from daskcnn.ps.parts_trial import TRIED, TRIED_AGAIN, TURN, PartsTrial
from daskcnn.training.gradient_parts import LEAST, parts_of
from tests.training.test_shared_steps import BATCHES, OPTIMIZERS, part, replica_of

SIZE = replica_of("sgd").layout.size
CUTS = (SIZE - 40, SIZE - 100, 30)
"""The first number of each part. The numbers before the last part come with the push."""
WORKERS = ("a", "b", "c")
PACE = 0.05, 0.0


def server_of(name: str, **own: Any) -> ParameterServer:
    replica = replica_of(name)
    steps = center_descent_of(replica.job, replica.layout)
    server = ParameterServer(BSP(), replica.host_weights(), steps=steps, **own)
    for worker in WORKERS:
        server.handle(Join(0, worker, 1))
    return server


def pushes_of(seed: int, seq: int = 1) -> dict[str, Push]:
    rng = np.random.default_rng(seed)
    return {
        worker: Push(0, worker, 1, seq, seq - 1, rng.normal(size=SIZE), 5 + i, 0.5, pace=PACE, step=seq, ticket=seed)
        for i, worker in enumerate(WORKERS)
    }


def part_of(push: Push, number: int) -> PushPart:
    lo, hi = CUTS[number], (SIZE, *CUTS)[number]
    return PushPart(replace(push, payload=push.payload[lo:hi]), lo, hi)


def replies(server: ParameterServer, pushes: dict[str, Push]) -> dict[str, Reply]:
    found = [each for push in pushes.values() for each in server.handle(push)]
    return {each.worker: each for each in found if isinstance(each, Reply)}


def interleaved() -> st.SearchStrategy[list[str]]:
    """An order in which all workers send all their parts."""
    return st.permutations([worker for worker in WORKERS for _ in CUTS])


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=4)
@given(order=interleaved(), ema=st.sampled_from([None, 0.9]))
def test_weights_are_those_of_whole_pushes(name: str, order: list[str], ema: float | None) -> None:
    whole, early = server_of(name, ema=ema), server_of(name, ema=ema)
    for seq in (1, 2):
        pushes, given_ahead = pushes_of(seq, seq), dict[str, list[CenterPart]]()
        sent = dict.fromkeys(WORKERS, 0)
        for worker in order:
            for each in early.handle_part(part_of(pushes[worker], sent[worker])):
                given_ahead.setdefault(each.worker, []).append(each)
            sent[worker] += 1
            early.validate()
        expected, found = replies(whole, pushes), replies(early, pushes)
        splits = name not in ("lars", "clip")
        for worker, reply in found.items():
            np.testing.assert_allclose(reply.weights, expected[worker].weights, rtol=1e-12, atol=1e-14)
            assert reply.ahead == (CUTS[-1] if splits else None)
            assert [each.lo for each in given_ahead.get(worker, [])] == ([*CUTS] if splits else [])
            for each in given_ahead.get(worker, []):
                assert each.values.tobytes() == reply.weights[each.lo : each.lo + len(each.values)].tobytes()
    for name_of, vector in (early.snapshot().state or {}).items():
        np.testing.assert_allclose(vector, (whole.snapshot().state or {})[name_of], rtol=1e-12, atol=1e-14)


def ahead_of_all(server: ParameterServer, pushes: dict[str, Push]) -> list[CenterPart]:
    return [each for push in pushes.values() for each in server.handle_part(part_of(push, 0))]


def test_what_was_given_does_not_hold_once_a_worker_has_left() -> None:
    whole, early, pushes = server_of("momentum"), server_of("momentum"), pushes_of(1)
    assert len(ahead_of_all(early, pushes)) == len(WORKERS)
    left = {worker: push for worker, push in pushes.items() if worker != "b"}
    for server in (whole, early):
        server.handle(Leave("b", 1))
    expected, found = replies(whole, left), replies(early, left)
    assert found["a"].ahead is None
    assert found["a"].weights.tobytes() == expected["a"].weights.tobytes()


def test_what_was_given_does_not_hold_for_another_payload() -> None:
    """A step that was given up, and made again of other samples, has the same number."""
    whole, early, pushes = server_of("momentum"), server_of("momentum"), pushes_of(1)
    ahead_of_all(early, pushes)
    pushes["a"] = replace(pushes_of(2)["a"])
    found = replies(early, pushes)
    assert found["a"].ahead is None
    assert found["a"].weights.tobytes() == replies(whole, pushes)["a"].weights.tobytes()


def test_nothing_is_given_for_a_part_that_is_not_the_next_push_s() -> None:
    server, pushes = server_of("momentum"), pushes_of(1)
    for wrong in ({"session": 2}, {"seq": 2}, {"life": 1}, {"base_version": 1}, {"worker": "stranger"}):
        assert server.handle_part(part_of(replace(pushes["a"], **wrong), 0)) == []
    assert ahead_of_all(server, {worker: pushes[worker] for worker in ("b", "c")}) == []
    assert len(server.handle_part(part_of(pushes["a"], 0))) == len(WORKERS)


def test_a_part_that_is_not_finite_is_left_to_the_push() -> None:
    server, pushes = server_of("momentum"), pushes_of(1)
    pushes["b"].payload[-1] = np.inf
    assert ahead_of_all(server, pushes) == []
    assert replies(server, {"b": pushes["b"]}) == {}


# --- on the replica's side ---

LARGE: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 4, "size": 3, "pad": 1},
    {"layer": "batchnorm"},
    {"layer": "relu"},
    {"layer": "dense", "units": 300},
    {"layer": "relu"},
    {"layer": "dense", "units": 200},
    {"layer": "dense", "units": 10},
]


def test_parts_go_from_the_end_to_the_second_layer() -> None:
    model = sequential_from_spec(LARGE)
    layout = layout_of(model, (8, 8, 3), "float64")
    parts = parts_of(model, layout)
    assert [each.last for each in parts] == ["dense2", "dense1"]
    assert parts[0].hi == layout.size
    assert [each.lo for each in parts[:-1]] == [each.hi for each in parts[1:]]
    assert all((each.hi - each.lo) * 8 >= LEAST for each in parts)
    assert parts[-1].lo == dict(layout.places())["dense1/w"].start


def test_parts_are_there_when_they_are_told_of() -> None:
    job = resolve({"data": {"validation": 20}, "model": {"layers": LARGE, "dtype": "float64"}})
    replica = replica_of("sgd")
    replica = type(replica)(job, replica.dataset, Device(), clock=lambda: 0.0)
    batch, told = part(BATCHES[0], 0, 12), list[tuple[int, int, bytes]]()

    def tell(lo: int, hi: int) -> None:
        told.append((lo, hi, replica.gradients[lo:hi].tobytes()))

    replica.step(batch, StepPace(*PACE), descends=False)
    expected = replica.gradients.copy()
    replica.gradients[...] = np.nan
    replica.step(batch, StepPace(*PACE), descends=False, tell=tell)
    assert [(lo, hi) for lo, hi, _ in told] == [(each.lo, each.hi) for each in replica.gradient_parts]
    assert told
    for lo, hi, then in told:
        assert then == expected[lo:hi].tobytes()
    assert replica.gradients.tobytes() == expected.tobytes()


@pytest.mark.parametrize("more", [{"tied": "dense1"}, {}])
def test_a_network_with_tied_or_frozen_layers_has_no_parts(more: dict[str, Any]) -> None:
    layers = [{"layer": "dense", "units": 200}, {"layer": "dense", "units": 192, **more}]
    model = sequential_from_spec(layers)
    model = model if more else replace(model, frozen=frozenset({"dense1"}))
    assert parts_of(model, layout_of(model, (8, 8, 3), "float64")) == ()


# --- do they pay? ---


def tried(trial: PartsTrial, seconds: Callable[[bool], float], versions: Iterable[int]) -> list[bool]:
    """Make a step from each of these versions of the center. Returns which of the steps sent parts ahead."""
    found, now = [], 0.0
    for version in versions:
        for _ in "ab":
            trial.reached(version, now)
            found.append(trial.sends(version))
        now += seconds(found[-1])
    assert found[::2] == found[1::2]
    return found[::2]


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("first", [0, 7])
def test_parts_go_ahead_where_steps_are_shorter_with_them(pays: bool, first: int) -> None:
    """A step in five that takes long decides nothing, nor does what is left of the step before in the next one."""
    slow, before = itertools.cycle([0.0, 0.0, 5.0, 0.0, 0.0]), [True]

    def seconds(ahead: bool) -> float:
        answer = 1.0 if before[0] == pays else 1.3
        before[0] = ahead
        return (1.0 if ahead == pays else 1.1) + answer + next(slow)

    made = tried(PartsTrial(), seconds, range(first, first + 400))
    assert {*made[:TRIED]} == {True, False}
    assert {*made[3 * TRIED + 2 * TURN :]} == {pays}


def test_a_link_that_has_become_slow_is_found_out() -> None:
    trial = PartsTrial()
    fast = tried(trial, lambda ahead: 1.1 if ahead else 1.0, range(TRIED_AGAIN))
    slow = tried(trial, lambda ahead: 1.0 if ahead else 2.0, range(TRIED_AGAIN, 2 * TRIED_AGAIN))
    assert (fast[-1], slow[-1]) == (False, True)


def test_a_version_behind_another_tells_nothing() -> None:
    """A center that is replaced, or versions that were missed, say nothing of a step."""
    trial = PartsTrial()
    for version in range(0, 20 * TRIED, 2):
        trial.reached(version, float(version))
        trial.reached(version - 1, float(version))
    assert [trial.sends(version) for version in (7, 8)] == [False, True], "it has found nothing out"
