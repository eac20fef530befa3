"""Calls to a cluster that hangs: each ends within its limit, names who did not answer, and heeds signals meanwhile."""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.client import ClosedClientError

from daskcnn.cluster.link import calls, members
from daskcnn.cluster.link import client as connection
from daskcnn.cluster.link.calls import (
    ServerLost,
    Unanswered,
    WorkersLost,
    answer_of_actor,
    ask_scheduler,
    ask_workers,
    begin,
    cancel,
    silent_among,
)
from daskcnn.cluster.link.members import Members, advertised, chosen
from daskcnn.cluster.run import admission
from daskcnn.cluster.run import workers as run_workers
from daskcnn.cluster.run.admission import admit
from daskcnn.cluster.run.context import RunContext
from daskcnn.errors import ClusterError, Interrupted, Lost
from daskcnn.events import Warned
from daskcnn.job.tables import Cluster, Job, Workers
from tests.fake_client import fake_client

SHORT = 0.8  # seconds of a limit: a busy machine answers within it too
A, B, C, S = (f"tcp://10.0.0.2:400{i}" for i in range(4))


def there(*addresses: str) -> dict[str, Any]:
    """What the scheduler says of CPU workers; S is set apart for the server."""
    common = {"host": "10.0.0.2", "nthreads": 1, "memory_limit": 4 << 30}
    return {a: common | {"name": a, "resources": {"PS": 1} if a == S else {"CPU": 1}} for a in addresses}


def interrupted_after(seconds: float) -> Callable[[], None]:
    """What raises after so many seconds, as a signal's handler would have it."""
    begun = time.monotonic()

    def check() -> None:
        if time.monotonic() - begun > seconds:
            raise Interrupted.by(15)

    return check


# --- the calls ---


def test_workers_are_asked_at_the_same_time_and_the_silent_ones_are_named() -> None:
    with fake_client(there(A, B, C), hang={A, C}) as client:
        answers = ask_workers(client, int, [A, B, C], "7", within=SHORT)
    assert (answers.given, answers.failed, answers.silent) == ({B: 7}, {}, (A, C))


def test_one_answer_is_enough_where_any_of_them_will_do() -> None:
    with fake_client(there(A, B, C), hang={C}, lost={A}) as client:
        answers = ask_workers(client, int, [A, B, C], "7", within=600.0, one=True)
    assert (answers.given, answers.silent) == ({B: 7}, (C,))


def test_an_error_of_a_worker_is_its_answer() -> None:
    def spoil(answer: Any) -> Any:
        return ValueError("no such thing")  # as on_error="return" has it

    with fake_client(there(A, B), lost={B}) as client:
        answers = ask_workers(client, int, [A, B])
        assert (dict(answers.given), list(answers.failed), answers.silent) == ({A: 0}, [B], ())
        client.change = spoil
        assert isinstance(ask_workers(client, int, [A]).failed[A], ValueError)


def test_the_time_in_which_this_process_was_stopped_is_not_the_scheduler_s_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Ctrl-Z and `fg` have it: the clock makes a leap while a call is under way."""
    clock = itertools.count(0.0, 100.0)
    with fake_client({}, hang={"scheduler"}) as client:
        monkeypatch.setattr(calls, "wait", lambda waiting, timeout: SimpleNamespace(not_done=waiting))
        monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        with pytest.raises(Unanswered):
            ask_scheduler(client, int, within=5.0)
        assert next(clock) >= 2 * 5 * 100, "each leap counts as a second"


def test_a_scheduler_that_did_not_answer_is_waited_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LAST", 0.1)
    with fake_client({}, hang={"scheduler"}) as client:
        link = connection.Connection(client, calls.no_check)
        monkeypatch.setattr(calls, "_limit", lambda client, within: 0.1)
        with pytest.raises(Lost, match=r"no answer within 0\.1 s; is its process stopped"):
            link.workers()
        monkeypatch.undo()
        monkeypatch.setattr(calls, "LAST", 0.1)
        with pytest.raises(Unanswered, match=r"no answer within 0\.1 s"):
            ask_scheduler(client, int, within=1000.0)


def test_nobody_to_ask() -> None:
    with fake_client({}) as client:
        assert silent_among(client, []) == set()


@pytest.mark.parametrize(
    "call",
    [
        lambda client, check: ask_workers(client, int, [A], check=check),
        lambda client, check: ask_scheduler(client, int, check=check),
        lambda client, check: members.present(client, check),
        lambda client, check: answer_of_actor(NeverAnswers(), within=60, check=check),
    ],
)
def test_a_signal_ends_waiting_at_once(call: Callable[..., Any]) -> None:
    with fake_client(there(A), hang={A, "scheduler"}) as client, pytest.raises(Interrupted):
        call(client, interrupted_after(0.2))


class NeverAnswers:
    """An actor's answer that does not come."""

    def result(self, timeout: float) -> Any:
        time.sleep(timeout)
        raise TimeoutError


def test_a_scheduler_that_is_gone_is_named_with_what_to_do_first() -> None:
    with fake_client({}) as client:
        client.status = "closed"
        with pytest.raises(Lost, match="if it has ended, start it and its workers again, then go on"):
            connection.Connection(client, lambda: None).workers()


def test_a_scheduler_is_named_where_dask_has_closed_the_client_meanwhile() -> None:
    with fake_client(there(A)) as client:
        to = connection.Connection(client, calls.no_check)
        assert to.workers().keys() == {A}
        client.scheduler, client.status = None, "closed"
        with pytest.raises(Lost, match=r"^scheduler \S+: connection lost"):
            to.workers()
        assert to.processing() == {}


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_client_that_dask_connects_again_is_waited_for(monkeypatch: pytest.MonkeyPatch, comes_back: bool) -> None:
    """The scheduler answers already. Its loss ended the run before."""
    monkeypatch.setattr(connection, "SCHEDULER", 10.0 if comes_back else 0.2)
    with fake_client(there(A)) as client:
        looks = itertools.count()

        def heed() -> None:
            if comes_back and next(looks) == 4:
                client.status = "running"

        client.status = "connecting"
        to = connection.Connection(client, heed)
        if comes_back:
            assert to.workers().keys() == {A}
        else:
            with pytest.raises(Lost, match="connection lost"):
                to.workers()


def test_a_scheduler_that_hangs_is_named() -> None:
    with (
        fake_client(there(A), hang={"scheduler"}) as client,
        pytest.raises(Unanswered, match=r"scheduler tcp://10.0.0.1:8786: no answer within 0.8 s; "),
    ):
        ask_scheduler(client, int, within=SHORT)


def test_an_actor_that_hangs() -> None:
    with pytest.raises(Unanswered):
        answer_of_actor(NeverAnswers(), within=SHORT)


def test_a_call_that_is_cancelled_before_it_begins_is_ended() -> None:
    """Not left behind unawaited, which Python warns of."""
    with fake_client({}) as client:
        held, let_go = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            let_go.wait(10 * SHORT)

        client.loop.asyncio_loop.call_soon_threadsafe(hold)
        assert held.wait(10 * SHORT)
        call = client.scatter([0], workers=[])
        begin(client, call).cancel()
        let_go.set()
        assert ask_scheduler(client, int, within=10 * SHORT) == 0  # the loop went on
        assert inspect.getcoroutinestate(call) == inspect.CORO_CLOSED


def test_a_connection_that_is_closed_is_an_error_of_the_connection() -> None:
    with fake_client({}) as client:
        pass
    with pytest.raises(ConnectionError, match="closed"):
        ask_scheduler(client, int)


# --- before the run ---


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "ANSWER", SHORT)
    monkeypatch.setattr(members, "POLL", 0.01)
    monkeypatch.setattr(admission, "check_dataset", lambda job, fingerprint, index: None)


def admitted(client: Any, *, wait: float = 0.5, check: Callable[[], None] = lambda: None, **workers: int) -> Any:
    job = Job(cluster=Cluster(workers=Workers(**workers), wait=wait))
    return admit(client, job, "feed", check)


@pytest.mark.usefixtures("quick")
def test_a_run_starts_without_a_worker_that_hangs_where_others_are_enough() -> None:
    with fake_client(there(A, B, C), hang={A}) as client:
        found, (warning,) = admitted(client, cpu=2)
    assert [m.address for m in found.workers] == [B, C]
    assert warning.startswith(f"worker {A}: no answer within 0.8 s; ")
    assert "the run starts without it" in warning


@pytest.mark.usefixtures("quick")
def test_any_number_of_workers_are_those_that_answer() -> None:
    with fake_client(there(A, B, S), hang={B, S}) as client:
        found, warnings = admitted(client)
    assert ([m.address for m in found.workers], found.server.address) == ([A], A)
    assert len(warnings) == 2


@pytest.mark.usefixtures("quick")
def test_a_worker_that_no_job_asks_for_is_not_asked() -> None:
    with fake_client(there(A, B, C), hang={C}) as client:
        asked = set[str]()
        client.before = lambda address, _: asked.add(address)
        found, warnings = admitted(client, cpu=1)
    assert asked == {A, B}, "the worker that trains, and the one that the server goes to"
    assert (len(found.workers), warnings) == (1, ())


@pytest.mark.usefixtures("quick")
def test_too_few_workers_that_answer_are_an_unusable_cluster() -> None:
    with fake_client(there(A, B), hang={B}) as client, pytest.raises(ClusterError) as caught:
        admitted(client, cpu=2, wait=1.0)
    assert caught.value.exit_code == 3
    assert "1 more with CPU=1" in str(caught.value)
    assert f"worker {B}: no answer within" in str(caught.value)
    assert "advertises none" not in str(caught.value)


@pytest.mark.usefixtures("quick")
def test_a_worker_that_hangs_over_its_data_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LOOK_AT_DATA", SHORT)
    with fake_client(there(A, B)) as client:
        client.before = lambda address, look: setattr(client, "hang", {A} if isinstance(look, partial) else set())
        found, warnings = admitted(client)
    assert [m.address for m in found.workers] == [B]
    assert len(warnings) == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("hang", [A, "scheduler"])
def test_a_signal_is_heeded_before_the_run(hang: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "ANSWER", 60.0)
    with fake_client(there(A), hang={hang}) as client, pytest.raises(Interrupted):
        admitted(client, check=interrupted_after(0.2))


@pytest.mark.usefixtures("quick")
def test_a_worker_that_died_since_is_named() -> None:
    with fake_client(there(A), lost={A}) as client, pytest.raises(ClusterError, match=rf"cpu-0 \({A}\): was lost"):
        admitted(client)


# --- while the run goes on ---


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = {"within": SHORT}
    monkeypatch.setattr(connection, "silent_among", lambda *args, **kw: silent_among(*args, **kw | limited))
    monkeypatch.setattr(connection, "ask_workers", partial(ask_workers, within=SHORT))
    monkeypatch.setattr(run_workers, "EXPLAINED", SHORT)


def context_of(client: Any, events: list[Any], *, signum: Callable[[], int | None] = lambda: None) -> RunContext:
    found: Members = chosen(advertised(client.workers), Workers())
    job = Job(cluster=Cluster(stall_timeout=SHORT))
    none: Any = None
    return RunContext.of(client, "a run", job, none, found, emit=events.append, save=none, interrupted=signum)


@pytest.mark.usefixtures("fast")
def test_data_for_a_worker_that_hangs_names_it() -> None:
    with fake_client(there(A, B, S)) as client:
        context = context_of(client, [])
        client.hang = {B}
        assert context.dispatch.send("data", "cpu-0").data == "data"
        with pytest.raises(WorkersLost, match="cpu-1"):
            context.dispatch.send("data", "cpu-1")
        client.hang = {S}
        with pytest.raises(ServerLost):
            context.dispatch.send_to("data", S)


@pytest.mark.usefixtures("fast")
def test_a_result_that_a_leaver_has_taken_along_is_explained_by_its_loss() -> None:
    """A worker was shut down with a result that was to be fetched, before the run was told that it leaves."""
    with fake_client(there(A, B, S)) as client:
        context = context_of(client, [])
        client.workers[B]["status"] = "closing_gracefully"
        assert context.workers.look_round()
        assert context.workers.leavers == [B]
        del client.workers[B]
        with pytest.raises(WorkersLost, match="cpu-1"):
            context.workers.explain(KeyError("its result"))


@pytest.mark.usefixtures("fast")
def test_data_that_does_not_arrive_though_all_answer_ends_the_run_resumably(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_client(there(A)) as client:
        context = context_of(client, [])

        async def slow(*_: Any, **__: Any) -> Any:
            await client._perhaps("network")

        client.scatter, client.hang = slow, {"network"}
        with pytest.raises(Lost, match=rf"{A}: data did not arrive within 0.8 s; "):
            context.dispatch.send("data", "cpu-0")


@pytest.mark.usefixtures("fast")
def test_a_new_server_goes_to_a_worker_that_answers() -> None:
    with fake_client(there(A, B, S)) as client:
        context, asked = context_of(client, []), list[str]()
        client.before = lambda address, function: asked.append(address)
        client.hang = {A}
        assert context.workers.new_host().address == S
        assert asked == [S], "those that train are not waited for"
        client.hang = {S, A}
        assert context.workers.new_host().address == B
        client.hang = {A, B, S}
        with pytest.raises(WorkersLost, match=r"cpu-0, cpu-1"):
            context.workers.new_host()
        context.workers.alive.clear()
        with pytest.raises(Lost, match="no worker is there"):
            context.workers.new_host()


@pytest.mark.usefixtures("fast")
def test_who_does_not_free_what_a_run_keeps_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    with fake_client(there(A, B)) as client:
        context = context_of(client, events, signum=lambda: 15 if client.hang else None)
        client.hang = {B}
        context.close()
    (event,) = events
    assert isinstance(event, Warned)
    assert event.value == f"worker cpu-1 ({B})"
    assert str(event.reason).startswith("no answer")


@pytest.mark.parametrize(
    "ask",
    [
        lambda context: context.connection.scheduler_seconds(),
        lambda context: context.connection.processing(),
        lambda context: context.workers.new_host(),
        lambda context: context.workers.look_round(),
    ],
    ids=["scheduler_seconds", "processing", "new_host", "look_round"],
)
def test_a_signal_is_heeded_while_the_scheduler_hangs(ask: Callable[[RunContext], Any]) -> None:
    with fake_client(there(A)) as client:
        check: list[Callable[[], None]] = []

        def signum() -> int | None:
            try:
                for each in check:
                    each()
            except Interrupted as error:
                return error.signum
            return None

        context = context_of(client, [], signum=signum)
        client.hang = {"scheduler"}
        check.append(interrupted_after(0.2))
        with pytest.raises(Interrupted):
            ask(context)


def test_nothing_is_left_to_cancel_where_the_client_is_closed() -> None:
    """The scheduler is gone then, and all that was under way: the run has to be told so, and not of its client."""

    def refuse() -> None:
        raise ClosedClientError("Client is closed. Can't send cancel-keys message.")

    asked = list[str]()
    there: list[Any] = [SimpleNamespace(cancel=lambda: asked.append("a")), SimpleNamespace(cancel=refuse)]
    cancel(there)
    assert asked == ["a"]
