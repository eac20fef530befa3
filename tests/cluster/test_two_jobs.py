"""Two jobs on one scheduler, with real processes."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Event
from typing import Any

import pytest
from distributed import Client

from daskcnn.cluster.link.calls import ask_scheduler
from daskcnn.cluster.link.leases import leases_on
from daskcnn.cluster.spread.spread import spread
from tests.cluster.by_hand import daskcnn_run, job_file, process, wait_for_checkpoint
from tests.cluster.cluster_jobs import Watch, run, small_job, wait_until

pytestmark = pytest.mark.cluster


def twice(number: int, *, kind: str, threads: int) -> int:
    return 2 * number


def workers_of(watch: Watch) -> set[str]:
    return {event["worker"] for event in watch.of("round")}


def test_two_jobs_at_once_share_the_server_and_no_worker(three_workers: Client, synthetic: str, runs: str) -> None:
    """Every sample is presented as often as it should. What is spread meanwhile, as predictions are, is done too."""

    def trained(strategy: str, workers: int) -> tuple[Watch, Any]:
        watch = Watch()
        train = {"strategy": strategy, "epochs": 2, "partition": "udpa"}
        cluster = {"workers": {"cpu": workers}, "wait": 60.0}
        with Client(three_workers.scheduler.address, set_as_default=False) as client:
            return watch, run(
                client, small_job(synthetic, runs, train=train, cluster=cluster, run={"name": strategy}), watch
            )

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(trained, "bsp", 2), pool.submit(trained, "sgwu", 1)
        assert sorted(spread(three_workers, twice, range(6), whole=True)) == [(n, 2 * n) for n in range(6)]
        both = [first.result(), second.result()]
    assert [result.summary["status"] for _, result in both] == ["done", "done"]
    assert [sum(event["samples"] for event in watch.of("round")) for watch, _ in both] == [2 * 800, 2 * 800]
    (bsp, _), (sgwu, _) = both
    assert (len(workers_of(bsp)), len(workers_of(sgwu))) == (2, 1)
    assert not workers_of(bsp) & workers_of(sgwu)
    assert ask_scheduler(three_workers, leases_on) == ()


def test_a_killed_driver_frees_its_workers(three_workers: Client, synthetic: str, tmp_path: Path) -> None:
    """A job that waits for them is told whose they are, and begins."""
    train = {"epochs": 400, "strategy": "sgwu"}
    cluster = {"workers": {"cpu": 3}, "scheduler": three_workers.scheduler.address}
    file = job_file(tmp_path, synthetic, train=train, cluster=cluster, run={"name": "killed"})
    job = small_job(synthetic, str(tmp_path / "runs"), cluster={"workers": {"cpu": 1}})
    said, admitted = Queue[str](), Event()
    with process(*daskcnn_run(file)) as driver, ThreadPoolExecutor(1) as pool:
        wait_for_checkpoint(tmp_path / "runs" / "killed", driver)
        watch = Watch("start", admitted.set)
        waits = pool.submit(run, three_workers, job, watch, say=said.put)
        while "run killed (" not in said.get(timeout=60):
            assert not waits.done(), waits.result()
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        wait_until(lambda: all(lease.holder.run != "killed" for lease in ask_scheduler(three_workers, leases_on)), 10)
        assert admitted.wait(timeout=60)
        assert waits.result(60).summary["status"] == "done"
