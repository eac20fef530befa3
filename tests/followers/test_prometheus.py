"""A run's figures for Prometheus: what the events add up to, and what the ports of a real cluster serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest
from distributed import Client, LocalCluster

from daskcnn.cluster.link.members import present
from daskcnn.cluster.link.metrics_port import KEPT, RunFigures, RunsCollector
from daskcnn.errors import ClusterError
from daskcnn.followers import prometheus_metrics
from daskcnn.followers.prometheus_metrics import METRICS, PrometheusMetrics, Tally
from tests.followers.runs_followed import AT, a_run, events, followed
from tests.show.run_events import epoch, round_of

prometheus_client = pytest.importorskip("prometheus_client")


def tallied(*log: Any) -> Tally:
    tally = Tally("it")
    for event in log or a_run():
        tally.apply(event)
    return tally


def served(*figures: RunFigures) -> dict[str, float]:
    """What a registry that has these figures writes out: values by metric and labels."""
    registry, collector = prometheus_client.CollectorRegistry(), RunsCollector()
    registry.register(collector)
    for each in figures:
        collector.keep(each)
    return parsed(prometheus_client.generate_latest(registry).decode())


def parsed(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("daskcnn_")]
    assert len({name for name, _, _ in lines}) == len(lines), "Prometheus refuses a page that has a series twice"
    return {name: float(value) for name, _, value in lines}


def test_events_add_up() -> None:
    found = served(tallied().figures())
    assert found['daskcnn_run_accuracy{part="test",run="it"}'] == 0.5
    assert found['daskcnn_run_epochs{run="it"}'] == 10
    assert found['daskcnn_run_training{run="it"}'] == 0
    assert found['daskcnn_runs{status="done"}'] == 1
    assert found['daskcnn_run_last_event_timestamp_seconds{run="it"}'] == AT + 6
    assert found['daskcnn_worker_seconds_total{kind="wait",run="it",worker="w1"}'] == 4.5


def test_counters_go_on_over_rounds() -> None:
    log = events(
        round_of("w0"), round_of("w0", lr=0.125), {"event": "worker-lost", "worker": "w1"},
        {"event": "warning", "message": "x"},
    )  # fmt: skip
    found = served(tallied(*log).figures())
    assert found['daskcnn_worker_samples_total{run="it",worker="w0"}'] == 24000
    assert found['daskcnn_worker_bytes_total{direction="down",run="it",worker="w0"}'] == 4000
    assert found['daskcnn_worker_pushes_total{run="it",worker="w0"}'] == 2
    assert found['daskcnn_run_learning_rate{run="it"}'] == 0.125
    assert found['daskcnn_run_lost_workers_total{run="it"}'] == found['daskcnn_run_warnings_total{run="it"}'] == 1


def test_the_workers_of_a_sharded_run_have_figures() -> None:
    worker = {"name": "w0", "busy": 3.0, "wait": 1.0, "samples": 100, "bytes_up": 5, "bytes_down": 6}
    found = served(tallied(*events(epoch(workers=[worker]))).figures())
    assert found['daskcnn_worker_seconds_total{kind="compute",run="it",worker="w0"}'] == 3
    assert found['daskcnn_worker_samples_total{run="it",worker="w0"}'] == 100


def test_every_metric_comes_of_some_event() -> None:
    own = epoch(validation={"loss": 1.1, "accuracy": 0.573, "metrics": {"top3": 0.9}})
    assert set(tallied(*a_run(), *events(own)).figures().figures) == set(METRICS)


def test_a_worker_s_figures_are_shown_once_in_a_process_that_has_the_run_s() -> None:
    tally = tallied()
    alone = served(tally.figures_of("w0"), tally.figures_of("w1"))
    assert alone['daskcnn_worker_samples_total{run="it",worker="w1"}'] == 12000
    assert not any("daskcnn_run_loss" in name for name in alone)
    assert served(tally.figures_of("w0"), tally.figures()) == served(tally.figures())


def test_old_runs_are_forgotten() -> None:
    found = served(*(Tally(f"run{i}").figures() for i in range(KEPT + 3)))
    assert found['daskcnn_runs{status="starting"}'] == KEPT
    assert 'daskcnn_run_warnings_total{run="run2"}' not in found


def test_runs_of_one_name_have_series_of_their_own() -> None:
    """Two folders may have a run `lab` each; one that is resumed is the same run."""
    first, second = Tally("lab", "desk-1:/home/a/lab"), Tally("lab", "desk-2:/home/b/lab")
    found = served(first.figures(), second.figures(), Tally("lab", "desk-1:/home/a/lab").figures())
    assert found['daskcnn_runs{status="starting"}'] == 2
    for place in ("desk-1:/home/a/lab", "desk-2:/home/b/lab"):
        assert found[f'daskcnn_run_warnings_total{{run="lab ({place})"}}'] == 0
    assert 'daskcnn_run_warnings_total{run="lab"}' in served(second.figures())


# --- a cluster in this process ---


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    settings: dict[str, Any] = {"processes": False, "dashboard_address": "127.0.0.1:0"}
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, **settings) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def test_the_scheduler_s_port_serves_them(client: Client, tmp_path: Any, path: str) -> None:
    (address,) = present(client)
    log = a_run()
    calibrated = log[1].model_copy(update={"workers": (log[1].workers[0].model_copy(update={"address": address}),)})  # type: ignore[attr-defined]
    with followed(tmp_path, path, client, prometheus=True) as run:
        PrometheusMetrics.check_cluster(client)
        PrometheusMetrics(run).write([log[0], calibrated, *log[2:]])
    port = client.scheduler_info()["services"]["dashboard"]
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        found = parsed(page.read().decode())
    assert found['daskcnn_run_epochs{run="run"}'] == 10
    assert found['daskcnn_worker_samples_total{run="run",worker="w0"}'] == 12000


def test_a_scheduler_without_prometheus_client_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_metrics, "serves_metrics", lambda: False)
    with pytest.raises(ClusterError, match=r"pip install 'daskcnn\[dashboard\]' there"):
        PrometheusMetrics.check_cluster(client)


def test_metrics_of_the_job_are_figures_by_name() -> None:
    judged = {"loss": 1.0, "accuracy": 0.5, "metrics": {"top3": 0.75, "odd": None}}
    found = served(tallied(*events(epoch(validation=judged))).figures())
    assert found['daskcnn_run_metric{metric="top3",part="validation",run="it"}'] == 0.75
    assert not [name for name in found if "odd" in name]
