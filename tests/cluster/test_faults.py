"""What a run survives: workers, the server's host and the driver are killed at chosen moments."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from daskcnn.errors import Diverged, Interrupted, Lost
from daskcnn.runs.checkpoint import Checkpoint, load
from daskcnn.training.coordinator.facts import RoundDone, Tick, WorkerGone
from daskcnn.training.coordinator.orders import StartRound
from tests.cluster.cluster_jobs import (
    Listener,
    Watch,
    addresses_of,
    allocations_after,
    kill_worker,
    run,
    set_throttle,
    small_job,
    wait_for_all,
)

pytestmark = pytest.mark.cluster
TWO: dict[str, Any] = {"workers": {"cpu": 2}}


def presented(watch: Watch) -> int:
    return sum(event["samples"] for event in watch.of("round"))


@pytest.mark.parametrize(("strategy", "partition"), [("sgwu", "idpa"), ("agwu", "idpa"), ("easgd", "udpa")])
def test_lost_worker_leaves_its_samples_to_the_others(
    three_workers: Client, synthetic: str, runs: str, strategy: str, partition: str
) -> None:
    """The log has the new parts also where all samples were handed out before."""
    job = small_job(synthetic, runs, train={"strategy": strategy, "partition": partition, "epochs": 4})
    watch = Watch("round", kill_worker(three_workers, "cpu-1"))
    result = run(three_workers, job, watch)
    (lost,) = watch.of("worker-lost")
    assert lost["worker"] == "cpu-1"
    assert lost["samples_moved"] > 0
    sizes = allocations_after(watch, lost)
    assert all({"cpu-0", "cpu-2"} <= each.keys() and "cpu-1" not in each for each in sizes)
    assert sum(sizes[-1].values()) == 800
    assert result.summary["status"] == "done"
    assert presented(watch) == 4 * 800


def test_lost_worker_frees_the_barrier_within_a_round(three_workers: Client, synthetic: str, runs: str) -> None:
    """BSP's replicas wait for each other at every step; throttled, a round takes longer than a look round."""
    job = small_job(synthetic, runs, train={"strategy": "bsp", "batch_size": 16})
    watch = Watch()
    heard = Listener(lambda _, found: any(isinstance(order, StartRound) for order in found), lambda: None)
    heard.then(lambda fact, _: isinstance(fact, Tick), lambda: None)
    heard.then(lambda fact, _: isinstance(fact, Tick), kill_worker(three_workers, "cpu-1"))
    addresses = [address for name, address in addresses_of(three_workers).items() if name.startswith("cpu")]
    three_workers.run(set_throttle, 20.0, workers=addresses)
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


def test_layer_goes_back_to_the_snapshot_and_ends_with_the_same_weights(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    train = {"strategy": "layer", "epochs": 1}
    often = {"checkpoint_every": 0.2, "report_every": 8}
    job = small_job(synthetic, runs, train=train, model={"dtype": "float64"}, run=often)
    undisturbed = run(three_workers, job)
    watch = Watch("steps", kill_worker(three_workers, "cpu-1"))
    result = run(three_workers, job, watch)
    assert [event["worker"] for event in watch.of("worker-lost")] == ["cpu-1"]
    assert any("back to the snapshot" in event["message"] for event in watch.of("warning"))
    np.testing.assert_allclose(result.model.weights, undisturbed.model.weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["sgwu", "agwu"])
def test_new_server_goes_on_when_its_host_is_killed(
    three_workers: Client, synthetic: str, runs: str, strategy: str
) -> None:
    job = small_job(synthetic, runs, train={"strategy": strategy, "epochs": 4}, cluster=TWO)
    watch = Watch("checkpoint", kill_worker(three_workers, "ps"))
    result = run(three_workers, job, watch)
    assert any("parameter server" in event["message"] for event in watch.of("warning"))
    assert result.summary["status"] == "done"
    assert result.summary["epochs"] == 4


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


def test_stopped_worker_is_given_up(three_workers: Client, synthetic: str, runs: str) -> None:
    """SIGSTOP: the worker is there for the scheduler, but reports nothing; it goes on when the run is over."""
    job = small_job(synthetic, runs, train={"epochs": 4}, cluster=TWO | {"stall_timeout": 2.0})
    go_on = kill_worker(three_workers, "cpu-1", signal.SIGCONT)
    watch = Watch("round", kill_worker(three_workers, "cpu-1", signal.SIGSTOP))
    try:
        result = run(three_workers, job, watch)
    finally:
        go_on()
    (lost,) = watch.of("worker-lost")
    assert lost["worker"] == "cpu-1"
    assert "no report" in lost["reason"]
    assert result.summary["status"] == "done"
    assert presented(watch) == 4 * 800


def test_interrupt_ends_the_run_though_a_worker_stands_still(three_workers: Client, synthetic: str, runs: str) -> None:
    job = small_job(synthetic, runs, cluster=TWO | {"stall_timeout": 5.0})
    stop, go_on = (kill_worker(three_workers, "cpu-1", signum) for signum in (signal.SIGSTOP, signal.SIGCONT))
    watch = Watch("round", lambda: (stop(), os.kill(os.getpid(), signal.SIGINT)))
    try:
        with pytest.raises(Interrupted):
            run(three_workers, job, watch, handle_signals=True)
    finally:
        go_on()


def test_last_worker_lost_ends_the_run_resumably(three_workers: Client, synthetic: str, runs: str) -> None:
    job = small_job(synthetic, runs, cluster={"workers": {"cpu": 1}}, train={"epochs": 4})
    watch = Watch("checkpoint", kill_worker(three_workers, "cpu-0"))
    with pytest.raises(Lost, match=r"last good checkpoint: .*step-"):
        run(three_workers, job, watch)


@pytest.mark.parametrize("strategy", ["sgwu", "agwu"])
def test_a_worker_that_comes_in_mid_run_takes_its_share(
    three_workers: Client, synthetic: str, runs: str, strategy: str
) -> None:
    """The nanny brings a killed worker back under a new address, which is one that comes."""
    watch = Watch("round", kill_worker(three_workers, "cpu-1"))
    watch.then("worker-lost", lambda: wait_for_all(three_workers, 4))
    run(three_workers, small_job(synthetic, runs, train={"strategy": strategy, "epochs": 12}, cluster=TWO), watch)
    (joined,) = watch.of("worker-joined")
    assert joined["worker"] == "cpu-2"
    assert joined["samples"] > 0
    after = watch.events[watch.events.index(joined) :]
    assert {event["worker"] for event in after if event["event"] == "round"} == {"cpu-0", "cpu-2"}
    assert presented(watch) == 12 * 800


def test_a_worker_that_comes_is_mentioned_and_ignored_by_a_layer_run(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    watch = Watch("steps", kill_worker(three_workers, "cpu-1"))
    watch.then("worker-lost", lambda: wait_for_all(three_workers, 4))
    run(three_workers, small_job(synthetic, runs, train={"strategy": "layer", "epochs": 3}, cluster=TWO), watch)
    assert len(watch.of("worker-ignored")) == 1


@pytest.mark.parametrize("strategy", ["sgwu", "layer"])
def test_divergence_ends_the_run_with_finite_checkpoints_only(
    three_workers: Client, synthetic: str, runs: str, strategy: str
) -> None:
    train = {"strategy": strategy, "lr": 1e6, "schedule": "constant"}
    run_ = {"name": "it", "checkpoint_every": 0.04}
    job = small_job(synthetic, runs, train=train, run=run_, cluster={"workers": {"cpu": 2}})
    with pytest.raises(Diverged, match=r"lower train\.lr"):
        run(three_workers, job)
    for path in (Path(runs) / "it/checkpoints").glob("step-*"):
        assert all(np.isfinite(array).all() for array in load(path).arrays.values())


@pytest.mark.parametrize("strategy", ["sgwu", "agwu", "layer"])
def test_interrupted_run_is_saved_and_resumes(three_workers: Client, synthetic: str, runs: str, strategy: str) -> None:
    epochs, kind = (2, "steps") if strategy == "layer" else (4, "round")
    job = small_job(synthetic, runs, train={"strategy": strategy, "epochs": epochs}, run={"name": "it"})
    watch = Watch(kind, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="--resume") as caught:
        run(three_workers, job, watch, handle_signals=True)
    assert caught.value.exit_code == 143

    again = Watch()
    result = run(three_workers, job, again, resume=Path(runs) / "it")
    assert len(again.of("resume")) == 1
    assert result.summary["status"] == "done"
    assert result.summary["epochs"] == epochs
    if strategy != "layer":
        assert presented(again) < 4 * 800


@pytest.mark.parametrize("strategy", ["sgwu", "layer"])
def test_resumed_run_ends_as_the_undisturbed_one(
    three_workers: Client, synthetic: str, runs: str, strategy: str
) -> None:
    """Weights, momentum, order and schedule all come back: to the last bit under a barrier."""

    job = small_job(
        synthetic,
        runs,
        train={"strategy": strategy, "epochs": 3, "increments": 1} if strategy == "sgwu" else {"strategy": strategy},
        data={"limit": 500},
        model={"dtype": "float64"},
        cluster={"workers": {"cpu": 1}},
    )
    undisturbed = run(three_workers, job)
    job["run"]["name"] = "it"
    watch = Watch("checkpoint", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted):
        run(three_workers, job, watch, handle_signals=True)
    result = run(three_workers, job, resume=Path(runs) / "it")
    np.testing.assert_allclose(result.model.weights, undisturbed.model.weights, rtol=1e-12)
