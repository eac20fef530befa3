"""The shell without any process: exceptions of the cluster as facts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.client import ClosedClientError

from daskcnn.cluster.link.calls import WorkersLost
from daskcnn.cluster.link.client import Connection
from daskcnn.cluster.link.members import Members, advertised
from daskcnn.cluster.run.context import Dispatch, RunContext
from daskcnn.cluster.run.exchange import TaskWork
from daskcnn.cluster.run.results import Results
from daskcnn.cluster.run.workers import RunWorkers
from daskcnn.cluster.shell import shell as shell_module
from daskcnn.cluster.shell.shell import Shell
from daskcnn.errors import Interrupted, Lost
from daskcnn.events import Event, WorkerIgnored
from daskcnn.partition.rounds import Round
from daskcnn.training.coordinator import facts, orders
from tests.cluster.cluster_jobs import wait_until
from tests.cluster.surroundings import Ways
from tests.cluster.test_leases import there
from tests.fake_client import fake_client

UNFIT = "runs dask 1 (here 2)", "install the same versions there"
GONE = Lost("scheduler tcp://s: connection lost")


class Noting:
    """A strategy whose coordinator notes what it is told, and ends the run."""

    def __init__(self) -> None:
        self.state, self.life, self.told = SimpleNamespace(), 3, list[facts.Fact]()
        self.coordinator = self

    def handle(self, fact: facts.Fact) -> list[orders.Order]:
        self.told.append(fact)
        return [orders.End("done")]

    def actions(self, shell: Shell) -> dict[Any, Any]:
        return {}

    def ahead(self) -> None: ...

    def taken(self, fact: facts.Fact) -> None: ...

    def failed(self, name: str, error: Exception) -> facts.Fact:
        raise error

    def close(self) -> None: ...


class Turning(Noting):
    """A coordinator without orders. It ends when it knows a number of workers, at the latest with the second tick.

    Attributes
    ----------
    ready : The workers that it was told of.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self.ready = number, list[str]()

    def handle(self, fact: facts.Fact) -> list[orders.Order]:
        self.told.append(fact)
        self.ready += [fact.worker] if isinstance(fact, facts.WorkerReady) else []
        late = sum(isinstance(each, facts.Tick) for each in self.told) > 1
        return [orders.End("turned")] if late or len(self.ready) == self._number else []


@contextmanager
def run_of(*names: str) -> Iterator[tuple[RunContext, Any, list[tuple[str, str]]]]:
    """A run of these workers, its client, and the calls that workers get. Tests change the client's workers."""
    with fake_client(there(*names)) as client:
        asked = list[tuple[str, str]]()
        client.before = lambda address, function: asked.append((address, function.__name__))
        found = tuple(advertised(client.workers))
        connection, events = Connection(client, lambda: None), list[Event]()
        workers = RunWorkers(connection, Members(found, found[0], False), events.append, grows=True)
        dispatch, results = Dispatch("run", workers, 1.0), Results(workers, 1.0)
        job: Any = SimpleNamespace(cluster=SimpleNamespace(stall_timeout=1.0))
        dataset: Any = None
        yield Ways("run", connection, workers, dispatch, results, 1.0).context(job, dataset, events, []), client, asked


def test_a_worker_that_is_let_go_frees_what_it_has_of_the_run_and_is_watched() -> None:
    with run_of("d1", "d2", "d3") as (context, client, asked):
        strategy: Any = Noting()
        shell = Shell(context, strategy)
        shell.dismiss(orders.Dismiss("d2", for_good=True))
        wait_until(lambda: asked == [("tcp://d2", "forget_run")])
        shell.dismiss(orders.Dismiss("d3", for_good=False))  # it does not answer
        assert [*context.workers.alive] == ["d1"]
        client.workers = there("d1", "d3")
        shell.look()
        assert [fact.workers for fact in shell._facts if isinstance(fact, facts.WorkerGone)] == [("d2",)]
        assert len(asked) == 1


def test_a_worker_that_has_the_name_of_one_that_was_let_go_is_not_taken_for_it() -> None:
    with run_of("d1", "d2") as (context, client, _):
        strategy: Any = Noting()
        shell = Shell(context, strategy)
        shell.dismiss(orders.Dismiss("d2", for_good=True))
        (again,) = there("d2").values()
        client.workers = {**there("d1", "d2"), "tcp://other": again}
        shell.look()
        context.workers._looked = 0.0
        client.workers = {**there("d1"), "tcp://other": again}
        shell.look()
        assert [type(fact) for fact in shell._facts if not isinstance(fact, facts.Tick)] == [facts.WorkerReady]


def test_what_a_run_keeps_is_freed_in_the_end_on_workers_that_it_has_given_up() -> None:
    with run_of("d1", "d2", "d3", "d4") as (context, client, asked):
        context.sessions |= {"tcp://d1": 1, "tcp://d2": 1, "tcp://d3": 2}
        for worker in ("d2", "d3"):
            del context.workers.alive[worker]
        client.workers = there("d1", "d2")
        context.close()
        wait_until(lambda: len(asked) == 2)
        assert {*asked} == {("tcp://d1", "forget_run"), ("tcp://d2", "forget_run")}


def test_workers_left_over_by_a_run_that_turns_are_told_to_the_one_that_goes_on() -> None:
    """Those that were there, those that came, and one whose coming was not told any more."""
    with run_of("d1", "d2") as (context, client, _):
        client.workers = there("d1", "d2", "d3", "d4")
        first: Any = Turning(3)
        Shell(context, first).train()
        assert first.ready == ["d1", "d2", "d3"]
        then: Any = Turning(4)
        context = context.turned(context.job)
        Shell(context, then).train()
        assert {*then.ready} == {"d1", "d2", "d3", "d4"}


def shell_of(*broken: Exception) -> tuple[Shell, Noting]:
    """A shell whose workers raise this when it looks round, until signals are ignored."""
    found = list(broken)

    def look() -> bool:
        if found:
            raise found[0]
        return True

    none: dict[str, Any] = {"left": [], "leavers": [], "new_hosts": [], "came": list, "recalled": tuple, "spare": {}}
    workers = SimpleNamespace(look_round=look, alive={}, members=SimpleNamespace(workers=()), **none)
    connection = SimpleNamespace(ignore_signals=found.clear, cuts=0)
    context: Any = SimpleNamespace(workers=workers, connection=connection, calibrations={}, emit=None, ends=None)
    context.results = Results(context.workers, 1.0)
    strategy: Any = Noting()
    return Shell(context, strategy), strategy


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (WorkersLost(["a", "b"]), facts.WorkerGone.match(workers=("a", "b"), reason="connection lost")),
        (GONE, facts.SchedulerGone.match(error=GONE)),
        (Interrupted.by(15), facts.Interrupted.match(signum=15)),
    ],
)
def test_losses_and_signals_are_told(broken: Exception, told: Any) -> None:
    shell, strategy = shell_of(broken)
    shell.train()
    assert strategy.told == [told]


def test_a_time_limit_is_told_first() -> None:
    shell, strategy = shell_of()
    shell.context.ends, shell.context.job = 1e9, SimpleNamespace(run=SimpleNamespace(time_limit=60.0))  # type: ignore[assignment]
    shell.train()
    assert strategy.told == [facts.TimeLimited.match(seconds=60.0, ends=1e9)]


def test_a_signal_is_told_once() -> None:
    shell, strategy = shell_of(Interrupted.by(15))
    shell.look()
    shell.look()
    shell.train()
    assert strategy.told == [facts.Interrupted.match(signum=15)]
    assert facts.Tick.match() != facts.Interrupted(15, 1.0)


def test_workers_that_measure_themselves_stop_with_the_run() -> None:
    cancelled = list[str]()
    shell, strategy = shell_of()
    there: Any = SimpleNamespace(cancel=lambda: cancelled.append("a"))
    shell._calibrating["a"] = there
    shell.train()
    assert cancelled == ["a"]
    assert strategy.told == [facts.Tick.match()]


def test_nothing_is_left_to_give_up_where_the_scheduler_is_gone() -> None:
    """Dask's client refuses to cancel then. The loss itself is found by the next look."""

    def cancel() -> None:
        raise ClosedClientError("Client is closed. Can't send cancel-keys message.")

    shell, _ = shell_of()
    there: Any = SimpleNamespace(cancel=cancel)
    shell.work["a"] = TaskWork(there, lambda result, now: facts.Tick(now))
    shell.give_up("a")
    assert shell.work == {}


def test_a_round_is_told_to_end_early_once_it_has_begun() -> None:
    """Other orders come before the rounds that begin with them."""
    done = list[str]()
    shell, _ = shell_of()
    note: dict[Any, Any] = {
        orders.StartRound: lambda started: done.extend(order.round.worker for order in started),
        orders.EndRound: lambda order: done.append(f"end {order.replica}"),
        orders.Cancel: lambda order: done.append(f"cancel {order.replica}"),
    }
    shell._actions = {**shell._actions, **note}
    begins = orders.StartRound(1, 1, Round("a", 0, ((0, 8),), 8, (0.0, 1.0)), None, None, 1.0)
    shell._carry_out([begins, orders.EndRound("a", 1, 1, 0), orders.EndRound("b", 1, 1, 0), orders.Cancel("c")])
    assert done == ["end b", "cancel c", "a", "end a"]


@pytest.mark.parametrize(
    ("why", "shares", "reproducible", "moves"),
    [(None, True, False, True), (None, False, False, False), (None, True, True, False), (UNFIT, True, False, False)],
)
def test_a_server_goes_to_a_host_that_comes_if_it_is_fit(
    monkeypatch: pytest.MonkeyPatch, why: tuple[str, str] | None, shares: bool, reproducible: bool, moves: bool
) -> None:
    monkeypatch.setattr(shell_module, "unfit", lambda context, member: why)
    shell, added, events = shell_of()[0], list[Any](), list[Any]()
    host: Any = SimpleNamespace(address="tcp://ps")
    context: Any = shell.context
    context.emit, context.job = events.append, SimpleNamespace(train=SimpleNamespace(reproducible=reproducible))
    context.workers.new_hosts = [host]

    def add_host(member: Any) -> bool:
        added.append(member)
        return shares

    context.workers.add_host = add_host
    shell.look()
    told = [fact.life for fact in shell._facts if isinstance(fact, facts.ServerLeaving)]
    assert told == ([3] if moves else [])
    assert added == ([] if why else [host])
    expected = [WorkerIgnored(address="tcp://ps", reason=why[0], remedy=why[1])] if why else []
    assert events == expected


def test_a_scheduler_that_is_lost_as_a_worker_leaves_is_told() -> None:
    shell, strategy = shell_of()
    shell.context.workers.leavers.append("tcp://a")

    def leaves(address: str) -> None:
        raise GONE

    strategy.leaves = leaves  # type: ignore[attr-defined] # the fake strategy has no leavers of its own
    shell.train()
    assert facts.SchedulerGone.match(error=GONE) in [*strategy.told, *shell._facts]


def test_the_time_in_which_the_driver_was_stopped_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(shell_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    shell, _ = shell_of()
    ticks = list[float]()
    for at in (101.0, 105.0, 3600.0, 3604.0, 3608.0, 3612.0):
        now[0] = at
        shell.look()
        ticks += [fact.at for fact in shell._facts]
        shell._facts.clear()
    assert ticks == [101.0, 105.0, 3612.0]
