"""Workers that come, leave and die in simulated time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.errors import JobError, Lost
from daskcnn.events import (
    EpochEnded,
    GroupsFormed,
    KernelsSharded,
    RoundEnded,
    RunEnded,
    WorkerJoined,
    WorkerLeft,
    WorkerLeftOut,
    WorkerLost,
)
from daskcnn.job.resolve import resolve
from daskcnn.planning.simulate import scenario_of, simulate
from daskcnn.ps import RULES
from daskcnn.sim.cluster import ClusterFileError, SimulatedCluster, parse_cluster
from daskcnn.sim.simulation import GRACE, Simulation
from tests.sim.sim_cases import of, run, seconds, workload

PEERS = ("bsp", {"exchange": "asa"})
every_rule = pytest.mark.parametrize("which", [*((name, {}) for name in RULES), PEERS], ids=[*RULES, "asa"])


def changing(**of_third: Any) -> SimulatedCluster:
    """Two workers of 10 images a second that stay, and one of which this is known."""
    stays = [{"name": f"w{i}", "images_per_second": 10.0} for i in range(2)]
    return parse_cluster({"worker": [*stays, {"name": "w2", "images_per_second": 10.0, **of_third}]})


@every_rule
@pytest.mark.parametrize(
    "change", [{"arrives": 12.0}, {"dies": 12.0}, {"leaves": 12.0}], ids=["comes", "dies", "leaves"]
)
def test_every_sample_is_presented_whoever_comes_or_goes(which: Any, change: dict[str, float]) -> None:
    name, rule = which
    simulation, events = run(workload(name, rule=rule, epochs=6), changing(**change))
    assert simulation.rounds.done == 600
    assert sum(event.samples for event in of(RoundEnded, events)) == 600
    assert events[-1] == RunEnded(status="done", at=events[-1].at)
    if name == "parallel-sgd":  # its replicas meet once, at the end
        return
    rounds = {event.worker: event.at for event in of(RoundEnded, events)}
    assert rounds["w2"] > 12.0 if "dies" not in change else rounds["w2"] <= 12.0
    gone = [*of(WorkerLost, events), *of(WorkerLeft, events)]
    assert [event.worker for event in (of(WorkerJoined, events) if "arrives" in change else gone)] == ["w2"]


@pytest.mark.parametrize("name", ["sgwu", "agwu", "bsp", "easgd"])
def test_a_worker_that_comes_shortens_a_run_and_one_that_dies_lengthens_it(name: str) -> None:
    work = workload(name, samples=1000, epochs=6)
    with_two, with_three = (seconds(work, changing(**times)) for times in ({"arrives": 1e9}, {}))
    assert with_three < seconds(work, changing(arrives=100.0)) < with_two
    assert with_three < seconds(work, changing(dies=100.0)) < with_two


@every_rule
def test_a_worker_that_leaves_pushes_what_it_has_and_loses_nothing(which: Any) -> None:
    name, rule = which
    work, at = workload(name, rule=rule, samples=1000, epochs=2), 12.2
    _, events = run(work, changing(leaves=at))
    (last,) = [event for event in of(RoundEnded, events) if event.worker == "w2" and event.at > at]
    assert last.at < at + GRACE
    assert last.pushes
    (left,) = of(WorkerLeft, events)
    assert left.at == pytest.approx(last.at)
    (ended,) = of(RunEnded, events)
    assert ended.at < seconds(work, changing(dies=at)), "what it had done since its last push is not done again"


@pytest.mark.parametrize("which", [("bsp", {}), ("sgwu", {}), PEERS], ids=["bsp", "sgwu", "asa"])
def test_behind_a_barrier_a_long_round_ends_early_for_a_worker_that_comes(which: Any) -> None:
    name, rule = which
    work = workload(name, rule=rule, samples=1000, epochs=2)
    simulation, events = run(work, changing(arrives=12.0))
    (joined,) = of(WorkerJoined, events)
    assert 12.0 <= joined.at < 15.0, "a round takes 50 s"
    assert simulation.rounds.done == 2000
    whole, late = seconds(work, changing()), seconds(work, changing(arrives=1e9))
    assert whole < simulation.now < late - 20.0


CHANGES = st.fixed_dictionaries(
    {"arrives": st.sampled_from([0.0, 3.3, 20.0])},
    optional={"leaves": st.floats(20.1, 90.0)} | {"latency": st.sampled_from([0.01, 0.4])},
)


@every_rule
@settings(max_examples=8, deadline=None)
@given(changes=st.lists(CHANGES, min_size=1, max_size=3), overlap=st.booleans())
def test_whenever_workers_come_and_leave_each_presentation_is_made_once(
    which: Any, changes: list[dict[str, float]], overlap: bool
) -> None:
    name, rule = which
    stays = [{"name": f"w{i}", "images_per_second": 10.0} for i in range(2)]
    rest = [{"name": f"w{i}", "images_per_second": 4.0 * i, **each} for i, each in enumerate(changes, 2)]
    work = replace(workload(name, rule=rule, samples=600, epochs=2), overlap=overlap)
    simulation, events = run(work, parse_cluster({"worker": [*stays, *rest]}))
    assert sum(event.samples for event in of(RoundEnded, events)) == simulation.rounds.done == 1200


def test_a_run_whose_workers_all_die_is_lost() -> None:
    alone = parse_cluster({"worker": [{"name": "w0", "images_per_second": 10.0, "dies": 5.0}]})
    with pytest.raises(Lost, match="it was the last of the run"):
        run(workload("sgwu", epochs=6), alone)


@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_a_worker_that_was_left_out_and_is_gone_trains_no_more(how: str) -> None:
    link = {"bandwidth": 1e3, "latency": 0.5}
    speeds = {"w0": 100.0, "w1": 50.0}
    gone = [{"name": name, "images_per_second": speed, **link, how: speed / 5} for name, speed in speeds.items()]
    events = list[Any]()
    with pytest.raises(Lost, match="it was the last of the run"):
        Simulation(
            workload("auto", partition="idpa", epochs=60), parse_cluster({"worker": gone}), emit=events.append
        ).run()
    assert [event.worker for event in of(WorkerLeftOut, events)] == ["w1"]
    assert {event.worker for event in of(RoundEnded, events)} == {"w0"}


@pytest.mark.parametrize(
    ("times", "problem"),
    [
        ({"leaves": 5.0, "dies": 6.0}, "worker 'w2': leaves and dies; keep one of them"),
        ({"arrives": 7.0, "dies": 6.0}, "worker 'w2': dies = 6: it arrives at 7 s; give a later time"),
        ({"dies": 0.0}, "worker[2].dies = 0.0: input should be greater than 0; give seconds of the run"),
    ],
)
def test_times_that_contradict_each_other_are_refused(times: dict[str, float], problem: str) -> None:
    with pytest.raises(ClusterFileError) as found:
        changing(**times)
    assert problem in str(found.value)


# --- layer ---

LAYERS = [
    {"layer": "conv", "kernels": 64, "size": 5, "pad": 2},
    {"layer": "maxpool", "size": 2},
    {"layer": "conv", "kernels": 128, "size": 5, "pad": 2},
    {"layer": "maxpool", "size": 2},
    {"layer": "dense", "units": 10},
]


def sharded(*workers: dict[str, Any], epochs: int = 2, **of_run: Any) -> list[Any]:
    """The events of epochs of ten steps, on workers of ten images a second: alone a step takes ten seconds."""
    job = {
        "data": {"name": "cifar10", "path": "nowhere.zarr", "limit": 1100, "validation": 100},
        "model": {"layers": LAYERS},
        "train": {"strategy": "layer", "epochs": epochs, "batch_size": 100},
        "run": of_run,
    }
    named = [{"name": f"w{i}", "images_per_second": 10.0, "bandwidth": 1e8, **own} for i, own in enumerate(workers)]
    return simulate(scenario_of(resolve(job), parse_cluster({"worker": named}), "here")).events


def cuts(events: list[Any]) -> list[list[str]]:
    """Who had kernels, one time after the other."""
    return [[*event.kernels] for event in of(KernelsSharded, events)]


def test_layer_gives_kernels_to_a_worker_that_comes_and_takes_those_of_one_that_leaves() -> None:
    events = sharded({}, {"leaves": 70.0}, {"arrives": 30.0})
    assert cuts(events) == [["w0", "w1"], ["w0", "w1", "w2"], ["w0", "w2"]]
    assert [event.worker for event in of(WorkerJoined, events)] == ["w2"]
    assert [event.worker for event in of(WorkerLeft, events)] == ["w1"]
    assert of(WorkerLost, events) == []
    assert [event.step for event in of(EpochEnded, events)] == [10, 20]
    assert all(event.loss is None for event in of(EpochEnded, events))


def test_layer_trains_again_what_a_lost_worker_had_and_no_more_than_snapshots_leave() -> None:
    often, seldom = (sharded({}, {"dies": 45.0}, snapshot_every=every) for every in (12.0, 1e6))
    assert cuts(often) == cuts(seldom) == [["w0", "w1"], ["w0"]]
    assert of(RunEnded, often)[0].at + 10.0 < of(RunEnded, seldom)[0].at


def test_layer_with_workers_that_stay_takes_as_long_as_its_steps() -> None:
    whole = of(RunEnded, sharded({}, {}))[0].at
    late = of(RunEnded, sharded({}, {}, {"arrives": 1e6}))[0].at
    assert whole < late < whole + 25.0, "snapshots, and 100 samples that are judged twice"
    assert of(RunEnded, sharded({}, {}, {"arrives": 30.0}))[0].at < late - 10.0


def test_a_step_of_layer_goes_by_the_speeds_of_its_time_and_kernels_move_from_a_worker_that_has_become_slower() -> None:
    slower = {"speed": {"kind": "drift", "to": 0.25, "seconds": 1e-3, "after": 30.0}}
    usual, slowed = (sharded({}, own, epochs=6, report_every=1) for own in ({}, slower))
    first, then = (event.kernels["w1"] for event in of(KernelsSharded, slowed))
    assert 0 < then["conv2"] < 0.5 * first["conv2"]
    ends = [event.at for event in of(EpochEnded, slowed)]
    assert ends[2] - ends[1] > 1.5 * (ends[5] - ends[4]) > 1.5 * of(EpochEnded, usual)[-1].seconds


def test_a_layer_run_whose_workers_all_die_is_lost() -> None:
    with pytest.raises(JobError, match="it was the last of the run"):
        sharded({"dies": 30.0})


# --- groups ---


def groups(*workers: dict[str, Any], strategy: str = "sgwu") -> list[Any]:
    """The events of six epochs of groups of two, each of 1000 samples."""
    job = {
        "data": {"name": "cifar10", "path": "nowhere.zarr", "limit": 1100, "validation": 100},
        "model": {"layers": LAYERS},
        "train": {"strategy": strategy, "epochs": 6, "batch_size": 50, "replica_size": 2, "partition": "udpa"},
    }
    named = [{"name": f"w{i}", "images_per_second": 10.0, "bandwidth": 1e8, **own} for i, own in enumerate(workers)]
    return simulate(scenario_of(resolve(job), parse_cluster({"worker": named}), "here")).events


def members(events: list[Any]) -> list[list[int]]:
    """How many workers each group had, one time after the other."""
    return [[len(group.members) for group in event.groups] for event in of(GroupsFormed, events)]


@pytest.mark.parametrize(("strategy", "how"), [("sgwu", "dies"), ("agwu", "dies"), ("bsp", "dies"), ("sgwu", "leaves")])
def test_a_group_that_loses_a_worker_goes_on_and_takes_one_that_comes(strategy: str, how: str) -> None:
    events = groups({}, {}, {}, {how: 60.0}, {"arrives": 90.0}, strategy=strategy)
    assert [sorted(each) for each in members(events)] == [[2, 2], [1, 2], [2, 2]]
    assert sum(event.samples for event in of(RoundEnded, events)) == 6000
    lost, left = ([event.worker for event in of(kind, events)] for kind in (WorkerLost, WorkerLeft))
    assert (lost, left) == ((["w3"], []) if how == "dies" else ([], ["w3"]))


def test_a_group_of_which_a_worker_leaves_keeps_what_it_has_trained() -> None:
    """It ends its round, and those of the others end early when another worker fills it up."""
    leaves, dies = (groups({}, {}, {}, {how: 60.0}, {"arrives": 90.0}) for how in ("leaves", "dies"))
    (left,) = of(WorkerLeft, leaves)
    assert 0 < left.samples_done < 500
    assert 60.0 < (left.at or 0.0) < 63.0
    assert of(RunEnded, leaves)[0].at < of(RunEnded, dies)[0].at - 10.0


def test_a_group_is_as_fast_as_its_slowest_member_at_each_time() -> None:
    slower = {"speed": {"kind": "drift", "to": 0.5, "seconds": 1e-3, "after": 30.0}}
    usual, slowed = (of(RunEnded, groups({}, {}, {}, own))[0].at for own in ({}, slower))
    assert slowed == pytest.approx(2 * usual - 30.0, rel=0.02)


def test_two_workers_of_a_group_leave_together_while_it_sends() -> None:
    slow = {"bandwidth": 1e6}
    events = groups(slow, slow, *[{**slow, "leaves": 56.0}] * 2)
    assert [event.worker for event in of(WorkerLeft, events)] == ["w2", "w3", "group-1"]
    assert sum(event.samples for event in of(RoundEnded, events)) == 6000


def test_two_workers_that_come_make_another_group_and_shorten_the_run() -> None:
    four, six = groups({}, {}, {}, {}), groups({}, {}, {}, {}, {"arrives": 50.0}, {"arrives": 50.0})
    assert members(six) == [[2, 2], [2, 2, 2]]
    (joined,) = of(WorkerJoined, six)
    assert 50.0 < joined.at < 54.0, "the rounds under way end early for it"
    assert of(RunEnded, six)[0].at < of(RunEnded, four)[0].at
    assert sum(event.samples for event in of(RoundEnded, six)) == 6000
