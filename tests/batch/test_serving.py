"""The service at a scheduler: requests come and are answered, schedulers and services come and go."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster

from daskcnn import __version__
from daskcnn.batch import asking, serving, submission
from daskcnn.batch.asking import printed
from daskcnn.batch.desk import QueueDesk, Unacknowledged, ask_service
from daskcnn.batch.handle import JobFailed, SubmittedJob, submit
from daskcnn.batch.serving import Attending, alone, end_drivers
from daskcnn.batch.spool import Spool
from daskcnn.cluster.link import connect
from daskcnn.errors import ClusterError, DataError, Interrupted, JobError
from daskcnn.job.tables import Cluster
from tests.batch.fake_queue import FakeQueue
from tests.batch.queues import submission as job_of
from tests.first_process import first_process, terminate


@contextmanager
def scheduler(port: int = 0) -> Iterator[LocalCluster]:
    how: dict[str, Any] = {"n_workers": 0, "processes": False, "protocol": "tcp", "dashboard_address": ":0"}
    with LocalCluster(scheduler_port=port, silence_logs=50, **how) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with scheduler() as made:
        yield made


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "AGAIN", 0.1)
    monkeypatch.setattr(serving, "IDLE", 0.1)
    monkeypatch.setattr(serving, "BUSY", 0.05)
    monkeypatch.setattr(submission, "PAUSE", 0.0)
    monkeypatch.setattr("daskcnn.batch.handle.LOOK", 0.05)
    monkeypatch.setattr(asking, "LOOK", 0.05)
    monkeypatch.setattr(connect, "TRY", 1.0)


@pytest.fixture(autouse=True)
def scheduler_of_dask() -> Iterator[None]:
    """Restore Dask's setting, which services in several threads of a process each set, and leave set."""
    with dask.config.set(scheduler=None):
        yield


class Served:
    """A queue that is served in a thread."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.said, self._ends = folder, list[str](), threading.Event()
        self._address, self._thread = address, threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        queue = FakeQueue(self.folder)
        queue.service._say = self.said.append
        queue.said = self.said
        try:
            Attending(queue.service, Cluster(scheduler=self._address), self._check, self.said.append).keep()
        except Interrupted:
            queue.spool.close()

    def _check(self) -> None:
        if self._ends.is_set():
            raise Interrupted.by(15)

    def wait_for(self, words: str) -> None:
        until(lambda: any(words in text for text in self.said))

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def served(folder: Path, address: str) -> Iterator[Served]:
    made = Served(folder, address)
    try:
        made.wait_for("serving at scheduler")
        yield made
    finally:
        made.end()


def test_a_job_is_submitted_through_the_scheduler_from_python(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Client(cluster, set_as_default=False) as client, served(tmp_path, cluster.scheduler_address):
        tables = {"cluster": {"workers": "cpu=1"}, "train": {"epochs": 1}, "run": {"name": "first"}}
        job = submit(client, tables, priority=3, hold=True)
        assert (job.id, job.run) == (1, tmp_path / "first")
        assert job.status()["state"] == "held"
        job.release()
        job.hold()
        second = submit(client, {"cluster": {"scheduler": cluster.scheduler_address}}, after=[job])
        assert (second.status()["after"], second.status()["workers"]) == ([1], {})
        assert job.logs() == ""
        with pytest.raises(TimeoutError, match="job 1 is held after 0 s"):
            job.wait(0)
        job.cancel()
        with pytest.raises(JobFailed, match=r"job 1: cancelled \(cancelled before it ran\)"):
            job.result()
        assert (second.status()["state"], list(job.events())) == ("held", [])
        with pytest.raises(DataError, match="it has ended: cancelled"):
            job.cancel()
        with pytest.raises(JobError, match=r"epochs"):
            submit(client, {"train": {"epochs": 0}})
        assert client.run_on_scheduler(rows) == [["1", "cancelled"], ["2", "held"]]


def rows(dask_scheduler: Any) -> list[list[str]]:
    return [[row[0], row[3]] for row in dask_scheduler.plugins["daskcnn-queue"].rows]


def test_where_no_service_has_ever_been_a_request_is_refused_at_once() -> None:
    refused = pytest.raises(ClusterError, match="no service of a queue is there; start one with `daskcnn serve")
    with scheduler() as bare, Client(bare, set_as_default=False) as client, refused:
        ask_service(client, {"ask": "jobs", "version": __version__})


def test_without_a_service_a_request_is_refused_at_once(cluster: LocalCluster, tmp_path: Path) -> None:
    with Client(cluster, set_as_default=False) as client:
        for _ in range(2):
            with pytest.raises(ClusterError, match="no service of a queue is there; start one with `daskcnn serve"):
                ask_service(client, {"ask": "jobs", "version": __version__})
            with served(tmp_path, cluster.scheduler_address):
                assert ask_service(client, {"ask": "jobs", "version": __version__}) == []


def test_a_submitter_of_another_version_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    with Client(cluster, set_as_default=False) as client, served(tmp_path, cluster.scheduler_address):
        refused = pytest.raises(ClusterError, match="version 9 asks; the service has")
        with refused:
            ask_service(client, {"ask": "jobs", "version": "9"})


def test_a_second_service_waits_for_the_first_one(cluster: LocalCluster, tmp_path: Path) -> None:
    with served(tmp_path / "a", cluster.scheduler_address) as first:
        second = Served(tmp_path / "b", cluster.scheduler_address)
        second.wait_for("which serves another queue at scheduler")
        first.end()
        second.wait_for("serving at scheduler")
        second.end()


def test_a_second_service_waits_for_the_spool(tmp_path: Path) -> None:
    said: list[str] = []
    entered, ended = threading.Event(), threading.Event()

    def second() -> None:
        with alone(tmp_path, lambda: None, said.append):
            entered.set()
        ended.set()

    with alone(tmp_path, lambda: None, said.append):
        threading.Thread(target=second).start()
        until(lambda: bool(said))
        assert not entered.is_set()
    assert ended.wait(10)
    assert "which serves" in said[0]
    assert said[0].startswith("waiting for process")


def test_a_scheduler_that_goes_away_is_found_again(tmp_path: Path) -> None:
    with scheduler() as first:
        address = first.scheduler_address
        queue = Served(tmp_path, address)
        queue.wait_for("serving at scheduler")
    queue.wait_for("trying again")
    queue.said.clear()
    with scheduler(int(address.rpartition(":")[2])) as second, Client(second, set_as_default=False) as client:
        queue.wait_for("serving at scheduler")
        assert ask_service(client, {"ask": "jobs", "version": __version__}) == []
        queue.end()


def test_a_submission_that_is_not_acknowledged_is_sent_again_and_is_one_job(tmp_path: Path) -> None:
    queue = FakeQueue(tmp_path)
    heard = 0

    def ask(name: str, **values: Any) -> Any:
        nonlocal heard
        answer, heard = queue.requests.called(name, values), heard + 1
        if heard < 3:
            raise Unacknowledged("scheduler", "the service has ended meanwhile")
        return answer

    message = submission.message_of({"cluster": {"workers": "cpu=1"}})
    assert submission.send(ask, [message])["ids"] == [1]
    assert (heard, len(queue.spool.jobs())) == (3, 1)
    heard = -9
    with pytest.raises(Unacknowledged):
        submission.send(ask, [message])
    queue.close()


def test_a_lost_service_wakes_those_who_wait(cluster: LocalCluster) -> None:
    async def asked() -> Any:
        import asyncio

        desk = QueueDesk(None)
        assert await desk.ask({}) == {"absent": True}
        assert (desk.attend("one", "me"), desk.attend("two", "you")) == ("", "me")
        waiting = asyncio.create_task(desk.ask({}))
        await asyncio.sleep(0)
        desk.remove_client(None, "two")
        desk.remove_client(None, "one")
        silent = desk.attend("two", "you"), await desk.ask({}, within=0.01)
        return await waiting, silent, await desk.exchange("one", [], [], 0)

    with Client(cluster, set_as_default=False) as client:
        assert client.sync(asked) == (None, ("", {"silent": 0.01}), None)


def test_logs_are_followed_until_the_job_has_ended(tmp_path: Path) -> None:
    queue = FakeQueue(tmp_path, "desk-1")
    number = queue.add()
    queue.turn()
    log = queue.drivers.folder(number) / "output.log"
    found = printed(lambda name, **values: queue.requests.called(name, values), number, follow=True)
    log.write_text("one\n")
    assert next(found) == "one\n"
    assert next(found) == ""
    queue.end(number, 0)
    queue.turn(cluster=False)
    assert [*found] == [""]
    queue.close()


def test_those_who_follow_a_job_ask_again_while_the_service_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def ask(name: str, **_: Any) -> Any:
        asked.append(name)
        if len(asked) % 3:
            raise [ClusterError, Unacknowledged][len(asked) % 2]("scheduler", "the service has ended meanwhile")
        return {"state": "done", "text": "", "offset": 0, "more": False}

    monkeypatch.setattr(asking, "LOOK", 0.0)
    monkeypatch.setattr(SubmittedJob, "_asking", contextmanager(lambda self: (each for each in [ask])))
    job = SubmittedJob(1, Path())
    assert (job.wait(), job.wait(60), [*job.events()], len(asked)) == ("done", "done", [], 9)
    with pytest.raises(ClusterError, match="ended meanwhile"):
        job.wait(0)
    with pytest.raises(ClusterError, match="ended meanwhile"):
        next(printed(ask, 1, follow=True))
    more = {"text": "", "offset": 0, "more": True}
    answers = iter([more, ClusterError("it is away"), more | {"more": False}])
    assert [*printed(lambda *_, **__: given(next(answers)), 1, follow=True)] == ["", ""]


def given(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def test_a_handle_gives_events_and_says_where_a_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = FakeQueue(tmp_path, "desk-1")
    number = queue.add(name="first")
    queue.turn()
    run = Path(queue.job(number).run)
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text('{"event": "epoch", "epoch": 1.0, "step": 3}\n')
    queue.end(number, 0)
    queue.turn(cluster=False)
    job = SubmittedJob(number, run)
    here = contextmanager(lambda self: iter([lambda name, **values: queue.requests.called(name, values)]))
    monkeypatch.setattr(SubmittedJob, "_asking", here)
    assert [event.kind for event in job.events()] == ["epoch"]
    with pytest.raises(DataError, match="its run cannot be seen from here; read it on the service's machine"):
        job.result()
    queue.close()


def test_the_spool_is_asked_on_the_machine_of_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Spool(tmp_path / "spool") as spool:
        spool.add([job_of()], tmp_path, 0)
    with asking.asking(str(tmp_path / "spool"), {}) as ask:
        assert ask("cancel", number=1)["state"] == "cancelled"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ClusterError, match="give --scheduler ADDRESS, or --spool DIR"), asking.asking(None, {}):
        pass


def test_drivers_that_are_to_end_with_their_service_are_asked_once_and_waited_for(tmp_path: Path) -> None:
    queue = FakeQueue(tmp_path, "desk-1", "desk-2", "desk-3")
    asked, ended, cancelled = (queue.add() for _ in range(3))
    queue.turn()
    queue.wait(lambda: all(map(queue.started, (asked, ended, cancelled))))
    queue.end(ended, 5)
    queue.spool.cancel(cancelled, queue.now)
    queue.spool.signalled(cancelled, 1)  # asked before: a second time would end a driver without saving
    ends = threading.Timer(0.3, lambda: (queue.drivers.folder(cancelled) / "end").write_text("130\n"))
    ends.start()
    end_drivers(queue.service, queue.said.append)
    assert "waiting for 3 jobs to be saved; a second signal ends all at once" in queue.said
    found = [(queue.job(number).state, queue.job(number).exit_code) for number in (asked, ended, cancelled)]
    assert found == [("waiting", 143), ("waiting", 5), ("cancelled", 130)]
    queue.close()


SERVICE = """
import sys
from pathlib import Path
from daskcnn.batch.serving import serve
from daskcnn.job.tables import Cluster
from tests.batch.fake_queue import FakeQueue

folder = Path(sys.argv[1])
queue = FakeQueue(folder, "desk-1")
number = queue.add()
queue.turn()
queue.wait(lambda: queue.started(number))
serve(Cluster(scheduler="tcp://127.0.0.1:1"), queue.spool.folder, runs=folder, say=lambda text: print(text, flush=True))
"""


def test_a_service_that_is_process_1_ends_behind_its_drivers(tmp_path: Path) -> None:
    with first_process(sys.executable, "-c", SERVICE, str(tmp_path)) as started:
        assert started.stdout is not None
        while "queue in" not in (line := started.stdout.readline()):
            assert line
        terminate(started)
        said, _ = started.communicate(timeout=20)
    assert "the service ends; 0 jobs still running" in said
    with Spool(tmp_path / "spool") as spool:
        assert [(job.state, job.exit_code) for job in spool.jobs()] == [("waiting", 143)]
