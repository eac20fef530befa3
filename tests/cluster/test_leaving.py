"""Workers that are asked to end in mid-run, and the server's host: SIGTERM, and the scheduler's `retire_workers`."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.comm import CommClosedError

from daskcnn.errors import Lost
from daskcnn.files import replace_file
from daskcnn.job.resolve import resolve
from daskcnn.runs.checkpoint import load
from daskcnn.store import open_dataset
from daskcnn.training.coordinator.evaluations import guessing_on
from daskcnn.training.coordinator.replicas import Coordinator
from daskcnn.training.coordinator.settings import Settings
from tests.cluster.by_hand import hand_made_cluster, process, scheduler, wait_for, worker
from tests.cluster.cluster_jobs import (
    FOUR_SLOW_SECONDS,
    Watch,
    addresses_of,
    in_mid_round,
    run,
    small_job,
    wait_until,
)
from tests.cluster.references import reference
from tests.replays import assert_replayed

pytestmark = pytest.mark.cluster
Workers = tuple[Client, dict[str, subprocess.Popen[str]]]


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """A scheduler and workers as a user starts them, with nannies: two that train, two for the server."""
    file, named = str(tmp_path / "scheduler.json"), {"a": "CPU=1", "b": "CPU=1", "ps": "PS=1", "spare": "PS=1"}
    with ExitStack() as stack:
        stack.enter_context(process(*scheduler(file), log=tmp_path / "log"))
        wait_for(Path(file))
        started = {
            name: stack.enter_context(
                process(*worker(file, tmp_path / name, resource), "--name", name, log=tmp_path / "log")
            )
            for name, resource in named.items()
        }
        client = stack.enter_context(Client(scheduler_file=file, set_as_default=False))
        client.wait_for_workers(len(named), timeout=60)
        yield client, started


def terminated(workers: Workers, name: str) -> Callable[[], None]:
    """SIGTERM, as Kubernetes and SLURM send it: to the nanny."""
    return lambda: workers[1][name].send_signal(signal.SIGTERM)


def retired(workers: Workers, name: str) -> Callable[[], None]:
    """As an adaptive cluster retires one that it has no more use for."""
    client, address = workers[0], addresses_of(workers[0])[name]
    return lambda: retire(client, address)


def retire(client: Client, address: str) -> None:
    """Ask the scheduler to retire a worker, and do not wait: it may answer when the test is over, or never."""

    def ask() -> None:
        with suppress(CommClosedError):
            client.retire_workers([address])

    Thread(target=ask, daemon=True).start()


def presented(watch: Watch) -> int:
    return sum(event["samples"] for event in watch.of("round"))


def trained(workers: Workers, job: dict[str, Any], act: Callable[[], Any], slow: str = FOUR_SLOW_SECONDS) -> Watch:
    """Run the job, with this in mid-round. The recorded facts lead to the same orders without a cluster."""
    watch, heard = Watch(), in_mid_round(workers[0], act, after=1.0, slow=slow)
    result = run(workers[0], job, watch, heard=heard)
    assert result.summary["status"] == "done"
    assert presented(watch) == job["train"]["epochs"] * 800
    resolved = resolve(job)
    guess = guessing_on(resolved, open_dataset(job["data"]["path"]))
    assert_replayed(Coordinator(Settings.of(resolved, 800, guess)), heard.heard)
    return watch


@pytest.mark.parametrize(
    ("strategy", "act"),
    [
        ("bsp", terminated),
        *(pytest.param(rule, terminated, marks=pytest.mark.slow) for rule in ("sgwu", "agwu")),
        *(pytest.param(rule, retired, marks=pytest.mark.slow) for rule in ("sgwu", "agwu", "bsp")),
    ],
)
def test_a_worker_that_is_asked_to_end_pushes_what_it_has(
    workers: Workers, synthetic: str, runs: str, strategy: str, act: Any
) -> None:
    job = small_job(synthetic, runs, train={"strategy": strategy, "epochs": 4, "partition": "udpa"})
    watch = trained(workers, job, act(workers, "b"))
    assert not watch.of("worker-lost")
    (left,) = watch.of("worker-left")
    assert left["worker"] == "b"
    told = {"it is shut down"} if act is terminated else {"it is shut down", "the scheduler retires it"}
    assert left["reason"] in told  # of a worker that is retired both are heard, either first
    assert 0 < left["samples_done"] < left["samples_moved"] == 400
    last = [event for event in watch.of("round") if event["worker"] == "b"][-1]
    assert (last["samples"], last["pushes"]) == (left["samples_done"], last["pushes"])
    counted = watch.of("server")[-1]
    assert counted["merged"] == sum(event["pushes"] for event in watch.of("round"))


def sessions() -> int:
    """On a worker: the sessions of runs that it has."""
    from daskcnn.cluster.worker import session

    return len(session._sessions)


@pytest.mark.slow
def test_a_worker_that_another_job_is_to_have_keeps_nothing_of_a_run_that_goes_on(
    workers: Workers, synthetic: str, runs: str, tmp_path: Path
) -> None:
    client, only = workers[0], tmp_path / "only"
    replace_file(only, b"a\nb\n")
    address, kept = addresses_of(client)["b"], list[int]()

    def recall() -> None:
        kept.extend(client.run(sessions, workers=[address]).values())
        replace_file(only, b"a\n")

    def is_free() -> None:
        wait_until(lambda: not client.run(sessions, workers=[address])[address])
        kept.append(0)

    watch = Watch("round", recall)
    watch.then("worker-left", lambda: None)
    watch.then("round", is_free)
    cluster = {"only_from": str(only)}
    job = small_job(synthetic, runs, train={"strategy": "agwu", "epochs": 6, "partition": "udpa"}, cluster=cluster)
    assert run(client, job, watch).summary["status"] == "done"
    assert kept == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("act", [terminated, retired])
@pytest.mark.parametrize("strategy", ["sgwu", "agwu"])
def test_a_server_whose_host_is_asked_to_end_moves_and_nothing_is_done_again(
    workers: Workers, synthetic: str, runs: str, strategy: str, act: Any
) -> None:
    job = small_job(synthetic, runs, train={"strategy": strategy, "epochs": 4, "partition": "udpa"})
    watch = trained(workers, job, act(workers, "ps"))
    (moved,) = [event["message"] for event in watch.of("warning") if "moves to" in event["message"]]
    assert moved.startswith("the parameter server moves to spare, as its worker leaves: ")
    assert not watch.of("worker-left")
    assert not watch.of("worker-lost")
    if act is retired:
        assert "ps" not in addresses_of(workers[0])


@pytest.mark.slow
def test_a_server_leaves_a_worker_that_trains_once_a_host_comes(tmp_path: Path, synthetic: str, runs: str) -> None:
    with hand_made_cluster(tmp_path, ["CPU=1", "CPU=1"]) as (file, _), ExitStack() as stack:
        client = stack.enter_context(Client(scheduler_file=file, set_as_default=False))
        client.wait_for_workers(2, timeout=60)
        command = [*worker(file, tmp_path / "late", "PS=1"), "--name", "late"]
        watch = trained(
            (client, {}),
            small_job(synthetic, runs, train={"strategy": "agwu", "epochs": 4, "partition": "udpa"}),
            lambda: stack.enter_context(process(*command, log=tmp_path / "log")),
            FOUR_SLOW_SECONDS.replace("4.0", "20.0"),  # it has to start meanwhile
        )
    before, moved, *_ = [event["message"] for event in watch.of("warning")]
    assert before.startswith("no worker is set apart for the parameter server")
    assert moved == "the parameter server moves to late, as that one is set apart for it"
    assert not watch.of("worker-lost")


@pytest.mark.slow
@pytest.mark.parametrize("act", [terminated, retired])
def test_a_worker_of_a_group_that_is_asked_to_end_stays_until_its_group_has_pushed_what_it_has(
    workers: Workers, synthetic: str, runs: str, act: Any
) -> None:
    """The group is formed anew of the other; nobody is lost."""
    train = {"strategy": "sgwu", "epochs": 4, "partition": "udpa", "replica_size": 2, "kernel_shares": "speeds"}
    watch = trained(workers, small_job(synthetic, runs, train=train), act(workers, "b"))
    assert not watch.of("worker-lost")
    (left,) = watch.of("worker-left")
    assert left["worker"] == "b"
    (cut,) = [event["samples"] for event in watch.of("round") if event["samples"] == left["samples_done"]]
    assert 0 < cut < 800
    assert [[*group["members"]] for event in watch.of("groups") for group in event["groups"]][-1] == ["a"]
    assert watch.of("server")[-1]["merged"] == sum(event["pushes"] for event in watch.of("round"))
    assert watch.of("server")[-1]["server"] == 1, "no state was gone back to"


ASA = {"exchange": "asa"}


@pytest.mark.slow
def test_a_peer_that_is_asked_to_end_comes_to_another_meeting_and_nothing_is_done_again(
    workers: Workers, synthetic: str, runs: str
) -> None:
    train = {"strategy": "bsp", "epochs": 4, "partition": "udpa"}
    watch = trained(workers, small_job(synthetic, runs, train=train, rule=ASA), terminated(workers, "b"))
    assert not watch.of("worker-lost")
    assert not [event["message"] for event in watch.of("warning") if "begun again" in event["message"]]
    (left,) = watch.of("worker-left")
    assert (left["worker"], left["reason"]) == ("b", "it is shut down")
    assert 0 < left["samples_done"] < left["samples_moved"] == 400
    cut = [event for event in watch.of("round") if event["samples"] == left["samples_done"]]
    assert [event["worker"] for event in cut] == ["a", "b"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "rule"), [(terminated, {}), (retired, {}), (terminated, ASA)], ids=["ended", "retired", "asa"]
)
def test_what_the_last_worker_has_pushed_is_saved_before_the_run_ends_resumably(
    workers: Workers, synthetic: str, runs: str, act: Any, rule: dict[str, Any]
) -> None:
    """No other may take its place."""
    train = {"strategy": "bsp" if rule else "sgwu", "epochs": 4, "partition": "udpa"}
    job = small_job(synthetic, runs, train=train, rule=rule, cluster={"only": ["b"], "workers": {"cpu": 1}})
    watch, heard = Watch(), in_mid_round(workers[0], act(workers, "b"), after=1.0, slow=FOUR_SLOW_SECONDS)
    with pytest.raises(Lost, match="and it was the last of the run"):
        run(workers[0], job, watch, heard=heard)
    (left,) = watch.of("worker-left")
    assert 0 < left["samples_done"] < left["samples_moved"] == 800
    newest = max(Path(runs).glob("*/checkpoints/step-*"))
    assert load(newest).state["epoch"] == pytest.approx(presented(watch) / 800)


def test_a_worker_of_layer_that_is_retired_hands_over_its_kernels(synthetic: str, runs: str) -> None:
    """Workers of this process."""
    of_workers: dict[str, Any] = {"n_workers": 3, "threads_per_worker": 1, "resources": {"CPU": 1}}
    with (
        LocalCluster(processes=False, dashboard_address=":0", **of_workers) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        gone = min(addresses_of(client).values())
        job = small_job(synthetic, runs, train={"strategy": "layer", "epochs": 2}, run={"report_every": 1})
        watch = Watch("steps", lambda: retire(client, gone), lambda event: event["step"] >= 12)
        run(client, job, watch)
        assert not watch.of("worker-lost")
        assert [event["reason"] for event in watch.of("worker-left")] == ["the scheduler retires it"]
        assert [event["step"] for event in watch.of("steps")] == list(range(1, 51))
        assert gone not in addresses_of(client).values()


@pytest.mark.slow
@pytest.mark.parametrize("act", [terminated, retired])
def test_layer_s_workers_that_are_asked_to_end_hand_over_their_kernels_and_no_step_is_trained_twice(
    workers: Workers, synthetic: str, runs: str, act: Any
) -> None:
    """Home is the last that is left; the weights are those of one process."""
    train, often = {"strategy": "layer", "epochs": 4}, {"report_every": 1}
    job = small_job(synthetic, runs, train=train, model={"dtype": "float64"}, run=often)
    watch = Watch("steps", act(workers, "b"), lambda event: event["step"] >= 12)
    result = run(workers[0], job, watch)
    assert not watch.of("worker-lost")
    reason = "it is shut down" if act is terminated else "the scheduler retires it"
    assert [(event["worker"], event["reason"]) for event in watch.of("worker-left")] == [("b", reason)]
    assert [event["step"] for event in watch.of("steps")] == list(range(1, 101))
    np.testing.assert_allclose(result.model.vector, reference(job).weights, rtol=1e-9, atol=1e-12)
