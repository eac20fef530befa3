"""Groups of workers on real processes: each trains as one worker would, and the rule joins them as it joins workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from daskcnn.errors import ClusterError, Diverged, Interrupted, Lost
from daskcnn.events import parsed
from daskcnn.runs.checkpoint import load
from daskcnn.show.report_tables import tables
from daskcnn.training.replica import Replica
from tests.cluster.cluster_jobs import (
    Watch,
    allocations_after,
    kill_worker,
    local_cluster,
    one_process,
    run,
    small_job,
    wait_for_all,
)

pytestmark = pytest.mark.cluster

SAMPLES = 400  # that are trained on
WHOLE = {"dtype": "float64"}
NORMALISED: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 12, "size": 3, "pad": 1},
    {"layer": "lrn", "size": 3, "alpha": 0.5},
    {"layer": "relu"},
    {"layer": "maxpool", "size": 4},
    {"layer": "dropout", "rate": 0.2},
    {"layer": "dense", "units": 16},
    {"layer": "batchnorm"},
    {"layer": "relu"},
    {"layer": "dense", "units": 10},
]
"""Its shards need their neighbours' channels, it draws masks, and it has state besides parameters."""


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


def plain_sgd(tables: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Weights after the same in this process, rounded before and after each round as what goes to the server is."""

    def rounded(replica: Replica) -> None:
        replica.adopt(replica.host_weights().astype(np.float32))

    def trained(replica: Replica, *args: Any, **options: Any) -> Any:
        rounded(replica)
        found = train(replica, *args, **options)
        rounded(replica)
        return found

    train = Replica.train
    with monkeypatch.context() as patch:
        patch.setattr(Replica, "train", trained)
        _, replica = one_process(tables)
    return replica.host_weights()


def presented(watch: Watch) -> int:
    return sum(event["samples"] for event in watch.of("round"))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"model": {"name": None, "layers": NORMALISED}},
        {"train": {"sub_batches": 3}},
        {"train": {"first_conv": "samples"}},
    ],
)
def test_one_group_is_plain_sgd(
    four_workers: Client, synthetic: str, runs: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = {"chain": 3}  # cut within a round as well
    job = short_job(synthetic, runs, train={"increments": 1}, cluster=chain)
    job["model"] |= more.get("model", {}) | WHOLE
    expected = plain_sgd(job, monkeypatch)
    watch = Watch()
    result = run(four_workers, grouped(job, 2, **more.get("train", {})), watch)
    (shards,) = watch.of("shards")
    assert all(min(own.values()) > 0 for own in shards["kernels"].values())
    assert len(shards["kernels"]) == 2
    assert shards["divided"]["cpu-0"]["conv1"] == more.get("train", {}).get("first_conv", "kernels")
    np.testing.assert_allclose(result.model.weights, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("strategy", "rule"),
    [
        ("sgwu", {}),
        ("sgwu", {"accuracy_on": "train"}),
        ("bsp", {}),
        ("bsp", {"every": 3, "combine": "sum"}),
        ("admm", {"rho": 0.0, "every": 2, "from_center": True}),
        ("parallel-sgd", {"rounds": 2}),
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
    np.testing.assert_allclose(result.model.weights, expected.model.weights, rtol=1e-9, atol=1e-12)
    for name in ("lr", "samples", "pushes", "version", "bytes_up", "bytes_down"):
        assert sorted(e[name] for e in together.of("round")) == sorted(e[name] for e in alone.of("round"))
    assert [e["validation"] for e in together.of("epoch")] == [
        pytest.approx(e["validation"], rel=1e-6) for e in alone.of("epoch")
    ]


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
    job = short_job(synthetic, runs, train={"strategy": strategy, "epochs": 4, "batch_size": 32}, rule=rule)
    watch = Watch()
    result = run(four_workers, grouped(job), watch)
    rounds = watch.of("round")
    assert presented(watch) == 4 * SAMPLES
    assert {event["worker"] for event in rounds} == {"group-0", "group-1"}
    assert rounds[-1]["loss"] < 2.2 < rounds[0]["loss"]
    assert {w["name"]: w["device"] for w in result.summary["workers"]} == {"group-0": "2 cpu", "group-1": "2 cpu"}
    members = {member["name"]: member for event in rounds for member in event["members"]}
    assert members.keys() == {"cpu-0", "cpu-1", "cpu-2", "cpu-3"}
    assert all(member["busy"] > 0 and member["bytes_up"] > 0 for member in members.values())


def test_scheduler_forgets_steps_that_are_done(four_workers: Client, synthetic: str, runs: str) -> None:
    """A task keeps all that it hangs on, so each step would keep all steps before it."""
    job = grouped(short_job(synthetic, runs, train={"epochs": 6}, cluster={"chain": 3}), 2)
    remembered: list[int] = []

    def count(event: Any) -> bool:
        remembered.append(four_workers.run_on_scheduler(_tasks))
        return False

    run(four_workers, job, Watch("round", lambda: None, count))
    assert len(remembered) >= 6
    assert max(remembered[3:]) <= 1.3 * max(remembered[:3])


def _tasks(dask_scheduler: Any) -> int:
    return len(dask_scheduler.tasks)


def test_a_report_counts_groups_as_workers(four_workers: Client, synthetic: str, runs: str) -> None:
    watch = Watch()
    run(four_workers, grouped(short_job(synthetic, runs)), watch)
    report = tables(parsed(watch.events))
    assert [(row.name, row.device, row.lost) for row in report.workers] == [
        ("group-0", "2 cpu", False),
        ("group-1", "2 cpu", False),
    ]
    assert report.total.samples == 2 * SAMPLES
    assert report.balance is not None
    assert report.balance.workers == 2
    assert report.traffic.share == pytest.approx(1, abs=0.5)
    assert report.kernels.keys() == report.conv_seconds.keys() == {"cpu-0", "cpu-1", "cpu-2", "cpu-3"}


def test_who_is_in_no_group_is_named(four_workers: Client, synthetic: str, runs: str) -> None:
    watch = Watch()
    run(four_workers, grouped(short_job(synthetic, runs), 3), watch)
    (formed,) = watch.of("groups")
    (left_out,) = formed["left_out"]
    assert sorted([*formed["groups"][0]["members"], left_out]) == ["cpu-0", "cpu-1", "cpu-2"]
    assert any(event["message"].startswith(f"{left_out}: left out, the slowest") for event in watch.of("warning"))
    assert presented(watch) == 2 * SAMPLES


def test_more_workers_to_a_group_than_there_are_is_refused(four_workers: Client, synthetic: str, runs: str) -> None:
    job = short_job(synthetic, runs, train={"replica_size": 5})
    with pytest.raises(ClusterError, match=r"train\.replica_size = 5: there are 4 workers"):
        run(four_workers, job)


@pytest.mark.parametrize("strategy", ["sgwu", "agwu", "bsp"])
def test_lost_member_leaves_its_group_s_samples_to_the_others(
    four_workers: Client, synthetic: str, runs: str, strategy: str
) -> None:
    job = grouped(short_job(synthetic, runs, train={"strategy": strategy, "epochs": 4}, rule=_rule(strategy)))
    watch = Watch("round", kill_worker(four_workers, "cpu-1"))
    result = run(four_workers, job, watch)
    group = next(g["name"] for g in watch.of("groups")[0]["groups"] if "cpu-1" in g["members"])
    worker, its_group = watch.of("worker-lost")
    assert (worker["worker"], its_group["worker"]) == ("cpu-1", group)
    assert its_group["samples_moved"] > 0
    sizes = allocations_after(watch, its_group)
    assert all(each.keys() == {"group-0", "group-1"} - {group} for each in sizes)
    assert sum(sizes[-1].values()) == SAMPLES
    assert presented(watch) == 4 * SAMPLES
    assert result.summary["status"] == "done"


def _rule(strategy: str) -> dict[str, Any]:
    return {"every": 2} if strategy == "bsp" else {}


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


def test_last_group_lost_ends_the_run_resumably(four_workers: Client, synthetic: str, runs: str) -> None:
    job = grouped(short_job(synthetic, runs, train={"epochs": 4}, run={"name": "it"}), 3)

    def kill_a_member() -> None:
        (group,) = watch.of("groups")[0]["groups"]
        kill_worker(four_workers, group["members"][0])()

    watch = Watch("checkpoint", kill_a_member)
    with pytest.raises(Lost, match=r"last good checkpoint: .*step-"):
        run(four_workers, job, watch)


def test_new_server_goes_on_with_groups_when_its_host_is_killed(
    four_workers: Client, synthetic: str, runs: str
) -> None:
    job = grouped(short_job(synthetic, runs, train={"epochs": 3}))
    watch = Watch("checkpoint", kill_worker(four_workers, "ps"))
    result = run(four_workers, job, watch)
    assert any("parameter server" in event["message"] for event in watch.of("warning"))
    assert result.summary["status"] == "done"
    assert result.summary["epochs"] == 3


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


def test_resumed_group_ends_as_the_undisturbed_one(four_workers: Client, synthetic: str, runs: str) -> None:
    """Momentum goes from the shards into the checkpoint and back."""
    job = short_job(synthetic, runs, model=WHOLE, train={"epochs": 2, "increments": 1})
    undisturbed = run(four_workers, grouped(job, 2))
    job["run"]["name"] = "it"
    watch = Watch("checkpoint", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted):
        run(four_workers, grouped(job, 2), watch, handle_signals=True)
    result = run(four_workers, grouped(job, 2), resume=Path(runs) / "it")
    np.testing.assert_allclose(result.model.weights, undisturbed.model.weights, rtol=1e-9, atol=1e-12)


def test_divergence_of_a_group_ends_the_run(four_workers: Client, synthetic: str, runs: str) -> None:
    job = short_job(synthetic, runs, train={"lr": 1e6, "schedule": "constant"}, run={"name": "it"})
    with pytest.raises(Diverged, match=r"lower train\.lr"):
        run(four_workers, grouped(job))
    for path in (Path(runs) / "it/checkpoints").glob("step-*"):
        assert all(np.isfinite(array).all() for array in load(path).arrays.values())
