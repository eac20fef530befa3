"""Every update rule on real processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from daskcnn.ps import RULES
from daskcnn.trained.trained_model import load
from tests.cluster.cluster_jobs import Watch, counted_seconds, run, small_job
from tests.cluster.conftest import RuleRuns

pytestmark = pytest.mark.cluster


EVERY_TIME = ("sgwu", "agwu", "bsp", "downpour")
"""One of each kind: with a barrier, weighed one by one, a meeting every few steps, pushes and pulls apart."""


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.slow) for name in RULES]
)
def test_replicas_learn_and_every_sample_is_presented(rule_runs: RuleRuns, strategy: str) -> None:
    """Several meetings a round; the vectors of some rules travel in half precision, the center stays in float32."""
    result, watch, job = rule_runs(strategy)
    rounds, size = watch.of("round"), result.model.vector.size
    assert sum(event["samples"] for event in rounds) == 4 * 1200
    assert sum(watch.of("allocation")[-1]["sizes"].values()) == 1200
    assert (result.summary["status"], result.summary["epochs"]) == ("done", 4)
    assert {w["name"] for w in result.summary["workers"]} == {"cpu-0", "cpu-1", "cpu-2"}
    assert rounds[-1]["loss"] < rounds[0]["loss"] - 0.05  # agwu: less where workers take turns on a busy machine
    assert result.model.vector.dtype == np.float32
    pushes, whole = sum(event["pushes"] for event in rounds), size * np.dtype(job["cluster"]["wire"]).itemsize
    assert result.summary["bytes"]["up"] == pushes * whole
    if (answers := RULES[strategy].answers) != "nothing":
        to_be_judged = len(watch.of("epoch")) if answers == "difference" else 0
        assert result.summary["bytes"]["down"] == (pushes + to_be_judged) * whole
    assert watch.of("epoch")[-1]["validation"]["accuracy"] > 0.2
    assert all(0.5 < event["validation"]["auc"] <= 1 for event in watch.of("epoch")[1:])
    assert watch.of("end")[-1]["test"] == result.summary["test"]
    assert 0.5 < result.summary["test"]["auc"] <= 1


@pytest.mark.slow
def test_slow_worker_gets_fewer_samples(three_workers: Client, synthetic: str, runs: str) -> None:
    """One of two workers is throttled: IDPA measures it. Loading, half of a step's seconds here, is not throttled."""
    more: dict[str, Any] = {"train": {"epochs": 4}, "data": {"limit": 2100}, "cluster": {"workers": {"cpu": 2}}}
    watch = Watch()
    with counted_seconds(three_workers, {"cpu-1": 5.0}):
        run(three_workers, small_job(synthetic, runs, **more), watch)
    sizes = watch.of("allocation")[-1]["sizes"]
    assert sizes["cpu-0"] > 1.8 * sizes["cpu-1"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sgwu", "layer"])
def test_run_from_trained_weights_goes_on_without_the_other_run(
    three_workers: Client, synthetic: str, runs: str, strategy: str
) -> None:
    """Frozen layers come out as the other run left them. One that ended before its first epoch resumes all the same."""
    first = run(three_workers, small_job(synthetic, runs))
    model = {"layers": None, "from": str(first.run), "freeze": ["conv1"]}
    # all checkpoints: the first one is needed, however often the center gets better
    job = small_job(synthetic, runs, model=model, train={"strategy": strategy}, run={"dir": runs, "keep": 100})
    tuned = run(three_workers, job)
    assert [event["epoch"] for event in tuned.history]
    kernels = load(first.run).weights["conv1"]["w"]  # those that it hands back, not the best ones
    np.testing.assert_array_equal(tuned.model.weights["conv1"]["w"], kernels)
    assert tuned.model.job.model.layers == first.model.job.model.layers

    stopped = run_directory_without_epochs(tuned.run)
    shutil.rmtree(first.run)
    again = run(three_workers, json.loads((stopped / "job.json").read_text()), resume=stopped)
    np.testing.assert_array_equal(again.model.weights["conv1"]["w"], kernels)


def run_directory_without_epochs(run: Path) -> Path:
    """The run as it was when its first checkpoint was all that it had."""
    for checkpoint in (run / "checkpoints").iterdir():
        if checkpoint.name != "step-000000000":
            shutil.rmtree(checkpoint)
    (run / "events.jsonl").unlink()
    (run / "summary.json").unlink()
    return run


def test_local_workers_leave_the_processor_to_training(three_workers: Client) -> None:
    """Dask looks after them once a second, not fifty times, and keeps no samples of what they do."""

    def settings(dask_worker: Any) -> tuple[str | None, float, bool]:
        import os

        timers = dask_worker.periodic_callbacks
        return os.environ.get("MALLOC_ARENA_MAX"), timers["tick"].callback_time, "profile" in timers

    settings.__module__ = "__main__"  # the workers do not have this file
    assert set(three_workers.run(settings).values()) == {("1", 1000.0, False)}
