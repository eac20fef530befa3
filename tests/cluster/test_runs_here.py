"""Whole runs in this process, without Dask: what exchanges, groups and resuming do to the numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.cluster.link.calls import WorkersLost
from daskcnn.cluster.link.streams import Refused
from daskcnn.cluster.run import exchange
from daskcnn.cluster.run import workers as run_workers
from daskcnn.cluster.run.server_hosts import Hosted, host_server
from daskcnn.cluster.server import actor as server_actor
from daskcnn.errors import DataError, Diverged, Interrupted, Lost, UserError
from daskcnn.events import (
    EpochEnded,
    GroupsFormed,
    KernelsSharded,
    RoundEnded,
    SamplesAllocated,
    ServerCounted,
    Warned,
    WorkerLeft,
    WorkerLost,
)
from daskcnn.job.network import center_descent_of, layout_of, optimizer_of
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job, Schedule
from daskcnn.nn.optimizers import OWN
from daskcnn.partition.step_shares import LAG, Change
from daskcnn.ps import RULES, Join, Leave, Local, Merge, ParameterServer, Pull, Push, Snapshot
from daskcnn.ps.bsp import BSP
from daskcnn.ps.gradient_noise import NOISE
from daskcnn.ps.server import CenterRange
from daskcnn.ps.vectors import cast
from daskcnn.ps.wire import Feedback, bytes_of
from daskcnn.runs.state import to_checkpoint, to_state
from daskcnn.sim.simulation import Simulation
from daskcnn.sim.workload import Workload
from daskcnn.store import Dataset
from daskcnn.training import judging
from daskcnn.training.cadence import steps_of_round
from daskcnn.training.coordinator.evaluations import guessing_on
from daskcnn.training.coordinator.facts import Fact, Progress, RoundDone, ServerLeaving, WorkerLeaving, WorkerReady
from daskcnn.training.coordinator.replicas import Coordinator
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.replica import Replica
from daskcnn.training.round_report import RoundReport
from tests.cluster.references import trained_in_rounds
from tests.cluster.run_here import RunHere, assert_same
from tests.cluster.sharded_networks import NORMALISED
from tests.replays import assert_played, assert_replayed
from tests.sim.sim_cases import cluster
from tests.toy_data import toy_dataset

LAYERS = [
    {"layer": "conv", "kernels": 4, "size": 3, "pad": 1},
    {"layer": "relu"},
    {"layer": "maxpool", "size": 4},
    {"layer": "conv", "kernels": 4, "size": 3, "pad": 1},
    {"layer": "relu"},
    {"layer": "averagepool", "size": 2},
    {"layer": "dense", "units": 10},
]
WHOLE = {"dtype": "float64"}
SAMPLES, EPOCHS = 100, 2
SEVERAL_MEETINGS: dict[str, dict[str, Any]] = {
    "bsp": {"every": 2},
    "easgd": {"tau": 2},
    "downpour": {"n_push": 2, "n_fetch": 3},
    "admm": {"every": 2, "rho": 0.1},
    "parallel-sgd": {"rounds": 2},
    "local-sgd": {"every": 2},
}
"""With these, replicas exchange within rounds."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return toy_dataset(tmp_path_factory.mktemp("toy"), train=SAMPLES + 30, size=8)


def job_of(strategy: str = "bsp", **sections: dict[str, Any]) -> Job:
    """A run whose allocation does not depend on what is measured."""
    train = {"strategy": strategy, "partition": "udpa", "epochs": EPOCHS, "batch_size": 10, "lr": 0.01}
    tables: dict[str, Any] = {"data": {"validation": 30}, "model": {"layers": LAYERS}, "train": train}
    for name, keys in sections.items():
        tables[name] = tables.get(name, {}) | keys
    return resolve(tables)


def grouped(job: Job, **train: Any) -> Job:
    """The same in groups of 2, whose members have equally many kernels."""
    groups, rule = {"replica_size": 2, "kernel_shares": "speeds", **train}, job.rule and job.rule.for_groups()
    return job.model_copy(update={"train": job.train.model_copy(update=groups), "rule": rule})


def trained(job: Job, dataset: Dataset, workers: int) -> tuple[np.ndarray, RunHere]:
    """The run's weights, and the run."""
    run = RunHere(job, dataset, workers)
    return run.train(), run


def moved(run: RunHere) -> tuple[int, int]:
    """Bytes up and down."""
    rounds = run.of(RoundEnded)
    return sum(event.bytes_up or 0 for event in rounds), sum(event.bytes_down or 0 for event in rounds)


def pushes(run: RunHere) -> int:
    return sum(event.pushes or 0 for event in run.of(RoundEnded))


def presented(run: RunHere) -> int:
    return sum(event.samples or 0 for event in run.of(RoundEnded))


# --- minibatches that follow speeds ---


def following(strategy: str, rule: dict[str, Any]) -> Job:
    """A run whose shares go by speed, of a dozen steps a round."""
    return job_of(strategy, rule=rule, train={"partition": "idpa", "increments": 1, "batch_size": 4})


@pytest.mark.parametrize(
    ("strategy", "rule"),
    [*((name, SEVERAL_MEETINGS.get(name, {})) for name in RULES), ("bsp", {}), ("bsp", {"batch": "worker"})],
)
def test_minibatches_follow_speeds_on_a_cluster_where_the_coordinator_and_the_simulator_take_them_to(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, strategy: str, rule: dict[str, Any]
) -> None:
    job, context, simulated = following(strategy, rule), MagicMock(), Mock()
    assert job.rule is not None
    settings = Settings.of(job, SAMPLES)
    context.configure_mock(job=job, dataset=dataset, samples=SAMPLES, calibrations={})
    context.workers.members.server.address = "here"
    context.results.gather.return_value = {0: "the actor"}
    host_server(context, job.rule, Snapshot(np.zeros(layout_of(job, dataset).size)), life=1)
    monkeypatch.setattr("daskcnn.sim.simulation.StepShares", simulated)
    Simulation(Workload.of_job(job, samples=SAMPLES, numbers=10), cluster(1.0, 1.0))
    told = "step_fixed" in context.dispatch.submit_actor.call_args.kwargs
    assert (told, simulated.called) == (settings.resizes_steps,) * 2


class OneMoves:
    """Moves a sample of each step, early in every round, from the worker that has the most."""

    def __init__(self, fixed: Any) -> None:
        self._step = 99

    def met(self, step: int, samples: dict[str, int], seconds: dict[str, float]) -> Change | None:
        begins, self._step = step < self._step, step
        if not begins or len(samples) < 2:
            return None
        least, *_, most = sorted(samples, key=samples.__getitem__)
        return Change(step + LAG, dict.fromkeys(samples, 0) | {most: -1, least: 1})


@pytest.mark.parametrize(
    ("strategy", "rule"),
    [("bsp", {}), ("bsp", {"batch": "worker"}), ("bsp", {"every": 2}), ("admm", {"every": 2, "rho": 0.1})],
)
def test_replicas_follow_minibatches_that_the_server_changes(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, strategy: str, rule: dict[str, Any]
) -> None:
    """Every presentation is made, and every push stands for the samples behind it."""
    monkeypatch.setattr(server_actor, "StepShares", OneMoves)
    _, run = trained(following(strategy, rule), dataset, 2)
    reports = [fact.report for fact, _ in run.heard if isinstance(fact, RoundDone)]
    assert any(report.sizes is not None and report.sizes.changed for report in reports)
    assert presented(run) == EPOCHS * SAMPLES
    assert sum(each.n_samples for each in run.requests if isinstance(each, Push)) == EPOCHS * SAMPLES


# --- every rule ---


@pytest.mark.parametrize("strategy", ["sgwu", "bsp"])
def test_one_worker_is_trained_in_rounds(dataset: Dataset, strategy: str) -> None:
    job = job_of(strategy)
    weights, _ = trained(job, dataset, 1)
    assert_same(weights, trained_in_rounds(job, dataset))


PLAIN = [name for name, rule in RULES.items() if not rule.chooses_workers]
"""Rules that go by no times: of a run that chooses its workers a round may be that of one alone, who sends nothing."""


@pytest.mark.parametrize(
    ("strategy", "partition"), [*((name, "idpa") for name in PLAIN), ("sgwu", "udpa"), ("agwu", "udpa")]
)
def test_every_sample_is_presented_and_all_travels_in_half_precision(
    dataset: Dataset, strategy: str, partition: str
) -> None:
    """Each push and each reply with weights is 2 bytes a number; the center stays in float32."""
    rule = SEVERAL_MEETINGS.get(strategy, {})
    job = job_of(strategy, rule=rule, train={"partition": partition}, cluster={"wire": "float16"})
    weights, run = trained(job, dataset, 3)
    assert presented(run) == EPOCHS * SAMPLES
    assert sum(run.of(SamplesAllocated)[-1].sizes.values()) == SAMPLES
    assert weights.dtype == np.float32
    answers = {"center": pushes(run), "difference": pushes(run) + len(run.of(EpochEnded)), "nothing": pulls(run)}
    assert moved(run) == (2 * weights.size * pushes(run), 2 * weights.size * answers[RULES[strategy].answers])


@pytest.mark.parametrize(
    ("strategy", "rule", "workers"),
    [("bsp", {"every": 2}, 2), ("bsp", {}, 1), ("sgwu", {"every": 2}, 2)],
    ids=["bsp", "alone", "sgwu"],
)
def test_small_steps_arrive_in_half_precision(
    dataset: Dataset, strategy: str, rule: dict[str, Any], workers: int
) -> None:
    """Between two meetings a weight gains less than half a unit of it: weights that were pushed did not move."""
    job = job_of(strategy, rule=rule, train={"lr": 1e-5, "reproducible": True}, cluster={"wire": "float16"})
    before = Replica(job, dataset, Device(), clock=lambda: 0.0).host_weights()
    half, whole = (
        trained(each, dataset, workers)[0]
        for each in (job, job.model_copy(update={"cluster": job.cluster.model_copy(update={"wire": "float32"})}))
    )
    assert half.dtype == np.float32
    assert np.linalg.norm(half - whole) < 0.05 * np.linalg.norm(whole - before)


def pulls(run: RunHere) -> int:
    """Answers that bring the center, without those to a worker that joins."""
    return sum(isinstance(request, Pull) for request in run.requests)


@pytest.mark.parametrize("wire", ["float32", "float16"])
@pytest.mark.parametrize("strategy", PLAIN)
def test_recorded_requests_through_the_bare_server_give_the_same_weights(
    dataset: Dataset, strategy: str, wire: str
) -> None:
    job = job_of(strategy, rule=SEVERAL_MEETINGS.get(strategy, {}), cluster={"wire": wire})
    weights, run = trained(job, dataset, 3)
    assert job.rule is not None
    begin = Replica(job, dataset, Device(), clock=lambda: 0.0).host_weights()
    server = ParameterServer(job.rule, begin, life=1, wire=wire)
    for request in run.requests:
        if isinstance(request, Push):
            request = replace(request, payload=cast(request.payload, np.dtype("float32")))
        server.handle(request)
    server.validate()
    assert_same(server.snapshot().center, weights)
    assert server.snapshot().merged == pushes(run)
    assert sum(isinstance(request, Join) for request in run.requests) == 3


@pytest.mark.parametrize("strategy", [*RULES, "asa"])
def test_recorded_facts_give_the_same_orders_and_events(dataset: Dataset, strategy: str) -> None:
    """Through the bare coordinator, and as the agenda of a simulation."""
    rule = {"exchange": "asa"} if strategy == "asa" else SEVERAL_MEETINGS.get(strategy, {})
    job = job_of("bsp" if strategy == "asa" else strategy, rule=rule, run={"checkpoint_every": 0.4})
    _, run = trained(job, dataset, 3)
    guess = guessing_on(job, dataset)
    assert_replayed(Coordinator(Settings.of(job, SAMPLES, guess)), run.heard)
    assert_played(job, SAMPLES, run.heard, run.events, guess)


# --- from peer to peer ---


@pytest.mark.parametrize("rule", [{"combine": "average"}, {"combine": "sum", "every": 3}], ids=["average", "sum"])
def test_asa_makes_the_very_weights_that_the_server_would(dataset: Dataset, rule: dict[str, Any]) -> None:
    """Each worker moves 2 (k-1)/k of the vector at each meeting."""
    through, _ = trained(job_of(rule=rule), dataset, 3)
    weights, run = trained(job_of(rule=rule | {"exchange": "asa"}), dataset, 3)
    assert_same(weights, through)
    rounds = run.of(RoundEnded)
    meetings = pushes(run) // 3
    assert len({(event.round, event.pushes) for event in rounds}) == len({event.round for event in rounds})
    assert moved(run) == (2 * 2 * weights.size * 4 * meetings,) * 2
    one = rounds[0]
    assert one.bytes_up == pytest.approx(2 * (2 / 3) * weights.size * 4 * (one.pushes or 0), rel=1e-2)
    assert {(event.version or 0) - (event.base_version or 0) for event in rounds} == {1}


def test_asa16_halves_the_bytes_and_follows_asa(dataset: Dataset) -> None:
    (whole, run), (half, run16) = (trained(job_of(rule={"exchange": name}), dataset, 2) for name in ("asa", "asa16"))
    assert [2 * n for n in moved(run16)] == [*moved(run)]
    assert half.dtype == np.float32
    assert not np.array_equal(half, whole)
    # increments lose a part in 2,000; the training between meetings carries that on
    assert np.abs(half - whole).max() < 0.02


def test_one_worker_exchanges_nothing(dataset: Dataset) -> None:
    weights, run = trained(job_of(rule={"exchange": "asa"}), dataset, 1)
    assert moved(run) == (0, 0)
    assert_same(weights, trained_in_rounds(job_of(), dataset))


def test_chain_of_meetings_is_cut_without_a_trace(dataset: Dataset) -> None:
    whole, _ = trained(job_of(rule={"exchange": "asa"}), dataset, 2)
    cut, _ = trained(job_of(rule={"exchange": "asa"}, cluster={"chain": 3}), dataset, 2)
    assert_same(cut, whole)


# --- groups ---


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"model": {"layers": NORMALISED}},
        {"train": {"sub_batches": 3}},
        {"train": {"first_conv": "samples"}},
    ],
    ids=["plain", "normalised", "sub-batches", "samples"],
)
def test_one_group_is_trained_in_rounds(dataset: Dataset, more: dict[str, Any]) -> None:
    """Its chain of tasks is cut within a round as well."""
    job = job_of("sgwu", model=more.get("model", {}) | WHOLE, cluster={"chain": 3})
    weights, run = trained(grouped(job, **more.get("train", {})), dataset, 2)
    (shards,) = run.of(KernelsSharded)
    assert len(shards.kernels) == 2
    assert all(min(own.values()) > 0 for own in shards.kernels.values())
    assert shards.divided["cpu-0"]["conv1"] == more.get("train", {}).get("first_conv", "kernels")
    np.testing.assert_allclose(weights, trained_in_rounds(job, dataset, rounded=True), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("strategy", "rule"),
    [
        ("sgwu", {}),
        ("sgwu", {"accuracy_on": "train"}),
        ("bsp", {"combine": "average"}),
        ("bsp", {"every": 3, "combine": "sum"}),
        ("admm", {"rho": 0.0, "every": 2, "from_center": True}),
        ("parallel-sgd", {"rounds": 2}),
        ("local-sgd", {"every": 2}),
    ],
)
def test_two_groups_end_where_two_workers_do(dataset: Dataset, strategy: str, rule: dict[str, Any]) -> None:
    job = job_of(strategy, rule=rule, model=WHOLE, train={"lr": 0.005}, cluster={"overlap": False})  # groups wait
    expected, alone = trained(job, dataset, 2)
    weights, together = trained(grouped(job), dataset, 4)
    np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-12)
    for name in ("lr", "samples", "pushes", "version", "bytes_up", "bytes_down"):
        assert sorted(getattr(e, name) for e in together.of(RoundEnded)) == sorted(
            getattr(e, name) for e in alone.of(RoundEnded)
        )
    assert validations(together) == [pytest.approx(each, rel=1e-6) for each in validations(alone)]


def validations(run: RunHere) -> list[dict[str, Any]]:
    """How the center was judged, epoch by epoch."""
    return [
        event.validation.model_dump(exclude={"metrics"}, exclude_none=True)
        for event in run.of(EpochEnded)
        if event.validation
    ]


@pytest.mark.parametrize(
    ("strategy", "rule"),
    [("agwu", {"max_staleness": 1}), ("easgd", {"tau": 3}), ("downpour", {"n_push": 2, "n_fetch": 3})],
)
def test_groups_present_every_sample(dataset: Dataset, strategy: str, rule: dict[str, Any]) -> None:
    _, run = trained(grouped(job_of(strategy, rule=rule)), dataset, 4)
    rounds = run.of(RoundEnded)
    assert presented(run) == EPOCHS * SAMPLES
    assert {event.worker for event in rounds} == {"group-0", "group-1"}
    members = {member.name: member for event in rounds for member in event.members}
    assert members.keys() == {"cpu-0", "cpu-1", "cpu-2", "cpu-3"}
    assert all(member.busy > 0 and member.bytes_up > 0 for member in members.values())


@pytest.mark.parametrize(
    ("strategy", "rule", "train"),
    [
        ("sgwu", {}, {}),
        ("sgwu", {}, {"replica_size": 2, "kernel_shares": "speeds"}),
        ("sgwu", {}, {"ema": 0.9}),
        ("agwu", {}, {}),
        ("bsp", {}, {}),
        ("bsp", {"exchange": "asa"}, {}),
    ],
)
def test_runs_are_judged_on_parts_and_at_their_end_on_all(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, strategy: str, rule: dict[str, Any], train: dict[str, Any]
) -> None:
    monkeypatch.setattr(judging, "FEWEST", 4)
    monkeypatch.setattr(judging, "TARGET", 1e-9)
    _, run = trained(job_of(strategy, rule=rule, train={"epochs": 3, **train}), dataset, 4)
    looks = [event.validation for event in run.of(EpochEnded) if event.validation]
    assert {look.samples for look in looks[:-1]} == {4}
    assert all(look.error for look in looks[:-1])
    assert {event.q_samples for event in run.of(RoundEnded)} == {4 if strategy in ("sgwu", "agwu") else 0}
    assert {state.validation.samples for state in run.saved if state.validation} == {30}
    assert run.saved[-1].validation is not None, "the last center is judged on all"


def test_a_reproducible_run_is_resumed_with_the_same_parts(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "FEWEST", 4)
    job = job_of("sgwu", train={"epochs": 4, "reproducible": True}, model=WHOLE)
    undisturbed, run = trained(job, dataset, 2)
    assert {event.q_samples for event in run.of(RoundEnded)} != {30}
    before = next(state for state in run.saved if state.epoch == 2)
    assert_same(RunHere(job, dataset, 2).train(before), undisturbed)


def disturbed(job: Job, dataset: Dataset, workers: int, *told: Callable[[float], Fact], after: int = 1) -> RunHere:
    """A run of groups that is told facts once that many steps of a group have ended; it makes every presentation."""
    steps = count(1)

    def hears(fact: Fact, _: Any) -> None:
        if isinstance(fact, Progress) and next(steps) == after:
            for each in told:
                run.shell.tell(each(fact.at))

    run = RunHere(job, dataset, workers, heard=hears)
    run.train()
    assert presented(run) == job.train.epochs * SAMPLES
    assert not run.of(WorkerLost)
    assert_replayed(Coordinator(Settings.of(job, SAMPLES, guessing_on(job, dataset))), run.heard)
    return run


def leaves(worker: str) -> Callable[[float], Fact]:
    return lambda at: WorkerLeaving((worker,), "it is shut down", at)


def the_server_leaves(at: float) -> Fact:
    return ServerLeaving(1, "it is shut down", at)


def early(run: RunHere) -> list[RoundReport]:
    """The reports of rounds that ended early."""
    return [fact.report for fact, _ in run.heard if isinstance(fact, RoundDone) and fact.report.cut is not None]


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_group_of_which_a_worker_leaves_pushes_what_it_has_and_goes_on_with_its_state(
    dataset: Dataset, leaver: int, optimizer: str
) -> None:
    """A worker by itself has the same weights, and the same state of the optimizer, after as many steps."""
    job = grouped(job_of("sgwu", model=WHOLE, train={"optimizer": optimizer}))
    run = disturbed(job, dataset, 2, leaves(f"cpu-{leaver}"), after=3)
    (cut,) = early(run)
    assert cut.cut is not None
    assert 30 <= cut.cut < SAMPLES
    assert [(each.worker, each.samples_done) for each in run.of(WorkerLeft)] == [(f"cpu-{leaver}", cut.cut)]
    assert [[*group.members] for formed in run.of(GroupsFormed) for group in formed.groups] == [
        ["cpu-0", "cpu-1"],
        [f"cpu-{1 - leaver}"],
    ]
    alone = Replica(job, dataset, Device(), clock=lambda: 0.0)
    local = Local(alone.weights, alone.weights)
    alone.adopt(alone.host_weights().astype(np.float32))
    assert job.rule is not None
    for trained_so_far in steps_of_round(alone, job.rule, cut.round, local):
        if trained_so_far.score.samples == cut.cut:
            break
    push = next(request for request in run.requests if isinstance(request, Push))
    np.testing.assert_allclose(push.payload, alone.host_weights(), rtol=1e-6, atol=1e-7)
    assert cut.optimizer is not None
    np.testing.assert_allclose(cut.optimizer.vectors, alone.host_optimizer().vectors, rtol=1e-9, atol=1e-12)
    assert push.n_samples == cut.cut
    whole = next(request for request in run.requests if isinstance(request, Push) and request.worker == cut.worker)
    assert Leave(cut.worker, 1, last=whole.seq) in run.requests


@pytest.mark.parametrize("leavers", [("cpu-1",), ("cpu-0", "cpu-2"), ("cpu-3", "the server")], ids=len)
@pytest.mark.parametrize(
    ("strategy", "rule"),
    [
        ("bsp", {"combine": "average"}),
        ("bsp", {"every": 3, "combine": "sum"}),
        ("sgwu", {}),
        ("agwu", {"max_staleness": 1}),
        ("easgd", {"tau": 3}),
        ("downpour", {"n_push": 2, "n_fetch": 3}),
    ],
)
def test_no_presentation_is_lost_where_a_worker_of_a_group_leaves(
    dataset: Dataset, strategy: str, rule: dict[str, Any], leavers: tuple[str, ...]
) -> None:
    """Nor where a worker of each leaves, or the server as well: then all groups end their rounds."""
    told = [the_server_leaves if leaver == "the server" else leaves(leaver) for leaver in leavers]
    job = grouped(job_of(strategy, rule=rule, train={"batch_size": 5}))
    run = disturbed(job, dataset, 4, *told, after=3)
    workers = {each.worker for each in run.of(WorkerLeft) if each.worker in run.names}
    assert workers == {*leavers} - {"the server"}
    assert early(run)
    assert run.of(ServerCounted)[-1].refused == {}
    assert {each.server for each in run.of(ServerCounted)} == ({1, 2} if "the server" in leavers else {1})


def test_who_is_in_no_group_is_named(dataset: Dataset) -> None:
    _, run = trained(grouped(job_of("sgwu")), dataset, 3)
    (formed,) = run.of(GroupsFormed)
    (left_out,) = formed.left_out
    assert sorted([*formed.groups[0].members, left_out]) == ["cpu-0", "cpu-1", "cpu-2"]
    assert any(event.text.startswith(f"{left_out}: left out, the slowest") for event in run.of(Warned))
    assert presented(run) == EPOCHS * SAMPLES


# --- ends ---

COURSES = {
    "worker": (job_of("sgwu", model=WHOLE), 1),
    "workers": (job_of("sgwu", model=WHOLE), 2),
    "peers": (job_of(rule={"exchange": "asa"}), 2),
    "group": (grouped(job_of("sgwu", model=WHOLE)), 2),
    "groups": (grouped(job_of("bsp", model=WHOLE)), 4),
    "adamw": (job_of("sgwu", train={"optimizer": "adamw"}), 2),
    "adamw, peers": (job_of(train={"optimizer": "adamw"}, rule={"exchange": "asa"}), 2),
    "adamw, group": (grouped(job_of("sgwu", model=WHOLE, train={"optimizer": "adamw", "rates": {"conv1": 0.5}})), 2),
    "lars": (job_of("sgwu", train={"optimizer": "lars", "clip": 1.0, "decay_all": False}), 2),
    "lookahead": (job_of("sgwu", train={"optimizer": "adamw", "lookahead": {"steps": 3}}), 2),
    "average": (job_of("bsp", train={"ema": 0.9}), 2),
    "average, adagrad": (job_of("downpour", rule={"server": "adagrad"}, train={"ema": 0.9}), 1),
    "average, groups": (grouped(job_of("sgwu", model=WHOLE, train={"ema": 0.5})), 4),
}
every_course = pytest.mark.parametrize(("job", "workers"), [*COURSES.values()], ids=[*COURSES])
EVERY_TIME = ("workers", "adamw, peers", "adamw, group", "average, adagrad", "average, groups")
"""Courses that have every way of exchange and every kind of state between them."""


@every_course
def test_resumed_run_ends_as_the_undisturbed_one(dataset: Dataset, job: Job, workers: int) -> None:
    """Everything comes back; the optimizer's state goes from a group's shards into the state and back."""
    undisturbed, _ = trained(job, dataset, workers)
    first = RunHere(job, dataset, workers, interrupted_after=1)
    with pytest.raises(Interrupted):
        first.train()
    again = RunHere(job, dataset, workers)
    assert 0 < first.saved[0].epoch < EPOCHS
    assert_same(again.train(first.saved[0]), undisturbed)
    assert presented(again) == (EPOCHS - 1) * SAMPLES


@pytest.mark.parametrize(
    ("job", "workers"),
    [
        pytest.param(*course, id=name, marks=() if name in EVERY_TIME else pytest.mark.slow)
        for name, course in COURSES.items()
    ],
)
def test_a_longer_run_ends_as_one_that_was_planned_so(dataset: Dataset, job: Job, workers: int) -> None:
    """With a constant rate the schedule does not tell how long the run was to be."""
    constant = job.train.model_copy(update={"schedule": Schedule(name="constant")})
    planned = job.model_copy(update={"train": constant})
    expected, _ = trained(planned, dataset, workers)
    short = RunHere(with_epochs(planned, EPOCHS - 1), dataset, workers)
    short.train()
    longer = RunHere(planned, dataset, workers)
    assert_same(longer.train(short.saved[-1]), expected)
    assert presented(longer) == SAMPLES


def with_epochs(job: Job, epochs: int) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update={"epochs": epochs})})


@pytest.mark.parametrize("strategy", ["sgwu", "agwu", "easgd", "asa"])
def test_interrupted_run_goes_on_from_the_state_that_it_saves(dataset: Dataset, strategy: str) -> None:
    job = job_of(rule={"exchange": "asa"}) if strategy == "asa" else job_of(strategy)
    first = RunHere(job, dataset, 2, interrupted_after=1)
    with pytest.raises(Interrupted):
        first.train()
    again = RunHere(job, dataset, 2)
    again.train(first.saved[-1])
    assert again.saved[-1].epoch == EPOCHS
    assert presented(again) < EPOCHS * SAMPLES


def steps_of_all(epochs: int) -> Job:
    """A job whose every step takes all samples, with one worker or with several."""
    return job_of(train={"optimizer": "adamw", "batch_size": SAMPLES, "epochs": epochs})


def assert_as_one_machine(run: RunHere, dataset: Dataset) -> None:
    """A run that makes steps of all samples ends as one worker does, weights and optimizer."""
    alone = RunHere(run.job, dataset, 1)
    weights, kept, expected = alone.train(), run.saved[-1], alone.saved[-1]
    assert not kept.optimizers
    assert expected.rule_state[f"{OWN}steps"] == run.job.train.epochs
    for name in expected.rule_state.keys() - {NOISE}:
        np.testing.assert_allclose(kept.rule_state[name], expected.rule_state[name], rtol=1e-2, atol=1e-6)
    np.testing.assert_allclose(kept.weights, weights, rtol=1e-3, atol=1e-4)


def test_the_optimizer_s_state_goes_to_a_worker_that_is_alone_and_back(dataset: Dataset) -> None:
    """One of two workers leaves, and comes back."""
    reports = count(1)

    def hears(fact: Fact, _: Any) -> None:
        if isinstance(fact, RoundDone):
            number = next(reports)
            if number == 3:
                run.shell.tell(WorkerLeaving(("cpu-1",), "it is shut down", fact.at))
            if number == 6:
                run.shell.tell(WorkerReady("cpu-1", "cpu", fact.at))

    run = RunHere(steps_of_all(8), dataset, 2, heard=hears)
    run.train()
    rounds = [event.worker for event in run.of(RoundEnded)]
    assert rounds[4:6] == ["cpu-0", "cpu-0"]
    assert rounds.count("cpu-1") >= 3
    assert_as_one_machine(run, dataset)


@pytest.mark.parametrize("workers", [(2, 1), (1, 2)])
def test_the_optimizer_s_state_comes_back_on_another_number_of_workers(
    dataset: Dataset, workers: tuple[int, int]
) -> None:
    job, (before, after) = steps_of_all(4), workers
    first, again = RunHere(job, dataset, before, interrupted_after=1), RunHere(job, dataset, after)
    with pytest.raises(Interrupted):
        first.train()
    again.train(first.saved[0])
    assert_as_one_machine(again, dataset)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_optimizer_s_states_of_replicas_go_to_the_server(dataset: Dataset, workers: int) -> None:
    """A run of version 0.1.0 has kept them."""
    job = steps_of_all(4)
    first, again = RunHere(job, dataset, 2, interrupted_after=1), RunHere(job, dataset, workers)
    with pytest.raises(Interrupted):
        first.train()
    saved, steps = first.saved[0], center_descent_of(job, layout_of(job, dataset))
    assert steps is not None
    own = steps.state_of(saved.rule_state, saved.weights.dtype)
    again.train(replace(saved, optimizers={"cpu-0": own, "cpu-1": own}, rule_state={}))
    assert_as_one_machine(again, dataset)


def in_int8(job: Job) -> Job:
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"wire": "int8"})})


@pytest.mark.parametrize("strategy", ["bsp", "local-sgd", "groups"])
def test_a_run_in_int8_goes_as_the_plain_one_and_what_its_pushes_have_lost_comes_back(
    dataset: Dataset, strategy: str
) -> None:
    name, workers = ("bsp", 4) if strategy == "groups" else (strategy, 2)
    plain = job_of(name, rule=SEVERAL_MEETINGS[name], model=WHOLE)
    plain = grouped(plain) if strategy == "groups" else plain
    job, (expected, whole) = in_int8(plain), trained(plain, dataset, workers)
    undisturbed, run = trained(job, dataset, workers)
    assert moved(run) == moved_in_int8(whole, expected, down="int8")
    first = RunHere(job, dataset, workers, interrupted_after=1)
    with pytest.raises(Interrupted):
        first.train()
    (state, *_) = first.saved
    assert state.rests.keys() == {event.worker for event in whole.of(RoundEnded)}
    resumed, gain = RunHere(job, dataset, workers).train(state), np.abs(expected - state.weights).max()
    assert 0 < np.abs(undisturbed - expected).max() < 0.1 * gain
    assert np.abs(resumed - undisturbed).max() < 0.1 * gain, "the server's own feedback begins anew"


@pytest.mark.parametrize("strategy", ["bsp", "local-sgd"])
def test_a_new_server_goes_on_in_int8_with_what_pushes_have_lost(
    dataset: Dataset, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas go on with what they have lost up to the state that was saved last."""
    kept, begin = list[np.ndarray | None](), Feedback.begin

    def noted(feedback: Feedback, local: Local, rest: np.ndarray | None) -> None:
        kept.append(rest)
        begin(feedback, local, rest)

    job = in_int8(job_of(strategy, rule=SEVERAL_MEETINGS[strategy], model=WHOLE))
    undisturbed, _ = trained(job, dataset, 2)
    monkeypatch.setattr(Feedback, "begin", noted)
    run = RunHere(job, dataset, 2, server_lost_after=1)
    weights, (first, *_, last) = run.train(), run.saved
    assert {event.server for event in run.of(ServerCounted)} == {1, 2}
    assert last.epoch == EPOCHS
    assert first.rests.keys() == last.rests.keys() == {"cpu-0", "cpu-1"}
    assert kept[:2] == [None, None]
    assert {rest.tobytes() for rest in kept[2:] if rest is not None} == {
        rest.tobytes() for rest in first.rests.values()
    }
    assert np.abs(weights - undisturbed).max() < 0.1 * np.abs(undisturbed - first.weights).max()


def test_a_worker_that_is_lost_as_a_server_is_to_start_keeps_none_from_it(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker that hangs while it is sent what the server begins with."""
    lost = [WorkersLost(["cpu-1"])]

    def hosted(*args: Any, **options: Any) -> Hosted:
        if lost:
            raise lost.pop()
        return host_server(*args, **options)

    monkeypatch.setattr(exchange, "host_server", hosted)
    _, run = trained(job_of("bsp", model=WHOLE), dataset, 2)
    assert [event.worker for event in run.of(WorkerLost)] == ["cpu-1"]
    assert {event.worker for event in run.of(RoundEnded)} == {"cpu-0"}


@pytest.mark.parametrize("strategy", ["agwu", "downpour"])
def test_without_a_barrier_the_center_comes_in_float16(dataset: Dataset, strategy: str) -> None:
    plain = job_of(strategy, rule=SEVERAL_MEETINGS.get(strategy, {}), model=WHOLE)
    (weights, whole), (_, run) = trained(plain, dataset, 2), trained(in_int8(plain), dataset, 2)
    assert moved(run) == moved_in_int8(whole, weights, down="float16")
    assert run.saved[-1].rests.keys() == {"cpu-0", "cpu-1"}


def moved_in_int8(plain: RunHere, weights: np.ndarray, *, down: str) -> tuple[int, int]:
    """Bytes up and down of what moves in float32 in the plain run."""
    times = [nbytes // bytes_of("float32", weights.size) for nbytes in moved(plain)]
    return times[0] * bytes_of("int8", weights.size), times[1] * bytes_of(down, weights.size)


def test_what_a_rule_keeps_on_the_server_comes_back(dataset: Dataset) -> None:
    """Adagrad's sums of squares grow on from the state's."""
    job = job_of("downpour", rule={"server": "adagrad"})
    job = job.model_copy(update={"train": job.train.model_copy(update={"epochs": 2 * EPOCHS})})
    first = RunHere(job, dataset, 2, interrupted_after=1)
    with pytest.raises(Interrupted):
        first.train()
    before = np.array(first.saved[-1].rule_state["squares"])
    again = RunHere(job, dataset, 2)
    again.train(first.saved[-1])
    after = np.array(again.saved[-1].rule_state["squares"])
    assert before.any()
    assert (after >= before).all()
    assert (after > before).any()


def test_the_noise_of_gradients_is_logged_and_comes_back(dataset: Dataset) -> None:
    """From a checkpoint too."""
    job = job_of("bsp", train={"epochs": 6, "batch_size": 50, "lr": 1e-6, "optimizer": "adamw"})
    whole = RunHere(job, dataset, 2)
    whole.train()
    first = RunHere(job, dataset, 2, interrupted_after=4)
    with pytest.raises(Interrupted):
        first.train()
    layout, vectors = Replica(job, dataset, Device(), clock=lambda: 0.0).layout, optimizer_of(job).vectors
    kept = to_checkpoint(first.saved[-1], layout, dataset, 1.0, vectors)
    again = RunHere(job, dataset, 2)
    again.train(to_state(kept, job))
    looks, after = (
        np.array([(event.noise_scale, event.noise_error) for event in run.of(EpochEnded)], float)
        for run in (whole, again)
    )
    assert (looks[2:, 0] > looks[2:, 1]).all()
    np.testing.assert_allclose(after, looks[-len(after) :], rtol=1e-3)
    damaged = {f"rule:{NOISE}": kept.arrays[f"rule:{NOISE}"][:-1]}
    with pytest.raises(DataError, match=NOISE):
        to_state(replace(kept, arrays={**kept.arrays, **damaged}), job)


@pytest.mark.parametrize("strategy", ["sgwu", "agwu"])
def test_rules_that_merge_no_gradients_log_no_noise(dataset: Dataset, strategy: str) -> None:
    _, run = trained(job_of(strategy), dataset, 2)
    assert not any("noise_scale" in event.record() for event in run.of(EpochEnded))


@pytest.mark.parametrize("course", ["sgwu", "asa", "asa16", "groups"])
def test_divergence_ends_the_run_and_only_finite_states_are_saved(dataset: Dataset, course: str) -> None:
    rule = {"exchange": course} if course.startswith("asa") else {}
    job = job_of("bsp" if rule else "sgwu", rule=rule, train={"lr": 1e6, "schedule": "constant"})
    run = RunHere(grouped(job) if course == "groups" else job, dataset, 4 if course == "groups" else 2)
    with pytest.raises(Diverged, match=r"lower train\.lr"):
        run.train()
    for state in run.saved:
        assert np.isfinite(state.weights).all()
        assert all(np.isfinite(own.vectors).all() for own in state.optimizers.values())


def test_no_outer_momentum_drives_a_running_variance_below_zero(dataset: Dataset) -> None:
    """Running variances fall from 1 towards those of the data: momentum would carry them past these."""
    layers: list[dict[str, Any]] = [
        {"layer": "averagepool", "size": 4},
        {"layer": "batchnorm"},
        {"layer": "dense", "units": 10},
    ]
    rule = {"every": 1, "outer_momentum": 0.95}
    job = job_of("local-sgd", rule=rule, model={"layers": layers}, train={"lr": 1e-3})
    (place,) = layout_of(job, dataset).besides
    mean, variance = np.split(trained(job, dataset, 2)[0][place], 2)
    assert np.abs(mean).min() > 0
    assert 0 < variance.min() < variance.max() < 0.5


@pytest.mark.parametrize(
    ("strategy", "rule"),
    [
        ("bsp", {"combine": "sum", "every": 0}),
        ("agwu", {}),
        pytest.param("bsp", {"combine": "sum", "every": 0, "exchange": "asa"}, marks=pytest.mark.slow),
        pytest.param("downpour", {"n_push": 12, "n_fetch": 12}, marks=pytest.mark.slow),
        pytest.param("downpour", {"server": "adagrad"}, marks=pytest.mark.slow),
        pytest.param("dc-asgd", {"every": 0}, marks=pytest.mark.slow),
    ],
)
def test_running_statistics_of_several_workers_are_those_of_the_images(
    dataset: Dataset, strategy: str, rule: dict[str, Any]
) -> None:
    """They were added up, and a variance of 0.06 grew to thousands, or fell below 0."""
    layers = [{"layer": "averagepool", "size": 4}, {"layer": "batchnorm"}, {"layer": "dense", "units": 10}]
    train = {"lr": 1e-3, "epochs": 12, "batch_size": 2}
    job = job_of(strategy, rule=rule, model={"layers": layers}, train=train)
    (place,) = layout_of(job, dataset).besides
    mean, variance = np.split(RunHere(job, dataset, 4).train()[place], 2)
    np.testing.assert_allclose(mean, 0.0, atol=0.1)
    assert 0.03 < variance.min() < variance.max() < 0.1


@pytest.mark.parametrize("strategy", ["bsp", "agwu"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("1,073,741,824 bytes"), "out of memory while it trained; if that happens again, lower"),
        (ConnectionError("the server's worker is gone"), "it does not reach the parameter server at ps; is"),
        (OSError(5, "Input/output error"), "its round ended with OSError: [Errno 5] Input/output error"),
    ],
)
def test_a_worker_whose_round_fails_is_left_out_and_the_others_go_on(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, strategy: str, error: Exception, words: str
) -> None:
    """The run ended as if it were a fault of ours, though the others were well."""
    step, made = Replica.step, count()

    def failing(self: Replica, *args: Any, **options: Any) -> Any:
        if threading.current_thread().name.startswith("worker-cpu-1") and next(made) > 0:
            raise error
        return step(self, *args, **options)

    monkeypatch.setattr(Replica, "step", failing)
    monkeypatch.setattr(run_workers, "EXPLAINED", 0.1)
    run = RunHere(job_of(strategy), dataset, 3)
    run.train()
    (lost,) = run.of(WorkerLost)
    assert lost.worker == "cpu-1"
    assert lost.reason.startswith(words)
    assert sum(event.samples for event in run.of(RoundEnded)) >= EPOCHS * SAMPLES


class OwnBSP(BSP):
    """A rule of a user's that merges gradients."""


def test_a_users_rule_that_merges_gradients_trains_as_ours(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer of its server did not arrive there."""
    monkeypatch.setitem(RULES, "own-bsp", OwnBSP)
    assert_same(trained(job_of("own-bsp"), dataset, 2)[0], trained(job_of("bsp"), dataset, 2)[0])


class Spiteful(BSP):
    """A rule of a user's, with a mistake in it."""

    def merge(self, *args: Any) -> Merge:
        raise KeyError("velocity")


def test_an_error_of_a_users_rule_ends_the_run_in_words(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall was blamed, workers were left out, and the run ended with a traceback."""
    monkeypatch.setitem(RULES, "spiteful", Spiteful)
    run = RunHere(job_of("spiteful"), dataset, 2)
    words = r"rule Spiteful: it raised .* at the push of cpu-.: KeyError: 'velocity' \(test_runs_here.py, line "
    with pytest.raises(UserError, match=words) as told:
        run.train()
    assert told.value.exit_code == 2
    assert run.of(WorkerLost) == []


def test_a_server_without_memory_ends_the_run_in_words(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CenterRange, "proposed", Mock(side_effect=MemoryError("Unable to allocate 1.2 GiB")))
    run = RunHere(job_of("bsp"), dataset, 2)
    words = r"parameter server at ps: out of memory at the push of cpu-.: Unable to allocate 1.2 GiB; resume it"
    with pytest.raises(Lost, match=words):
        run.train()
    assert run.of(WorkerLost) == []


def test_a_server_that_is_gone_from_a_worker_that_answers_costs_no_worker_its_place(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall was blamed, though the way was free."""
    step, made = Replica.step, count()

    def failing(self: Replica, *args: Any, **options: Any) -> Any:
        if threading.current_thread().name.startswith("worker-cpu-1") and next(made) == 1:
            raise Refused("the parameter server is not here")
        return step(self, *args, **options)

    monkeypatch.setattr(Replica, "step", failing)
    monkeypatch.setattr(run_workers, "EXPLAINED", 0.2)  # no scheduler is there to say that the worker were gone
    run = RunHere(job_of("bsp"), dataset, 3)
    run.train()
    assert run.of(WorkerLost) == []
    assert any("a new server starts" in str(event.message) for event in run.of(Warned))
