"""Groups of workers on real processes: each trains as one worker would, and the rule joins them as it joins workers."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from daskcnn.errors import Interrupted
from daskcnn.events import parsed
from daskcnn.job.resolve import resolve
from daskcnn.show.report_tables import tables
from daskcnn.store import open_dataset
from tests.cluster.cluster_jobs import (
    Watch,
    assert_checkpoints_stay_finite,
    kill_worker,
    local_cluster,
    run,
    small_job,
    wait_for_all,
)
from tests.cluster.references import trained_in_rounds
from tests.cluster.sharded_networks import NORMALISED

pytestmark = pytest.mark.cluster

SAMPLES = 400  # that are trained on
WHOLE = {"dtype": "float64"}


@pytest.fixture(scope="module")
def _four_workers() -> Iterator[Client]:
    with local_cluster(4) as client:
        yield client


@pytest.fixture
def four_workers(_four_workers: Client) -> Iterator[Client]:
    """Four CPU workers and one for the server: whom a test kills is back for the next."""
    yield _four_workers
    wait_for_all(_four_workers, 5)


def short_job(path: str, runs: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small job with a quarter of its steps, in half of its samples: a group's step costs what its tasks do."""
    train = {"batch_size": 64} | sections.get("train", {})
    return small_job(path, runs, **sections | {"data": {"limit": SAMPLES + 100}, "train": train})


def grouped(job: dict[str, Any], workers: int = 4, **train: Any) -> dict[str, Any]:
    """The same job in groups of 2, whose shares go by speed alone."""
    train = {"replica_size": 2, "kernel_shares": "speeds"} | train
    cluster = job.get("cluster", {}) | {"workers": {"cpu": workers}}
    return job | {"train": job["train"] | train, "cluster": cluster}


def presented(watch: Watch) -> int:
    return sum(event["samples"] for event in watch.of("round"))


def test_one_group_cut_off_and_resumed_is_plain_sgd(three_workers: Client, synthetic: str, runs: str) -> None:
    """The third worker is in no group, and is named. A report counts the group as one worker."""
    train, chain = {"increments": 1}, {"chain": 3}  # cut within a round as well
    job = short_job(synthetic, runs, model={"layers": NORMALISED} | WHOLE, train=train, cluster=chain)
    job = grouped(job, 3) | {"run": {"dir": runs, "name": "it"}}
    was = Path(runs) / "as it was"

    def copy() -> None:
        shutil.copytree(Path(runs) / "it", was)

    run(three_workers, job, Watch("checkpoint", copy))
    again = Watch()
    result = run(three_workers, job, again, resume=was)
    resolved = resolve(job)
    expected = trained_in_rounds(resolved, open_dataset(synthetic, limit=SAMPLES + 100), rounded=True)
    np.testing.assert_allclose(result.model.vector, expected, rtol=1e-9, atol=1e-9)

    (formed,), (shards,) = again.of("groups"), again.of("shards")
    (left_out,), (group,) = formed["left_out"], formed["groups"]
    assert sorted([*group["members"], left_out]) == ["cpu-0", "cpu-1", "cpu-2"]
    assert any(event["message"].startswith(f"{left_out}: left out, the slowest") for event in again.of("warning"))
    assert shards["kernels"].keys() == set(group["members"])
    assert {own["conv1"] for own in shards["divided"].values()} == {"kernels"}
    assert presented(again) == SAMPLES

    report = tables(parsed(again.events))
    assert [(row.name, row.device, row.lost) for row in report.workers] == [("group-0", "2 cpu", False)]
    assert report.total.samples == SAMPLES
    assert report.balance is not None
    assert report.balance.workers == 1
    assert report.traffic.share == pytest.approx(1, abs=0.5)
    assert report.kernels.keys() == report.conv_seconds.keys() == set(group["members"])
    assert {member["name"] for event in again.of("round") for member in event["members"]} == set(group["members"])


@pytest.mark.slow
def test_the_only_group_takes_a_worker_that_was_left_out_for_a_lost_one(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    job = grouped(short_job(synthetic, runs, train={"epochs": 4}, run={"name": "it"}), 3)

    def kill_a_member() -> None:
        (group,) = watch.of("groups")[0]["groups"]
        kill_worker(three_workers, group["members"][0])()

    watch = Watch("checkpoint", kill_a_member)
    result = run(three_workers, job, watch)
    (first,), (second,) = (event["groups"] for event in watch.of("groups")[:2])
    (lost,) = (event["worker"] for event in watch.of("worker-lost"))
    assert {*second["members"]} == {"cpu-0", "cpu-1", "cpu-2"} - {lost}
    assert lost in first["members"]
    assert (result.summary["status"], result.summary["epochs"]) == ("done", 4)
    assert presented(watch) == 4 * SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "rule"),
    [
        ("sgwu", {}),
        ("bsp", {"every": 3, "combine": "sum"}),
    ],
)
def test_two_groups_end_where_two_workers_do(
    four_workers: Client, synthetic: str, runs: str, strategy: str, rule: dict[str, Any]
) -> None:
    train = {"strategy": strategy, "partition": "udpa", "lr": 0.005}
    job = short_job(synthetic, runs, model=WHOLE, train=train, rule=rule, cluster={"workers": {"cpu": 2}})
    alone, together = Watch(), Watch()
    expected = run(four_workers, job, alone)
    result = run(four_workers, grouped(job), together)
    np.testing.assert_allclose(result.model.vector, expected.model.vector, rtol=1e-9, atol=1e-12)
    for name in ("lr", "samples", "pushes", "version", "bytes_up", "bytes_down"):
        assert sorted(e[name] for e in together.of("round")) == sorted(e[name] for e in alone.of("round"))
    assert [e["validation"] for e in together.of("epoch")] == [
        pytest.approx(e["validation"], rel=1e-6) for e in alone.of("epoch")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "rule"),
    [
        ("agwu", {"max_staleness": 1}),
        ("easgd", {"tau": 3}),
        ("downpour", {"n_push": 2, "n_fetch": 3}),
    ],
)
def test_groups_learn_and_every_sample_is_presented(
    four_workers: Client, synthetic: str, runs: str, strategy: str, rule: dict[str, Any]
) -> None:
    job = short_job(synthetic, runs, train={"strategy": strategy, "epochs": 6, "batch_size": 32}, rule=rule)
    watch = Watch()
    result = run(four_workers, grouped(job), watch)
    rounds = watch.of("round")
    assert presented(watch) == 6 * SAMPLES
    assert {event["worker"] for event in rounds} == {"group-0", "group-1"}
    assert rounds[-1]["loss"] < 2.2 < rounds[0]["loss"]
    assert {w["name"]: w["device"] for w in result.summary["workers"]} == {"group-0": "2 cpu", "group-1": "2 cpu"}
    members = {member["name"]: member for event in rounds for member in event["members"]}
    assert members.keys() == {"cpu-0", "cpu-1", "cpu-2", "cpu-3"}
    assert all(member["busy"] > 0 and member["bytes_up"] > 0 for member in members.values())


def test_scheduler_forgets_steps_that_are_done(three_workers: Client, synthetic: str, runs: str) -> None:
    """A task keeps all that it hangs on, so each step would keep all steps before it."""
    job = grouped(short_job(synthetic, runs, train={"epochs": 6}, cluster={"chain": 3}), 2)
    remembered: list[int] = []

    def count(event: Any) -> bool:
        remembered.append(three_workers.run_on_scheduler(_tasks))
        return False

    run(three_workers, job, Watch("round", lambda: None, count))
    assert len(remembered) >= 6
    assert max(remembered[3:]) <= 1.3 * max(remembered[:3])


def _tasks(dask_scheduler: Any) -> int:
    return len(dask_scheduler.tasks)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sgwu", "agwu", "bsp"])
def test_group_that_loses_a_member_is_formed_anew(
    four_workers: Client, synthetic: str, runs: str, strategy: str
) -> None:
    job = grouped(short_job(synthetic, runs, train={"strategy": strategy, "epochs": 4}, rule=_rule(strategy)))
    watch = Watch("round", kill_worker(four_workers, "cpu-1"))
    result = run(four_workers, job, watch)
    group = next(g["name"] for g in watch.of("groups")[0]["groups"] if "cpu-1" in g["members"])
    assert [event["worker"] for event in watch.of("worker-lost")] == ["cpu-1"]
    second = {g["name"]: g["members"] for g in watch.of("groups")[1]["groups"]}
    assert second.keys() == {"group-0", "group-1"}
    assert len(second[group]) == 1
    later = watch.events[watch.events.index(watch.of("groups")[1]) :]
    assert group in {event["worker"] for event in later if event["event"] == "round"}
    assert presented(watch) == 4 * SAMPLES
    assert result.summary["status"] == "done"


def _rule(strategy: str) -> dict[str, Any]:
    return {"every": 2} if strategy == "bsp" else {}


@pytest.mark.slow
def test_group_that_stands_still_is_given_up(four_workers: Client, synthetic: str, runs: str) -> None:
    job = grouped(short_job(synthetic, runs, train={"epochs": 4}, cluster={"stall_timeout": 4.0}))
    go_on = kill_worker(four_workers, "cpu-1", signal.SIGCONT)
    watch = Watch("round", kill_worker(four_workers, "cpu-1", signal.SIGSTOP))
    try:
        result = run(four_workers, job, watch)
    finally:
        go_on()
    lost = {event["worker"]: event["reason"] for event in watch.of("worker-lost")}
    assert "cpu-1" in lost
    assert any("no report for" in reason for reason in lost.values())
    assert presented(watch) == 4 * SAMPLES
    assert result.summary["status"] == "done"


@pytest.mark.slow
def test_new_server_goes_on_with_groups_when_its_host_is_killed(
    four_workers: Client, synthetic: str, runs: str
) -> None:
    job = grouped(short_job(synthetic, runs, train={"epochs": 3}))
    watch = Watch("checkpoint", kill_worker(four_workers, "ps"))
    result = run(four_workers, job, watch)
    assert any("parameter server" in event["message"] for event in watch.of("warning"))
    assert result.summary["status"] == "done"
    assert result.summary["epochs"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sgwu", "agwu"])
def test_interrupted_groups_are_saved_and_resume(
    four_workers: Client, synthetic: str, runs: str, strategy: str
) -> None:
    job = grouped(short_job(synthetic, runs, train={"strategy": strategy, "epochs": 3}, run={"name": "it"}))
    watch = Watch("round", lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="--resume"):
        run(four_workers, job, watch, handle_signals=True)
    again = Watch()
    result = run(four_workers, job, again, resume=Path(runs) / "it")
    assert result.summary["status"] == "done"
    assert result.summary["epochs"] == 3
    assert presented(again) < 3 * SAMPLES


@pytest.mark.slow
def test_divergence_of_a_group_ends_the_run(four_workers: Client, synthetic: str, runs: str) -> None:
    job = short_job(synthetic, runs, train={"epochs": 40}, run={"checkpoint_every": 0.1})
    assert_checkpoints_stay_finite(four_workers, grouped(job))
