"""What a run survives: workers and the server's host are killed at chosen moments."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from daskcnn.cluster.layers.measurements import settings_of
from daskcnn.errors import Interrupted, Lost
from daskcnn.job.resolve import resolve
from daskcnn.launch.resume import job_to_run
from daskcnn.launch.training import train_job
from daskcnn.runs.checkpoint import Checkpoint, load
from daskcnn.store import open_dataset
from daskcnn.training.coordinator import departures
from daskcnn.training.coordinator.evaluations import guessing_on
from daskcnn.training.coordinator.facts import RoundDone, StepDone, Tick, WorkerGone
from daskcnn.training.coordinator.layer import LayerCoordinator
from daskcnn.training.coordinator.orders import EndRound, Judge, StartRound
from daskcnn.training.coordinator.replicas import Coordinator
from daskcnn.training.coordinator.settings import Settings
from tests.cluster.cluster_jobs import (
    Listener,
    Watch,
    addresses_of,
    allocations_after,
    assert_checkpoints_stay_finite,
    in_mid_round,
    kill_worker,
    run,
    set_throttle,
    small_job,
    wait_for_all,
)
from tests.cluster.references import reference
from tests.replays import assert_played, assert_replayed

pytestmark = pytest.mark.cluster
TWO: dict[str, Any] = {"workers": {"cpu": 2}}


def presented(watch: Watch) -> int:
    return sum(event["samples"] for event in watch.of("round"))


def interrupt(first: Callable[[], None]) -> None:
    """Do this, and send this process the signal that ends a run."""
    first()
    os.kill(os.getpid(), signal.SIGTERM)


class Told:
    """Hears the facts of a run and the orders that they led to."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, list[Any]]] = []

    def __call__(self, fact: Any, found: list[Any]) -> None:
        self.heard.append((fact, found))


@pytest.mark.parametrize("strategy", ["sgwu", pytest.param("agwu", marks=pytest.mark.slow)])
def test_lost_worker_leaves_its_samples_and_one_that_comes_takes_its_share(
    three_workers: Client, synthetic: str, runs: str, strategy: str
) -> None:
    """The nanny brings a killed worker back under a new address; it has its name again. The run lasts until then.

    The recorded facts lead to the same orders and events without a cluster.
    """
    watch, told = Watch("round", kill_worker(three_workers, "cpu-1")), Told()
    watch.then("worker-lost", lambda: wait_for_all(three_workers, 4))
    job = small_job(synthetic, runs, train={"strategy": strategy, "epochs": 40})
    result = run(three_workers, job, watch, heard=told)
    (lost,), (joined,) = watch.of("worker-lost"), watch.of("worker-joined")
    assert lost["worker"] == joined["worker"] == "cpu-1"
    assert lost["samples_moved"] > 0
    assert joined["samples"] > 0
    sizes = allocations_after(watch, lost)
    alone = [each for each in sizes if "cpu-1" not in each]
    assert alone == sizes[: len(alone)]
    assert all(each.keys() == {"cpu-0", "cpu-2"} for each in alone)
    assert sizes[-1].keys() == {"cpu-0", "cpu-1", "cpu-2"}
    assert sum(sizes[-1].values()) == 800
    after = watch.events[watch.events.index(joined) :]
    assert {event["worker"] for event in after if event["event"] == "round"} == {"cpu-0", "cpu-1", "cpu-2"}
    assert presented(watch) == 40 * 800
    assert result.summary["status"] == "done"

    resolved = resolve(job)
    guess = guessing_on(resolved, open_dataset(synthetic))
    assert_replayed(Coordinator(Settings.of(resolved, 800, guess)), told.heard)
    assert_played(resolved, 800, told.heard, watch.typed, guess)


SLOW_UNTIL = """
import os, sys, time
def since(begun):
    # steps take a second until the test writes the file: it needs a round that is under way for as long as it looks
    time.sleep(0.0 if os.path.exists({file!r}) else 1.0)
    return time.perf_counter() - begun[0]
module = sys.modules.get("daskcnn.cluster.worker.session")
for session in module._sessions.values() if module else ():
    session.replica.watch.since = since
"""
"""On a worker: until this file is there the steps of its runs take a second more."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["bsp", "local-sgd", "sgwu"])
def test_behind_a_barrier_a_worker_that_comes_does_not_wait_for_the_end_of_the_round(
    three_workers: Client, synthetic: str, runs: str, strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others' rounds would take 40 s or more, a second a step."""
    monkeypatch.setattr(departures, "FAR", 0.2)
    there = tmp_path / "joined"
    slow = SLOW_UNTIL.format(file=str(there))
    heard = in_mid_round(three_workers, kill_worker(three_workers, "cpu-1"), slow=slow)
    train, watch = {"strategy": strategy, "partition": "udpa", "epochs": 4}, Watch("worker-joined", there.touch)
    job = small_job(synthetic, runs, train={**train, "batch_size": 10})
    assert run(three_workers, job, watch, heard=heard).summary["status"] == "done"
    (lost,), (joined,) = watch.of("worker-lost"), watch.of("worker-joined")
    asked = [order.replica for _, found in heard.heard for order in found if isinstance(order, EndRound)]
    assert sorted(asked) == ["cpu-0", "cpu-2"]
    cut = between(watch, lost, joined, "round")
    assert sorted(event["worker"] for event in cut) == ["cpu-0", "cpu-2"]
    assert 0 < sum(event["samples"] for event in cut) < 400
    assert presented(watch) == 4 * 800
    assert watch.of("server")[-1]["merged"] >= sum(event["pushes"] for event in watch.of("round"))
    resolved = resolve(job)
    guess = guessing_on(resolved, open_dataset(synthetic))
    assert_replayed(Coordinator(Settings.of(resolved, 800, guess)), heard.heard)


def between(watch: Watch, one: dict[str, Any], other: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    part = watch.events[watch.events.index(one) : watch.events.index(other)]
    return [event for event in part if event["event"] == kind]


@pytest.mark.slow
def test_a_run_with_fewer_workers_than_its_least_pauses_until_the_lost_one_is_back(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    watch = Watch("round", kill_worker(three_workers, "cpu-1"))
    job = small_job(synthetic, runs, train={"strategy": "sgwu", "epochs": 6}, cluster={"workers": {"cpu": "3..3"}})
    result = run(three_workers, job, watch)
    (lost,), (paused,), (joined,), (continued,) = map(watch.of, ("worker-lost", "paused", "worker-joined", "continued"))
    assert (lost["worker"], joined["worker"]) == ("cpu-1", "cpu-1")
    assert (paused["missing"], continued["workers"]) == ({"cpu": 1}, 3)
    assert presented(watch) == 6 * 800
    assert result.summary["status"] == "done"


def test_lost_peer_leaves_its_samples_and_the_round_begins_again(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    """Killed while it trains, or waits for others."""
    train = {"strategy": "bsp", "partition": "udpa", "batch_size": 64, "epochs": 3}
    job = small_job(synthetic, runs, train=train, rule={"exchange": "asa"})
    watch, heard = Watch(), in_mid_round(three_workers, kill_worker(three_workers, "cpu-1"))
    result = run(three_workers, job, watch, heard=heard)
    (lost,) = watch.of("worker-lost")
    assert (lost["worker"], lost["reason"]) == ("cpu-1", "connection lost")
    assert lost["samples_moved"] > 0
    assert any("begun again from version" in event["message"] for event in watch.of("warning"))
    assert {"cpu-0", "cpu-2"} <= {event["worker"] for event in watch.of("round")[-3:]}
    assert presented(watch) == 3 * 800
    assert (result.summary["status"], result.summary["epochs"]) == ("done", 3)
    losses = [event["loss"] for event in watch.of("epoch")]
    assert losses[-1] < losses[0]
    settings = Settings.of(resolve(job), 800, guessing_on(resolve(job), open_dataset(synthetic)))
    assert_replayed(Coordinator(settings), heard.heard)


@pytest.mark.slow
def test_layer_goes_back_to_the_snapshot_and_ends_with_the_same_weights(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    """A worker is killed, and back as one that comes: it takes kernels again."""
    often, train = {"checkpoint_every": 0.2, "report_every": 8}, {"strategy": "layer", "epochs": 8}
    job = small_job(synthetic, runs, train=train, model={"dtype": "float64"}, run=often)
    watch, told = Watch("steps", kill_worker(three_workers, "cpu-1")), Told()
    watch.then("worker-lost", lambda: wait_for_all(three_workers, 4))
    result = run(three_workers, job, watch, heard=told)
    assert [event["worker"] for event in watch.of("worker-lost")] == ["cpu-1"]
    assert any("back to the snapshot" in event["message"] for event in watch.of("warning"))
    assert len(watch.of("worker-joined")) == 1
    there = [len(event["kernels"]) for event in watch.of("shards")]  # kernels may move besides
    assert [count for count, _ in groupby(there)] == [3, 2, 3]
    np.testing.assert_allclose(result.model.vector, reference(job).weights, rtol=1e-9, atol=1e-12)

    resolved = resolve(job)
    dataset = open_dataset(synthetic, limit=resolved.data.limit)
    assert_replayed(LayerCoordinator(settings_of(resolved, dataset)), told.heard)


@pytest.mark.parametrize("strategy", ["agwu", pytest.param("sgwu", marks=pytest.mark.slow)])
def test_new_server_goes_on_when_its_host_is_killed(
    three_workers: Client, synthetic: str, runs: str, strategy: str
) -> None:
    job = small_job(synthetic, runs, train={"strategy": strategy, "epochs": 4}, cluster=TWO)
    watch = Watch("checkpoint", kill_worker(three_workers, "ps"))
    result = run(three_workers, job, watch)
    assert any("parameter server" in event["message"] for event in watch.of("warning"))
    assert result.summary["status"] == "done"
    assert result.summary["epochs"] == 4


@pytest.mark.slow
def test_stopped_workers_are_given_up_and_keep_no_signal_from_ending_the_run(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    """SIGSTOP: a worker is there for the scheduler, but reports nothing; it goes on when the run is over."""
    job = small_job(synthetic, runs, train={"epochs": 6}, cluster={"stall_timeout": 4.0}, run={"name": "it"})
    signals = {
        (name, signum): kill_worker(three_workers, name, signum)
        for name in ("cpu-1", "cpu-2")
        for signum in (signal.SIGSTOP, signal.SIGCONT)
    }
    watch = Watch("round", signals["cpu-1", signal.SIGSTOP])
    watch.then("worker-lost", lambda: None)
    watch.then("round", lambda: interrupt(signals["cpu-2", signal.SIGSTOP]))
    try:
        with pytest.raises(Interrupted, match="--resume") as caught:
            run(three_workers, job, watch, handle_signals=True)
    finally:
        for name in ("cpu-1", "cpu-2"):
            signals[name, signal.SIGCONT]()
    assert caught.value.exit_code == 143
    lost = {event["worker"]: event["reason"] for event in watch.of("worker-lost")}
    assert next(iter(lost)) == "cpu-1"  # on a busy machine the other one too, before the run has ended
    assert all("no report" in reason for reason in lost.values())

    again = Watch()
    result = run(three_workers, job, again, resume=Path(runs) / "it")
    assert len(again.of("resume")) == 1
    assert (result.summary["status"], result.summary["epochs"]) == ("done", 6)
    assert presented(again) < 6 * 800


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("sgwu", "sgd"),
        ("sgwu", "adamw"),
        *(pytest.param("layer", name, marks=pytest.mark.slow) for name in ("sgd", "adamw")),
    ],
)
def test_resumed_run_ends_as_its_optimizer_alone_does(
    three_workers: Client, synthetic: str, runs: str, strategy: str, optimizer: str
) -> None:
    """Weights, the optimizer's state, order and schedule all come back: to the last bit with a server."""
    train: dict[str, Any] = {"strategy": strategy, "epochs": 3, "optimizer": optimizer}
    model = {"dtype": "float64" if strategy == "layer" else "float32"}
    train |= {"increments": 1} if strategy == "sgwu" else {}
    more: dict[str, dict[str, Any]] = {"cluster": {"workers": {"cpu": 1}}, "run": {"name": "it"}}
    more["data"] = {"limit": 500}
    job = small_job(synthetic, runs, train=train, model=model, **more)
    was = Path(runs) / "was"  # of the end of a round: one that is interrupted within has its rest in a later one

    def cut() -> None:
        shutil.copytree(Path(runs) / "it", was)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run(three_workers, job, Watch("checkpoint", cut), handle_signals=True)
    result = run(three_workers, job, resume=was)
    expected = reference(job).weights
    if strategy == "sgwu":
        np.testing.assert_array_equal(result.model.vector, expected)
    else:
        np.testing.assert_allclose(result.model.vector, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["sgwu", pytest.param("layer", marks=pytest.mark.slow)])
def test_a_run_that_is_done_is_trained_longer(three_workers: Client, synthetic: str, runs: str, strategy: str) -> None:
    """At a constant rate it ends as a run that was to be that long from the start."""
    train: dict[str, Any] = {"strategy": strategy, "epochs": 1, "schedule": "constant"}
    train |= {"increments": 1} if strategy == "sgwu" else {}
    more: dict[str, dict[str, Any]] = {"cluster": {"workers": {"cpu": 1}}, "run": {"name": "it"}}
    model = {"dtype": "float64" if strategy == "layer" else "float32"}
    job = small_job(synthetic, runs, train=train, model=model, data={"limit": 500}, **more)
    short, watch = run(three_workers, job), Watch()
    again, path = job_to_run({"train": {"epochs": 3}}, str(short.run))
    longer = train_job(again, client=three_workers, resume=path, progress=watch)
    assert (longer.summary["status"], longer.summary["epochs"]) == ("done", 3)
    assert presented(watch) == (2 * 400 if strategy == "sgwu" else 0)
    job["train"]["epochs"] = 3
    expected = reference(job).weights
    if strategy == "sgwu":
        np.testing.assert_array_equal(longer.model.vector, expected)
    else:
        np.testing.assert_allclose(longer.model.vector, expected, rtol=1e-9, atol=1e-12)
    assert [event["epochs"] for event in longer.history] == [1, 3, 3]


@pytest.mark.slow
def test_interrupted_layer_run_is_saved_and_resumes(three_workers: Client, synthetic: str, runs: str) -> None:
    job = small_job(synthetic, runs, train={"strategy": "layer"}, run={"name": "it"})
    watch = Watch("steps", lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="--resume") as caught:
        run(three_workers, job, watch, handle_signals=True)
    assert caught.value.exit_code == 143
    again = Watch()
    result = run(three_workers, job, again, resume=Path(runs) / "it")
    assert len(again.of("resume")) == 1
    assert (result.summary["status"], result.summary["epochs"]) == ("done", 2)


@pytest.mark.slow
def test_a_layer_run_judges_the_epoch_that_a_signal_left_unjudged(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    """Its kernels and momentum are those of a run that was not ended."""
    job = small_job(synthetic, runs, train={"strategy": "layer"}, model={"dtype": "float64"}, run={"name": "it"})
    heard = Listener(
        lambda _, found: any(isinstance(order, Judge) for order in found), lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    with pytest.raises(Interrupted):
        run(three_workers, job, heard=heard, handle_signals=True)
    result = run(three_workers, job, resume=Path(runs) / "it")
    assert [event["epoch"] for event in result.history] == [1, 2]
    np.testing.assert_allclose(result.model.vector, reference(job).weights, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_worker_of_layer_that_runs_out_of_memory_is_left_out_and_the_others_go_on(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    job = small_job(synthetic, runs, train={"strategy": "layer"}, model={"dtype": "float64"})
    watch, worker = Watch(), [addresses_of(three_workers)["cpu-1"]]
    heard = Listener(lambda fact, _: isinstance(fact, StepDone), lambda: three_workers.run(fill, True, workers=worker))
    try:
        result = run(three_workers, job, watch, heard=heard)
    finally:
        three_workers.run(fill, False, workers=worker)
    (lost,) = watch.of("worker-lost")
    assert lost["worker"] == "cpu-1"
    assert lost["reason"].startswith("out of memory while it trained")
    np.testing.assert_allclose(result.model.vector, reference(job).weights, rtol=1e-9, atol=1e-12)


def fill(full: bool) -> None:
    """Let what this worker computes fail for want of memory, or no more."""
    from daskcnn.arrays import NUMPY

    def refuse() -> None:
        raise MemoryError("8,589,934,592 bytes")

    object.__setattr__(NUMPY, "synchronize", refuse if full else lambda: None)


fill.__module__ = "__main__"  # the workers do not have this file


@pytest.mark.slow
def test_lost_worker_frees_the_barrier_within_a_round(three_workers: Client, synthetic: str, runs: str) -> None:
    """BSP's replicas wait for each other at every step; throttled, a round takes longer than a look round."""
    job = small_job(synthetic, runs, train={"strategy": "bsp", "batch_size": 16})
    watch = Watch()
    heard = Listener(lambda _, found: any(isinstance(order, StartRound) for order in found), lambda: None)
    heard.then(lambda fact, _: isinstance(fact, Tick), lambda: None)
    heard.then(lambda fact, _: isinstance(fact, Tick), kill_worker(three_workers, "cpu-1"))
    addresses = [address for name, address in addresses_of(three_workers).items() if name.startswith("cpu")]
    three_workers.run(set_throttle, 40.0, workers=addresses)
    try:
        result = run(three_workers, job, watch, heard=heard)
    finally:
        three_workers.run(set_throttle, 1.0)
    assert heard.acted
    ends = [isinstance(fact, RoundDone) for fact, _ in heard.heard]
    lost = next(i for i, (fact, _) in enumerate(heard.heard) if isinstance(fact, WorkerGone))
    assert not any(ends[:lost]), "the first round was under way"
    assert [event["worker"] for event in watch.of("worker-lost")] == ["cpu-1"]
    assert presented(watch) == 2 * 800
    assert result.summary["status"] == "done"


@pytest.mark.slow
def test_what_a_rule_keeps_on_the_server_comes_back(three_workers: Client, synthetic: str, runs: str) -> None:
    """Adagrad's sums of squares grow on from the checkpoint's."""
    train = {"strategy": "downpour", "epochs": 3}
    job = small_job(synthetic, runs, train=train, rule={"server": "adagrad"}, run={"name": "it"})
    watch = Watch("checkpoint", lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted):
        run(three_workers, job, watch, handle_signals=True)
    before = _newest(Path(runs) / "it").arrays["rule:squares"]
    run(three_workers, job, resume=Path(runs) / "it")
    after = _newest(Path(runs) / "it").arrays["rule:squares"]
    assert before.any()
    assert (after >= before).all()
    assert (after > before).any()


def _newest(run_directory: Path) -> Checkpoint:
    return load(max((run_directory / "checkpoints").glob("step-*")))


@pytest.mark.slow
def test_worker_that_waits_for_the_others_is_told_that_the_server_is_lost(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    """cpu-1 stands still until cpu-0 waits behind the barrier of a server that is lost then."""
    job = small_job(synthetic, runs, train={"strategy": "sgwu"}, cluster=TWO | {"stall_timeout": 60.0})
    kill, stop = kill_worker(three_workers, "ps"), kill_worker(three_workers, "cpu-1", signal.SIGSTOP)
    go_on = kill_worker(three_workers, "cpu-1", signal.SIGCONT)
    heard = Listener(lambda _, found: any(isinstance(order, StartRound) for order in found), stop)
    for _ in range(6):  # its round takes a fraction of these looks: by then cpu-0 waits
        heard.then(lambda fact, _: isinstance(fact, Tick), lambda: None)
    heard.then(lambda fact, _: isinstance(fact, Tick), lambda: (kill(), go_on())[0])
    watch = Watch()
    try:
        result = run(three_workers, job, watch, heard=heard)
    finally:
        go_on()
    assert heard.acted
    assert watch.of("worker-lost") == []
    assert presented(watch) == 2 * 800
    assert result.summary["status"] == "done"


@pytest.mark.slow
def test_last_worker_lost_ends_the_run_resumably(three_workers: Client, synthetic: str, runs: str) -> None:
    job = small_job(synthetic, runs, cluster={"workers": {"cpu": 1}}, train={"epochs": 4})
    watch = Watch("checkpoint", kill_worker(three_workers, "cpu-0"))
    with pytest.raises(Lost, match=r"last good checkpoint: .*step-"):
        run(three_workers, job, watch)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sgwu", "layer"])
def test_divergence_ends_the_run_with_finite_checkpoints_only(
    three_workers: Client, synthetic: str, runs: str, strategy: str
) -> None:
    train, run_ = {"strategy": strategy, "epochs": 40}, {"checkpoint_every": 0.04}
    job = small_job(synthetic, runs, train=train, run=run_, cluster={"workers": {"cpu": 2}})
    assert_checkpoints_stay_finite(three_workers, job)
