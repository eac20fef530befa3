"""Leases on workers: the laws of their table, what a job takes and says, and what a driver's end frees."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from daskcnn.cluster.link import client as link_client
from daskcnn.cluster.link import members
from daskcnn.cluster.link.allowed import AllowedWorkers
from daskcnn.cluster.link.calls import CutOff, ServerLost, WorkersLost, ask_workers
from daskcnn.cluster.link.client import Connection
from daskcnn.cluster.link.connect import connect
from daskcnn.cluster.link.lease_table import BACK, Holder, LeaseTable, others_of
from daskcnn.cluster.link.leases import NAME, Hold, holding, leases_on
from daskcnn.cluster.link.leaving import RETIRED, SHUT_DOWN
from daskcnn.cluster.link.members import Members, advertised, chosen, missing_members, wait_for_members
from daskcnn.cluster.run import workers as run_workers
from daskcnn.cluster.run.workers import RunWorkers
from daskcnn.errors import ClusterError
from daskcnn.events import Warned, WorkerIgnored
from daskcnn.files import replace_file
from daskcnn.job.resolve import parse_job, resolve
from daskcnn.job.tables import Cluster, Workers
from tests.fake_client import fake_client

NAMES = ["w0", "w1", "w2", "w3"]
RUNS = ["a", "b", "c"]  # b and c are of one driver
CLIENTS = {"a": "one", "b": "two", "c": "two"}


class TableLaws(RuleBasedStateMachine):
    """Workers come and go under new addresses, runs take and free them, drivers die. What a run has is counted here."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.now, self.lives = LeaseTable(), 0.0, 0
        self.there: dict[str, str] = {}  # addresses by name
        self.owners: dict[str, str] = {}  # runs by address
        self.gone: dict[str, tuple[str, float]] = {}  # by name: whose worker it was, and until when

    @rule(name=st.sampled_from(NAMES), passed=st.sampled_from([1.0, BACK, 2 * BACK]))
    def comes(self, name: str, passed: float) -> None:
        self.now += passed
        if name in self.there:
            return
        self.lives += 1
        address = self.there[name] = f"tcp://{self.lives}"
        self.table.worker_came(address, name, self.now)
        owner, until = self.gone.pop(name, ("", 0.0))
        if owner and self.now <= until:
            self.owners[address] = owner

    @rule(name=st.sampled_from(NAMES))
    def goes(self, name: str) -> None:
        if (address := self.there.pop(name, None)) is not None:
            self.table.worker_gone(address, self.now)
            if owner := self.owners.pop(address, ""):
                self.gone[name] = owner, self.now + BACK

    @rule(run=st.sampled_from(RUNS), wanted=st.sets(st.sampled_from(NAMES), min_size=1))
    def takes(self, run: str, wanted: set[str]) -> None:
        """All of them or none."""
        workers = {self.there[name]: name for name in sorted(wanted) if name in self.there}
        in_the_way = {address for address in workers if self.owners.get(address, run) != run}
        refused = self.table.take(Holder(run, CLIENTS[run], run), workers, self.now)
        assert {lease.worker for lease in refused} == in_the_way
        if not in_the_way:
            self.owners |= dict.fromkeys(workers, run)

    @rule(run=st.sampled_from(RUNS), name=st.sampled_from(NAMES))
    def frees(self, run: str, name: str) -> None:
        """A run frees its own workers alone."""
        if (address := self.there.get(name)) is not None:
            self.table.release(run, [address])
            if self.owners.get(address) == run:
                del self.owners[address]

    @rule(run=st.sampled_from(RUNS))
    def ends(self, run: str) -> None:
        self.table.release(run)
        self._forget({run})

    @rule(client=st.sampled_from(["one", "two"]))
    def driver_dies(self, client: str) -> None:
        self.table.client_gone(client)
        self._forget({run for run, own in CLIENTS.items() if own == client})

    @rule(run=st.sampled_from(RUNS), hosts=st.sets(st.sampled_from(NAMES)))
    def serves(self, run: str, hosts: set[str]) -> None:
        """It keeps nobody from anything."""
        held = {self.there[name]: name for name in hosts if name in self.there}
        self.table.serve(Holder(run, CLIENTS[run], run), held, self.now)
        marked = {lease.worker for lease in self.table.leases() if lease.serves and lease.holder.key == run}
        assert marked == held.keys()

    def _forget(self, runs: set[str]) -> None:
        self.owners = {address: owner for address, owner in self.owners.items() if owner not in runs}
        self.gone = {name: entry for name, entry in self.gone.items() if entry[0] not in runs}

    @invariant()
    def every_worker_has_the_owner_that_took_it(self) -> None:
        trains = [lease for lease in self.table.leases() if not lease.serves]
        assert len({lease.worker for lease in trains}) == len(trains)
        assert {lease.worker: lease.holder.key for lease in trains} == self.owners
        assert {lease.worker for lease in self.table.leases()} <= {*self.there.values()}

    @invariant()
    def a_wait_ends_when_enough_are_free(self) -> None:
        known = {address: {"name": name, "host": "h", "nthreads": 1} for name, address in self.there.items()}
        others = others_of("new", self.table.leases())
        free = [member for member in advertised(known) if member.address not in others]
        for count in range(1, len(NAMES) + 1):
            enough = not missing_members(free, Workers(cpu=count))
            assert enough == (len(self.there) - len(self.owners) >= count)
            if enough:
                wanted = {m.address: m.name for m in chosen(free, Workers(cpu=count)).workers}
                assert self.table.take(Holder("new", "new", "new"), wanted, self.now) == ()
                self.table.release("new")


TestTableLaws = TableLaws.TestCase
TestTableLaws.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_a_worker_keeps_the_time_since_when_it_is_a_runs() -> None:
    table, holder = LeaseTable(), Holder("a", "client", "sgwu")
    table.take(holder, {"tcp://1": "desk"}, 5.0)
    table.worker_gone("tcp://1", 7.0)
    table.worker_came("tcp://2", "desk", 9.0)
    table.take(holder, {"tcp://2": "desk"}, 9.0)
    table.rename("a", "2026-sgwu")
    (lease,) = table.leases()
    assert (lease.worker, lease.since, lease.holder.run) == ("tcp://2", 5.0, "2026-sgwu")


# --- on a scheduler ---


def there(*names: str, **resources: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Workers as the scheduler has them; CPU workers unless something else is said."""
    own = {name: {"CPU": 1.0} for name in names} | resources
    return {
        f"tcp://{name}": {"name": name, "host": "h", "nthreads": 1, "resources": each, "last_seen": 0.0}
        for name, each in own.items()
    }


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "POLL", 0.005)
    monkeypatch.setattr(link_client, "ask_workers", partial(ask_workers, within=0.5))
    monkeypatch.setattr(run_workers, "LOOK", 0.0)
    monkeypatch.setattr(run_workers, "LOOK_AT_OTHERS", 0.0)


def taken(client: Any, hold: Hold, wait: float = 0.0, **how: Any) -> Members:
    only = how.pop("only", None) or AllowedWorkers(how.pop("named", ()))
    settle = how.pop("settle", 0.0)
    say: Callable[[str], None] = how.pop("say", lambda _: None)
    return wait_for_members(client, Workers(**how), wait, say=say, settle=settle, only=only, hold=hold)


def names_of(found: Members) -> list[str]:
    return [member.name for member in found.workers]


def test_two_jobs_take_workers_of_their_own_and_share_the_server() -> None:
    with fake_client(there("d1", "d2", "d3", "d4", s={"PS": 1.0})) as client:
        with holding(client, "first") as one, holding(client, "second") as two:
            first, second = taken(client, one, cpu=2), taken(client, two, cpu=2)
            assert (names_of(first), names_of(second)) == (["d1", "d2"], ["d3", "d4"])
            assert first.server.name == second.server.name == "s"
        assert leases_on(client.dask_scheduler) == ()


def test_a_job_without_numbers_takes_those_that_are_free() -> None:
    with fake_client(there("d1", "d2", "d3")) as client, holding(client, "a") as one, holding(client, "b") as two:
        taken(client, one, cpu=1)
        assert names_of(taken(client, two)) == ["d2", "d3"]


def test_a_worker_that_is_to_end_is_not_taken_and_one_that_is_paused_last() -> None:
    known = there("d1", "d2", "d3", "d4")
    known["tcp://d1"]["status"], known["tcp://d2"]["status"] = "closing_gracefully", "paused"
    with fake_client(known) as client, holding(client, "a") as hold:
        with pytest.raises(ClusterError, match="leaving the cluster: d1"):
            taken(client, hold, cpu=4)
        assert names_of(taken(client, hold, cpu=2)) == ["d3", "d4"]
        assert names_of(taken(client, hold, cpu=3)) == ["d3", "d4", "d2"]


def test_a_range_takes_those_that_are_free_up_to_its_most() -> None:
    with fake_client(there("d1", "d2", "d3")) as client, holding(client, "a") as one, holding(client, "b") as two:
        assert names_of(taken(client, one, cpu="1..2")) == ["d1", "d2"]
        assert names_of(taken(client, two, cpu="1..4")) == ["d3"]
        with pytest.raises(ClusterError, match="2 more with CPU=1"):
            taken(client, two, cpu="3..4")


def test_a_job_waits_for_workers_of_another_and_says_which_run_has_them() -> None:
    with fake_client(there("d1", "d2", "d3")) as client, holding(client, "first") as one, holding(client, "b") as two:
        taken(client, one, cpu=2)
        said: list[str] = []

        def freed(words: str) -> None:
            said.append(words)
            one.release(["tcp://d1"])

        assert names_of(taken(client, two, wait=20.0, cpu=2, say=freed)) == ["d1", "d3"]
    (words,) = said
    assert words.startswith("waiting for workers: 1 more with CPU=1 (found 1 cpu, 0 gpu, 0 ps; run first (")
    assert "has d1, d2 since " in words


def test_a_wait_in_vain_ends_with_value_reason_and_remedy() -> None:
    with fake_client(there("d1", "d2")) as client, holding(client, "first") as one, holding(client, "b") as two:
        taken(client, one, cpu=1)
        one.rename("2026-bsp")
        with pytest.raises(ClusterError) as caught:
            taken(client, two, cpu=2, wait=0.02)
    error = caught.value
    assert (error.exit_code, error.value) == (3, f"scheduler {client.scheduler.address}")
    assert "the job wants 1 more with CPU=1; run 2026-bsp (" in error.reason
    assert "has d1 since " in error.reason
    assert "cluster.wait" in error.remedy


def test_who_takes_the_same_worker_first_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a look and the taking another job takes one of the workers: others are looked for, and none is kept."""
    with fake_client(there("d1", "d2", "d3")) as client, holding(client, "a") as one, holding(client, "b") as two:
        look = Hold.look

        def meanwhile(self: Hold, *args: Any) -> Any:
            found = look(self, *args)
            monkeypatch.setattr(Hold, "look", look)
            taken(client, one, cpu=1)
            return found

        monkeypatch.setattr(Hold, "look", meanwhile)
        assert names_of(taken(client, two, wait=20.0, cpu=2)) == ["d2", "d3"]


def test_the_scheduler_frees_the_workers_of_a_driver_that_is_gone() -> None:
    with fake_client(there("d1", "d2")) as client, holding(client, "b") as two:
        taken(client, Hold(client, "killed"), cpu=2)
        plugin = client.dask_scheduler.plugins[NAME]
        plugin.remove_client(client.dask_scheduler, "another")
        assert len(plugin.table.leases()) == 2
        plugin.remove_client(client.dask_scheduler, client.id)
        assert names_of(taken(client, two, cpu=2)) == ["d1", "d2"]


def test_nothing_is_taken_for_a_driver_that_is_gone() -> None:
    with fake_client(there("d1")) as client:
        client.dask_scheduler.clients.clear()
        with pytest.raises(ClusterError, match="connection lost"):
            taken(client, Hold(client, "killed"), cpu=1)


def test_workers_with_fewer_servers_of_others_come_first() -> None:
    workers = there("d1", "d2", "d3", s={"PS": 1.0}, t={"PS": 1.0})
    with fake_client(workers) as client, holding(client, "a") as one, holding(client, "b") as two:
        one.serve(["tcp://d1", "tcp://s"], 0)
        found = taken(client, two, cpu=2)
        assert (names_of(found), found.server.name) == (["d2", "d3"], "t")


# --- servers of several jobs on a worker ---


def server_of(client: Any, hold: Hold, nbytes: int) -> Members:
    hold.server = (nbytes // 2, nbytes // 2)
    return taken(client, hold, cpu=1)


def with_servers(*limits: int) -> dict[str, dict[str, Any]]:
    hosts = there(**{f"s{i}": {"PS": 1.0} for i in range(len(limits))})
    sized = {a: {**info, "memory_limit": limit} for (a, info), limit in zip(hosts.items(), limits, strict=True)}
    return there("d1", "d2", "d3") | sized


def test_a_worker_holds_the_servers_of_several_jobs_as_far_as_its_memory_goes() -> None:
    with fake_client(with_servers(1000, 2000)) as client, ExitStack() as stack:
        one, two, three = (stack.enter_context(holding(client, name)) for name in "abc")
        assert server_of(client, one, 500).server.name == "s0"
        assert server_of(client, two, 700).server.name == "s1"
        third = server_of(client, three, 600)
        assert (third.server.name, third.server_alone, third.full) == ("d3", False, ("s0", "s1"))
        one.close()
        three.release(["tcp://d3"])
        assert server_of(client, three, 600).server.name == "s0"


def test_the_first_server_on_a_worker_has_all_of_it() -> None:
    """However much it is said to need: nothing else is there."""
    with fake_client(with_servers(1000)) as client, holding(client, "a") as one:
        assert server_of(client, one, 5000).server.name == "s0"


def test_the_place_for_a_server_is_taken_with_the_workers_or_none_of_it() -> None:
    """Two jobs that look at the same time do not both have it."""
    with fake_client(with_servers(1000)) as client, holding(client, "a") as one, holding(client, "b") as two:
        place: dict[str, Any] = {"host": "tcp://s0", "nbytes": 400, "room": 600}
        assert one.take(["tcp://d1"], **place)
        assert not two.take(["tcp://d2"], **place)
        assert [lease.worker for lease in leases_on(client.dask_scheduler)] == ["tcp://d1", "tcp://s0"]
        assert one.take(["tcp://d3"])
        one.serve(["tcp://s0"], 400)
        two.look()
        assert two.served["tcp://s0"] == 400


def test_a_newcomer_that_another_run_takes_first_is_seen_again_when_it_is_free() -> None:
    with fake_client(there("d1")) as client, holding(client, "a") as one, holding(client, "b") as two:
        workers, _ = running(client, one, grows=True)
        client.workers = there("d1", "d2")
        workers.look_round()
        (member,), workers.newcomers = workers.newcomers, []
        assert two.take([member.address])
        assert not workers.take(member)
        assert come(workers) == []
        two.close()
        assert come(workers) == ["d2"]


@pytest.mark.parametrize(("reason", "again"), [(RETIRED, []), (SHUT_DOWN, ["d2"])])
def test_a_worker_that_is_to_be_retired_is_no_newcomer_once_it_is_free(reason: str, again: list[str]) -> None:
    """The scheduler retires it a moment later. One that was told to end may have changed its mind."""
    with fake_client(there("d1")) as client, holding(client, "a") as one:
        workers, _ = running(client, one, grows=True)
        client.workers = there("d1", "d2")
        workers.look_round()
        (member,), workers.newcomers = workers.newcomers, []
        assert workers.take(member)
        workers.leaving[member.address] = reason
        workers.free(member)
        assert come(workers) == again


# --- cluster.only ---


def test_only_named_workers_train() -> None:
    with fake_client(there("desk-1", "desk-2", "lab-1", s={"PS": 1.0})) as client, holding(client, "a") as hold:
        found = taken(client, hold, named=["desk-2", "lab-*"])
        assert (names_of(found), found.server.name) == (["desk-2", "lab-1"], "s")


def test_patterns_that_match_nothing_are_refused() -> None:
    with fake_client(there("desk-1", "desk-2")) as client, holding(client, "a") as hold:
        with pytest.raises(ClusterError, match="has such a name, but desk-1, desk-2, after") as caught:
            taken(client, hold, named=["dsk-*"], wait=0.01)
        assert (caught.value.value, caught.value.exit_code) == ("cluster.only = dsk-*", 3)
        assert "doctor" in caught.value.remedy
        assert leases_on(client.dask_scheduler) == ()


def test_patterns_that_match_no_worker_of_a_local_cluster_are_refused_before_it_starts() -> None:
    settings = Cluster(workers=Workers(cpu=2), only=["desk-*"])
    with pytest.raises(ClusterError, match="no worker of a local cluster has such a name, but cpu-0 to cpu-1"):
        connect(settings).__enter__()


@pytest.mark.parametrize("given", ["a,b-*", ["a", "b-*"], "a, b-*"])
def test_names_are_a_list_or_separated_by_commas(given: Any) -> None:
    assert parse_job({"cluster": {"only": given}}).cluster.only == ["a", "b-*"]


@pytest.mark.parametrize("given", ["", "a,,b", ["a", ""], [], 3, [3]])
def test_what_is_no_name_is_refused(given: Any) -> None:
    with pytest.raises(Exception, match="only"):
        resolve({"cluster": {"only": given}})


# --- while a run goes on ---


def running(client: Any, hold: Hold, **how: Any) -> tuple[RunWorkers, list[Any]]:
    """A run of the first worker, and its events."""
    events: list[Any] = []
    found, connection = taken(client, hold, cpu=1), Connection(client, lambda: None)
    return RunWorkers(connection, found, events.append, hold=hold, **how), events


def cut(client: Any) -> None:
    """The client's connection breaks, and Dask connects it again."""
    client.dask_scheduler.plugins[NAME].remove_client(client.dask_scheduler, client.id)
    client.scheduler_comm = object()


def test_a_run_whose_client_is_connected_again_takes_its_workers_again_and_makes_its_tasks_anew() -> None:
    with fake_client(there("d1", "d2")) as client, holding(client, "a") as one, holding(client, "b") as two:
        workers, events = running(client, one)
        heard = workers.news
        heard.subscribe(client, "a")
        cut(client)
        client._event_handlers.clear()
        with pytest.raises(CutOff):
            workers.look_round()
        assert isinstance(events[0], Warned)
        assert [lease.worker for lease in leases_on(client.dask_scheduler)] == ["tcp://d1"]
        assert client._event_handlers
        assert not workers.connection.was_cut
        assert workers.look_round()
        workers.needs_server = True
        cut(client)
        with pytest.raises(ServerLost):
            workers.look_round()
        cut(client)
        assert two.take(["tcp://d1"])
        with pytest.raises(WorkersLost, match="d1"):
            workers.look_round()


def come(workers: RunWorkers) -> list[str]:
    workers.look_round()
    found, workers.newcomers = workers.newcomers, []
    return [member.name for member in found]


def test_a_worker_that_comes_is_taken_only_if_it_is_free() -> None:
    with fake_client(there("d1")) as client, holding(client, "a") as one, holding(client, "b") as two:
        workers, _ = running(client, one)
        client.workers = there("d1", "d2", "d3")
        assert two.take(["tcp://d2"])
        assert come(workers) == ["d3"]
        two.release(["tcp://d2"])
        assert come(workers) == []


def test_a_run_of_all_workers_takes_those_that_others_free() -> None:
    with fake_client(there("d1", "d2", "s")) as client, holding(client, "a") as one, holding(client, "b") as two:
        assert two.take(["tcp://d2", "tcp://s"])
        workers, events = running(client, one, grows=True, allowed=AllowedWorkers(["d*"]))
        assert come(workers) == []
        two.close()
        assert come(workers) == ["d2"]
        assert come(workers) == []
        assert not [event for event in events if isinstance(event, WorkerIgnored)]


def test_a_worker_that_is_back_is_its_runs() -> None:
    with fake_client(there("d1")) as client, holding(client, "a") as one, holding(client, "b") as two:
        workers, _ = running(client, one)
        plugin = client.dask_scheduler.plugins[NAME]
        client.workers = {}
        plugin.remove_worker(client.dask_scheduler, "tcp://d1")
        client.workers = {"tcp://new": there("d1")["tcp://d1"]}
        plugin.add_worker(client.dask_scheduler, "tcp://new")
        assert not two.take(["tcp://new"])
        workers.alive.clear()
        assert come(workers) == ["d1"]
        workers.free(SimpleNamespace(address="tcp://new"))  # type: ignore[arg-type]
        assert two.take(["tcp://new"])


# --- workers that come back ---


def by_their_names(workers: RunWorkers) -> list[str]:
    workers.look_round()
    return [member.name for member in workers.came()]


@pytest.mark.parametrize("called", ["d1", 0], ids=["named by its user", "numbered by LocalCluster"])
def test_a_worker_that_is_back_keeps_its_name(called: Any) -> None:
    with fake_client(there("d1")) as client, holding(client, "a") as one:
        client.workers["tcp://d1"]["name"] = called
        workers, _ = running(client, one)
        (name,) = workers.alive
        client.workers = {"tcp://new": {**there("d1")["tcp://d1"], "name": called}, **there("d2")}
        with pytest.raises(WorkersLost):
            workers.look_round()
        assert [member.name for member in workers.came()] == ["d2"], "its loss is told first"
        del workers.alive[name]
        assert by_their_names(workers) == [name]
        assert by_their_names(workers) == []


def test_a_worker_that_hung_is_news_once_it_is_heard_of() -> None:
    with fake_client(there("d1", "d2")) as client, holding(client, "a") as one:
        workers, _ = running(client, one)
        for at, heard in ((1.0, []), (1.0, []), (2.0, ["d1"]), (3.0, [])):
            for info in client.workers.values():
                info["last_seen"] = at
            assert by_their_names(workers) == heard
            if workers.alive:
                workers.expect(workers.alive.pop("d1"))


def test_those_left_over_are_news_to_a_run_that_grows_unless_they_hang() -> None:
    with fake_client(there("d1", "d2", "d3", s={"PS": 1.0})) as client, holding(client, "a") as one:
        workers, _ = running(client, one, grows=True)
        assert by_their_names(workers) == []
        client.workers["tcp://d2"]["last_seen"] = client.workers["tcp://s"]["last_seen"] = 5.0
        assert by_their_names(workers) == ["d2"]


# --- hosts of servers ---


def hosts_come(workers: RunWorkers) -> list[bool]:
    """True for those that the server should go to at once."""
    workers.look_round()
    found, workers.new_hosts = workers.new_hosts, []
    return [workers.add_host(member) for member in found]


def apart(*names: str, limit: int = 0) -> dict[str, dict[str, Any]]:
    """Workers for servers alone, as the scheduler describes them."""
    hosts = {name: {"PS": 1.0} for name in names}
    return {address: {**info, "memory_limit": limit} for address, info in there(**hosts).items()}


def test_a_host_that_comes_has_the_server_once_its_own_is_gone() -> None:
    with fake_client(there("d1") | apart("s")) as client, holding(client, "a") as one:
        workers, _ = running(client, one)
        workers.needs_server = True
        client.workers |= apart("t")
        assert hosts_come(workers) == [False], "it has a worker of its own"
        client.workers = there("d1") | apart("t")
        assert workers.new_host().name == "t"
        assert workers.members.server_alone


def test_a_server_leaves_a_worker_that_trains_for_a_host_that_comes_unless_it_was_lost_with_one_of_that_name() -> None:
    with fake_client(there("d1") | apart("s")) as client, holding(client, "a") as one:
        workers, _ = running(client, one)
        workers.needs_server = True
        client.workers = there("d1")
        assert workers.new_host().name == "d1"
        assert not workers.members.server_alone
        client.workers = there("d1") | {"tcp://new": apart("s")["tcp://s"]} | apart("t")
        assert hosts_come(workers) == [False, True]
        assert workers.new_host().called == "s", "those set apart come before those that train"


def test_a_host_that_hangs_is_asked_again_when_the_server_has_to_move() -> None:
    with fake_client(there("d1") | apart("s", "t")) as client, holding(client, "a") as one:
        workers, _ = running(client, one)
        client.hang = {"tcp://s", "tcp://t"}
        assert workers.new_host().name == "d1"
        client.hang = {}
        assert workers.new_host().name == "s"


def test_a_server_goes_to_no_host_that_the_servers_of_others_fill() -> None:
    with fake_client(there("d1") | apart("s", limit=1000)) as client, holding(client, "a") as one:
        workers, _ = running(client, one)
        one.server, workers.needs_server = (100, 100), True
        with holding(client, "b") as two:
            client.workers |= apart("t", limit=1000)
            two.serve(["tcp://t"], 401)
            assert hosts_come(workers) == [False]
            client.workers = there("d1") | apart("t", limit=1000)
            assert workers.new_host().name == "d1"
            two.serve(["tcp://t"], 400)
            assert workers.new_host().name == "t"
            workers.serve(["tcp://t"])
            two.look()
            assert two.served["tcp://t"] == 200, "others see what it takes"
            client.workers = there("d1")
            workers.serve([workers.new_host().address])
            two.look()
            assert not two.served.total(), "a worker that trains has no room set apart"


def test_an_unused_worker_that_is_gone_is_told_of() -> None:
    with fake_client(there("d1", "d2")) as client, holding(client, "a") as one:
        workers, _ = running(client, one)
        client.workers = there("d1", "d3")
        workers.look_round()
        (member,) = workers.came()
        workers.spare[member.name] = member
        client.workers = there("d1")
        workers.look_round()
        assert (workers.left, workers.spare) == (["d3"], {})


# --- cluster.only_from ---


class Listed:
    """A run on d1 and d2, whose list a test writes. events: of the run."""

    def __init__(self, folder: Path, client: Any, hold: Hold, **how: Any) -> None:
        self.file = folder / "workers"
        self.write("d1", "d2")
        allowed = AllowedWorkers(file=str(self.file))
        found = taken(client, hold, only=allowed, wait=5.0, settle=60.0, cpu="1..4")
        self.names, self.client = names_of(found), client
        connection = Connection(client, lambda: None)
        self.workers = RunWorkers(connection, found, lambda event: None, hold=hold, allowed=allowed, grows=True, **how)

    def write(self, *names: str) -> None:
        replace_file(self.file, "".join(f"{name}\n" for name in names).encode())

    def recalled(self) -> tuple[str, ...]:
        self.workers.look_round()
        return self.workers.recalled()

    def let_go(self, name: str) -> None:
        self.workers.free(self.workers.alive.pop(name))


def test_a_run_begins_as_soon_as_all_workers_of_its_list_are_free(tmp_path: Path) -> None:
    with fake_client(there("d1", "d2", "d3")) as client, holding(client, "a") as one:
        assert Listed(tmp_path, client, one).names == ["d1", "d2"]


def test_a_run_gives_up_a_worker_and_takes_it_again_as_its_list_says(tmp_path: Path) -> None:
    with fake_client(there("d1", "d2", "d3")) as client, holding(client, "a") as one, holding(client, "b") as two:
        run = Listed(tmp_path, client, one)
        assert (run.recalled(), come(run.workers)) == ((), [])
        run.write("d1", "d3")
        assert run.recalled() == run.recalled() == ("d2",), "it is said until it is done"
        assert come(run.workers) == ["d3"]
        run.let_go("d2")
        assert two.take(["tcp://d2"])
        assert (run.recalled(), come(run.workers)) == ((), [])
        two.close()
        assert come(run.workers) == []
        run.write("d1", "d2")
        assert come(run.workers) == ["d2"]


def test_a_worker_that_is_recalled_no_more_stays_and_one_that_is_on_its_way_out_comes_again(tmp_path: Path) -> None:
    with fake_client(there("d1", "d2")) as client, holding(client, "a") as one:
        run = Listed(tmp_path, client, one)
        run.write("d1")
        assert run.recalled() == ("d2",)
        run.write("d1", "d2")
        assert (run.recalled(), come(run.workers)) == ((), [])
        run.let_go("d2")
        assert come(run.workers) == ["d2"]


def test_a_newcomer_that_the_list_has_lost_meanwhile_is_not_taken(tmp_path: Path) -> None:
    with fake_client(there("d1", "d2", "d3")) as client, holding(client, "a") as one:
        run = Listed(tmp_path, client, one)
        run.write("d1", "d2", "d3")
        run.workers.look_round()
        (member,) = run.workers.came()
        run.write("d1", "d2")
        run.workers.look_round()
        assert not run.workers.take(member)
        assert one.mine == {"tcp://d1", "tcp://d2"}


def test_a_worker_that_went_as_it_was_recalled_is_not_kept_for_the_run_when_it_is_back(tmp_path: Path) -> None:
    with fake_client(there("d1", "d2")) as client, holding(client, "a") as one, holding(client, "b") as two:
        run = Listed(tmp_path, client, one)
        run.write("d1")
        plugin, back = client.dask_scheduler.plugins[NAME], there("d1") | {"tcp://9": there("d2")["tcp://d2"]}
        plugin.remove_worker(client.dask_scheduler, "tcp://d2")
        client.workers = there("d1")
        with pytest.raises(WorkersLost):
            run.workers.look_round()
        del run.workers.alive["d2"]
        client.workers = back
        plugin.add_worker(client.dask_scheduler, "tcp://9")
        assert not two.take(["tcp://9"]), "it would be the run's again"
        assert come(run.workers) == []
        assert two.take(["tcp://9"])


def test_a_server_goes_to_no_worker_that_is_recalled(tmp_path: Path) -> None:
    with fake_client(there("d1", "d2")) as client, holding(client, "a") as one:
        run = Listed(tmp_path, client, one)
        host = run.workers.members.server
        run.write(*{"d1", "d2"} - {host.name})
        run.recalled()
        assert run.workers.server_recalled
        assert run.workers.new_host() != host
        assert not run.workers.server_recalled


def test_numbers_of_workers_without_names_change_and_they_stay_the_run_s(tmp_path: Path) -> None:
    nameless = {a: {**info, "name": a} for a, info in there("1", "2", "3").items()}
    with fake_client(nameless) as client, holding(client, "a") as one:
        file = tmp_path / "workers"
        file.write_text("cpu-1\ncpu-2\n")
        allowed = AllowedWorkers(file=str(file))
        found = taken(client, one, only=allowed, cpu=2)
        assert names_of(found) == ["cpu-1", "cpu-2"]
        workers = RunWorkers(Connection(client, lambda: None), found, lambda event: None, hold=one, allowed=allowed)
        client.workers = {a: info for a, info in nameless.items() if a != "tcp://1"}
        workers.look_round()
        assert (workers.recalled(), workers.newcomers) == ((), [])


def test_a_list_that_cannot_be_read_is_refused_at_first_and_counts_as_unchanged_later(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="No such file or directory; write names of workers there, one a line"):
        AllowedWorkers(file=str(tmp_path / "none"))
    (tmp_path / "workers").write_text("d1\n\n d2 \n")
    allowed = AllowedWorkers(["d*"], str(tmp_path / "workers"))
    (tmp_path / "workers").unlink()
    allowed.look()
    assert [name in allowed for name in ("d1", "d2", "d3")] == [True, True, False]
