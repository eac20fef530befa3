"""What a worker refuses before it takes memory for a run."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daskcnn.arrays import Backend, Device, Workspace
from daskcnn.cluster.link.calls import NotYet, Refusal, WorkersLost, returns_refusals
from daskcnn.cluster.run import results as run_results
from daskcnn.cluster.run.results import Results
from daskcnn.cluster.worker import session, tasks
from daskcnn.errors import ClusterError
from daskcnn.job.dataset import opened
from daskcnn.job.network import vector_bytes
from daskcnn.job.resolve import resolve
from tests import standin
from tests.tiny_runs import tiny_data, tiny_job


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="the worker would have its GPU")
def test_a_worker_without_its_gpu_says_so_in_a_value(tmp_path: Path) -> None:
    """Dask would print a traceback on the worker for an exception."""
    job = resolve(tiny_job(tiny_data(tmp_path), train={"threads": 1}))
    refused = tasks.calibrate("run", job, "gpu", opened(job.data).fingerprint)
    assert isinstance(refused, Refusal)
    assert isinstance(refused.error, ClusterError)
    assert "CuPy is not installed" in refused.error.reason


def test_a_worker_that_sees_other_data_says_so_in_a_value(tmp_path: Path) -> None:
    refused = tasks.calibrate("run", resolve(tiny_job(tiny_data(tmp_path))), "cpu", "another")
    assert isinstance(refused, Refusal)
    assert "does not see the data set" in str(refused.error)


def test_a_worker_whose_gpu_is_out_of_memory_says_so_in_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in device has no memory for a step. CuPy's error is a MemoryError too."""

    def refuse(array: Any) -> Any:
        raise MemoryError("out of memory allocating 8,589,934,592 bytes")

    backend = Backend("standin", standin.xp, refuse, standin.STANDIN.to_host, lambda: None)
    full = Device(backend, workspace=Workspace(standin.xp))
    monkeypatch.setattr(Device, "of", lambda *_, **__: full)
    job = resolve(tiny_job(tiny_data(tmp_path), train={"threads": 1}))
    refused = tasks.calibrate("full", job, "cpu", opened(job.data).fingerprint)
    assert isinstance(refused, Refusal)
    assert "out of memory while it was calibrated (out of memory allocating" in str(refused.error)
    assert "lower train.batch_size" in str(refused.error)


def test_what_a_task_refuses_is_raised_in_the_driver() -> None:
    """With all that the error says, after the journey."""
    error = ClusterError("device gpu", "CuPy is not installed", "pip install it")
    sent = pickle.loads(pickle.dumps(returns_refusals(raising(error))()))  # noqa: S301
    workers: Any = SimpleNamespace()
    future: Any = SimpleNamespace(key="task", result=lambda timeout: sent)
    with pytest.raises(ClusterError) as caught:
        Results(workers, 1.0).fetch(future)
    assert (caught.value.value, caught.value.remedy) == ("device gpu", "pip install it")


def test_a_worker_that_was_started_anew_at_its_address_is_lost_and_may_come_again() -> None:
    """The whole run ended: where the driver has not looked round meanwhile, the worker seems to be the same."""
    task = returns_refusals(partial(session.session_of, "a run", "tcp://a:1"))
    sent = pickle.loads(pickle.dumps(task()))  # noqa: S301 - our own
    alive = {"desk": SimpleNamespace(address="tcp://a:1"), "other": SimpleNamespace(address="tcp://a:10")}
    future: Any = SimpleNamespace(key="task", result=lambda timeout: sent)
    workers: Any = SimpleNamespace(alive=alive)
    with pytest.raises(WorkersLost, match=r"^desk$"):
        Results(workers, 1.0).fetch(future)
    del alive["desk"]
    with pytest.raises(ClusterError, match="started anew"):
        Results(workers, 1.0).fetch(future)


class Slow:
    """A task that has ended, and whose result takes longer than a turn to come, if it takes that long."""

    def __init__(self, key: str) -> None:
        self.key, self.status, self.turns = key, "finished", list[float]()

    def result(self, timeout: float) -> str:
        self.turns.append(timeout)
        raise TimeoutError

    def cancelled(self) -> bool:
        return self.status == "cancelled"


def test_a_result_that_takes_longer_than_a_look_comes_by_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask begins the transfer anew at each question: 1 GB over a slow link would never come."""
    calls, looks = dict[str, Future[str]](), list[None]()
    monkeypatch.setattr(run_results, "LOOK", 0.0)
    monkeypatch.setattr(run_results, "begin", lambda client, call: calls.setdefault(call, Future()))
    client = SimpleNamespace(gather=lambda future, asynchronous: future.key)

    def look() -> None:
        looks.append(None)
        if len(looks) == 40:
            calls["task"].set_result("here")

    workers: Any = SimpleNamespace(look_round=look, connection=SimpleNamespace(client=client))
    future: Any = Slow("task")
    results = Results(workers, 300.0)
    assert results.result(future) == "here"
    assert (len(looks), len(future.turns), [*calls]) == (40, 1, ["task"])
    with pytest.raises(NotYet):
        results.fetch(future)
    assert len(future.turns) == 2, "the next result of the task begins with a turn of its own"


def test_a_transfer_that_nobody_waits_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = dict[str, Future[str]]()
    monkeypatch.setattr(run_results, "begin", lambda client, call: calls.setdefault(call, Future()))
    client = SimpleNamespace(gather=lambda future, asynchronous: future.key)
    workers: Any = SimpleNamespace(connection=SimpleNamespace(client=client))
    one, other = Slow("one"), Slow("other")
    results = Results(workers, 300.0)
    for future in (one, other):
        with pytest.raises(NotYet):
            results.fetch(future)
        one.status = "cancelled"
    assert {key: call.cancelled() for key, call in calls.items()} == {"one": True, "other": False}


@pytest.mark.parametrize("status", ["finished", "error"])
def test_a_question_that_dask_itself_has_cancelled_is_asked_again(status: str) -> None:
    """`distributed.utils.sync` has no result then. A task's own such mistake is raised."""

    def result(timeout: float) -> str:
        if status == "error" or not looks:
            raise UnboundLocalError("cannot access local variable 'result'")
        return "here"

    looks: list[None] = []
    workers: Any = SimpleNamespace(look_round=lambda: looks.append(None))
    future: Any = SimpleNamespace(key="task", status=status, result=result)
    if status == "error":
        with pytest.raises(UnboundLocalError):
            Results(workers, 300.0).result(future)
    else:
        assert Results(workers, 300.0).result(future) == "here"


def test_a_mistake_of_ours_is_no_refusal() -> None:
    with pytest.raises(ZeroDivisionError):
        returns_refusals(raising(ZeroDivisionError()))()


def raising(error: Exception) -> Callable[[], int]:
    def task() -> int:
        raise error

    return task


@pytest.mark.parametrize("missing", [0, 1])
def test_a_network_whose_vectors_are_more_than_the_workers_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    hidden = [{"layer": "dense", "units": 500}, {"layer": "dense", "units": 10}]
    job = resolve(tiny_job(tiny_data(tmp_path), model={"layers": hidden}))
    limit = vector_bytes(job, opened(job.data)) - missing
    memory = SimpleNamespace(memory_limit=limit)
    state = SimpleNamespace(nthreads=1)
    worker = SimpleNamespace(address="tcp://a", state=state, memory_manager=memory, plugins={})
    monkeypatch.setattr(session, "get_worker", lambda: worker)
    if missing:
        with pytest.raises(ClusterError, match=r"weights, gradients and optimizer take .* smaller network"):
            session.open_session("run", job, "cpu")
    else:
        session.open_session("run", job, "cpu")
        session.forget_run("run")


def test_a_worker_that_hears_late_that_it_was_let_go_keeps_a_session_that_was_begun_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = resolve(tiny_job(tiny_data(tmp_path), train={"threads": 1}))
    memory = SimpleNamespace(memory_limit=1 << 30)
    worker = SimpleNamespace(
        address="tcp://a", state=SimpleNamespace(nthreads=1), memory_manager=memory, plugins=dict[str, Any]()
    )
    monkeypatch.setattr(session, "get_worker", lambda: worker)
    session.open_session("run", job, "cpu", number=1)
    again = session.open_session("run", job, "cpu", number=2)
    session.forget_run("run", 1)
    assert session.session_of("run") is again
    assert not again.farewell.done
    session.forget_run("run", 2)
    assert again.farewell.done, "it holds the worker's end up no more"
    with pytest.raises(session.SessionGone):
        session.session_of("run")
