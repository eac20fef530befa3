"""The workers of a run: which of them are there, which came in mid-run, and which are lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, NoReturn

from daskcnn.cluster.link.allowed import AllowedWorkers
from daskcnn.cluster.link.calls import CutOff, ServerLost, WorkersLost, begin
from daskcnn.cluster.link.client import Connection
from daskcnn.cluster.link.demand import Demand
from daskcnn.cluster.link.leases import Hold
from daskcnn.cluster.link.leaving import RETIRED, SHUT_DOWN
from daskcnn.cluster.link.members import FOR_SERVERS, GOING, Member, Members, advertised, unique_names
from daskcnn.cluster.link.news import News
from daskcnn.cluster.link.scaled import ScaledCluster
from daskcnn.errors import Lost
from daskcnn.events import Event, Warned, WorkerLost

LOOK = 0.5  # seconds between two looks at who is there, while tasks run
LOOK_AT_OTHERS = 5.0  # seconds between two looks at whether workers of other runs are free
EXPLAINED = 20.0  # seconds within which the scheduler says that a worker is gone, once its task has failed


class RunWorkers:
    """Knows the workers of a run by their names in it.

    Attributes
    ----------
    alive : the workers that the run uses now.
    members : the workers that it was admitted with, and those set apart for the server.
    needs_server : True if the run ends without the hosts of its server.
    hosts : addresses of workers that hold a part of the server.
    newcomers : workers that came, until `came` gives them.
    new_hosts : workers set apart for servers that came, until they are taken from here.
    spare : workers that came and are of no use now, by name.
    let_go : workers that the run has let go of its own accord, and that stay, by name.
    left : names of those two kinds of workers that are gone, until they are taken from here.
    leaving : addresses of workers that are to end, of the run or of its server's hosts, and why.
    leavers : addresses of those that were not taken from here yet.
    awaited : names of workers whose last report is under way: they count as there, until it has come or will not.

    Parameters
    ----------
    hold : the run's hold on its workers; None where it needs none
    allowed : the workers that the run may have; None: any
    grows : workers that other runs had are of use when they are free, as are those that are left over now
    most : workers that the run asks clusters for that adapt; 0: no more than it has
    scaled : the cluster that may be asked for workers, if it may
    """

    def __init__(
        self,
        connection: Connection,
        members: Members,
        emit: Callable[[Event], None],
        *,
        hold: Hold | None = None,
        allowed: AllowedWorkers | None = None,
        grows: bool = False,
        most: int = 0,
        scaled: ScaledCluster | None = None,
    ) -> None:
        self.connection, self.members, self._emit = connection, members, emit
        self._hold, self._allowed, self._grows, self._most = hold, allowed or AllowedWorkers(), grows, most
        self._demand, self.scaled = Demand(connection.client), scaled
        self.alive = {member.name: member for member in members.workers}
        self.needs_server = False
        self.hosts: frozenset[str] = frozenset()
        self.newcomers: list[Member] = []
        self.new_hosts: list[Member] = []
        self._lost_hosts = set[str]()  # what Dask calls them
        self.leaving: dict[str, str] = {}
        self.leavers: list[str] = []
        self.awaited: set[str] = set()
        self._refused: list[str] = []
        self.news = News()
        others = {*hold.others} if hold is not None else set[str]()
        there = connection.workers()
        self._plain = any(member.plain for member in members.workers)
        self._allowed_as = {member.address: member.name for member in members.workers}
        self._barred, self._recalled = self._not_allowed(there), set[str]()  # addresses
        self._known = {*there} - (others if grows else set()) - self._barred  # addresses that are no news
        self._names = {member.called: member.name for member in members.workers}  # by what Dask calls them
        self.spare: dict[str, Member] = {}
        self.let_go: dict[str, Member] = {}
        self.left: list[str] = []
        self._heard = {address: float(info.get("last_seen", 0.0)) for address, info in there.items()}
        ours = {member.address for member in (*members.workers, members.server, *members.servers)}
        self._quiet = {address: self._heard[address] for address in self._known - ours} if grows else {}
        self._others, self._look_again = set[str](), 0.0  # workers of other runs, as of the last look at them
        self._looked = 0.0

    def look_round(self) -> bool:
        """See which workers are there; False where that was a moment ago. New ones are noted.

        Raises WorkersLost or ServerLost where a worker of the run or a host of its server is gone, Lost where the
        scheduler is, ServerLost or CutOff where it had dropped the client, and Interrupted after a signal.
        """
        self.connection.heed()
        self.tell_news()
        going = dict.fromkeys(self.news.retiring(), RETIRED) | dict.fromkeys(self.news.leaving(), SHUT_DOWN)
        for address, reason in going.items():
            self._note_leaving(address, reason)
        for address in self.news.not_retired():
            if address in self._serving:
                self._note_leaving(address, RETIRED)
                self._refused.append(address)
        if time.monotonic() - self._looked < LOOK:
            return False
        self._looked = time.monotonic()
        now = self.connection.workers()
        if self.connection.was_cut:
            self._take_again()
        self._allowed.look()
        self._note_those_awake(now)
        self._note_newcomers(now)
        self._note_spares(now)
        self._demand.set(max(0, self._most - len(self.alive)))
        self._tell_faults()
        for address, info in now.items():
            if info.get("status") == "closing_gracefully":
                self._note_leaving(address, RETIRED)
        if lost := self._lost(now):
            raise WorkersLost(lost)
        if not self._serving <= now.keys():
            raise ServerLost
        return True

    def _take_again(self) -> None:
        """Take the run's workers again, after the scheduler had dropped the client: its tasks and leases ended.

        Raises ServerLost or CutOff, and WorkersLost where another run has taken one of them meanwhile.
        """
        self.connection.go_on()
        self.news.subscribe_again(self.connection.client)
        taken = set[str]()
        if self._hold is not None:
            with self.connection.reached():
                taken = self._hold.take_again(self.connection.heed)
        self._emit(Warned(message="the connection to the scheduler was cut, and is there again: tasks are made anew"))
        if names := [name for name, member in self.alive.items() if member.address in taken]:
            raise WorkersLost(names)
        raise ServerLost if self.needs_server else CutOff

    @property
    def _serving(self) -> set[str]:
        """The addresses of workers that hold the server, or a part of it, or are the next to."""
        return {self.members.server.address, *self.hosts} if self.needs_server else set()

    def serves(self, address: str) -> bool:
        """Return True if this worker holds the server, or a part of it."""
        return address in self._serving

    @property
    def server_recalled(self) -> bool:
        """True if the run may not have the worker any more that its server goes to."""
        return self.members.server.address in self._barred

    def retire_refused(self) -> None:
        """Retire the workers that the scheduler could not, once they hold no server any more. Raises Lost."""
        if gone := [address for address in self._refused if address not in self._serving]:
            self._refused = [address for address in self._refused if address in self._serving]
            client = self.connection.client
            with self.connection.reached():
                begin(client, client.scheduler.retire_workers(workers=gone, close_workers=True))

    def _note_leaving(self, address: str, reason: str) -> None:
        """Note a worker that is to end, once, if the run has to do with it."""
        known = {member.address for member in self.alive.values()} | self._serving
        if address in known and address not in self.leaving:
            self.leaving[address] = reason
            self.leavers.append(address)

    def _lost(self, now: Collection[str]) -> list[str]:
        """Return the workers that are gone and that nothing more will be heard of. Notes those that were retired."""
        gone = {m.address: name for name, m in self.alive.items() if m.address not in now and name not in self.awaited}
        if self._hold is not None and (unknown := gone.keys() - self.leaving.keys()):
            with self.connection.reached():
                for address in self._hold.retired(unknown, self.connection.heed):
                    self._note_leaving(address, RETIRED)
        return [name for address, name in gone.items() if address not in self.leavers]

    def _note_those_awake(self, now: Mapping[str, Mapping[str, Any]]) -> None:
        """Make those news that are heard of again: they hung, or were left over."""
        self._known &= now.keys()
        self._heard = {address: float(info.get("last_seen", 0.0)) for address, info in now.items()}
        awake = {address for address, last in self._quiet.items() if self._heard.get(address, last) > last}
        self._quiet = {address: last for address, last in self._quiet.items() if address in now.keys() - awake}
        self._known -= awake

    def _note_spares(self, now: Mapping[str, Mapping[str, Any]]) -> None:
        for known in (self.spare, self.let_go):
            gone = [name for name, member in known.items() if member.address not in now]
            for name in gone:
                del known[name]
            self.left += gone

    def _not_allowed(self, now: Mapping[str, Mapping[str, Any]]) -> set[str]:
        """Return the addresses of workers that the run may not have.

        One that it was allowed to have keeps that name: of those without one of their own the numbers change.
        """
        able = [m for m in advertised(now, plain=self._plain) if m.kind != "ps"]
        names = {m.address: m.name for m in able} | {a: n for a, n in self._allowed_as.items() if a in now}
        self._allowed_as = {address: name for address, name in names.items() if name in self._allowed}
        return names.keys() - self._allowed_as.keys()

    def recalled(self) -> tuple[str, ...]:
        """Return the workers of the run that it may not have any more."""
        found = {m.address: n for n, m in self.alive.items() if m.address in self._barred}
        self._recalled |= found.keys()
        return tuple(name for address, name in found.items() if address not in self.leaving)

    def _note_barred(self, now: Mapping[str, Mapping[str, Any]]) -> set[str]:
        """Return the addresses of workers that the run may not have. One that is back is not kept for the run."""
        if now.keys() <= self._known and not self._allowed.changes:
            return set()
        before, self._barred = self._barred, self._not_allowed(now)
        if self._hold is not None and (back := self._barred - before - {m.address for m in self.alive.values()}):
            with self.connection.reached():
                self._hold.release(back, self.connection.heed)
        return self._barred

    def _note_newcomers(self, now: Mapping[str, Mapping[str, Any]]) -> None:
        """Note workers that came, and that no other run has."""
        going, barred = {a for a, info in now.items() if info.get("status") in GOING}, self._note_barred(now)
        if not (new := {a: info for a, info in now.items() if a not in self._known | going | barred}):
            return
        others = self._of_others(new.keys())
        for member in advertised(new, plain=self._plain):
            if member.kind == "ps":
                self.new_hosts.append(member)
            elif member.address not in others:
                self.newcomers.append(member)
        self._known |= new.keys() - (others if self._grows else set())

    def _of_others(self, new: Collection[str]) -> set[str]:
        """Return those of the workers that other runs have, which is asked now and then."""
        if self._hold is not None and not (self._others.issuperset(new) and time.monotonic() < self._look_again):
            with self.connection.reached():
                self._hold.look(self.connection.heed)
            self._others, self._look_again = {*self._hold.others}, time.monotonic() + LOOK_AT_OTHERS
        return self._others

    def came(self) -> list[Member]:
        """Take the workers that came, each by its name in the run: the one that it had, if it is back."""
        waiting, self.newcomers, found = self.newcomers, [], []
        for member in waiting:
            name = self._names.get(member.called)
            if name in self.alive:  # its loss is told first
                self.newcomers.append(member)
                continue
            if name is None:
                (name,) = unique_names([member.name], [member.kind], self._names.values())
                self._names[member.called] = name
            self.let_go.pop(name, None)  # it is back, or another process has its name
            found.append(member.named(name))
        return found

    def expect(self, member: Member) -> None:
        """Make the worker news again once it gives a sign of life."""
        if member.address in self._heard:
            self._quiet[member.address] = self._heard[member.address]

    def take(self, member: Member) -> bool:
        """Take a worker that came. Returns False where another run was faster, or is to have it. Raises Lost."""
        if member.address in self._barred:
            return False
        if self._hold is None:
            return True
        with self.connection.reached():
            taken = self._hold.take([member.address], self.connection.heed)
        if self._grows and not taken:
            self._known.discard(member.address)
        return taken

    def free(self, member: Member) -> None:
        """Let other runs have the worker. One that was to end, or recalled, may come again. Raises Lost.

        One that is retired may not: the scheduler retires it as soon as it is free.
        """
        reason = self.leaving.pop(member.address, None)
        if reason not in (None, RETIRED) or member.address in self._recalled:
            self._known.discard(member.address)
            self._recalled.discard(member.address)
        if self._hold is not None:
            with self.connection.reached():
                self._hold.release([member.address], self.connection.heed)

    def ask(self, number: int) -> None:
        """Ask the cluster for workers, so that the run has this number in all."""
        self._most = number
        if self.scaled is not None:
            self.scaled.ask(number - len(self.alive))

    def give_back(self, member: Member) -> None:
        """Let the cluster end a worker that is free."""
        self._most = min(self._most, len(self.alive))
        if self.scaled is not None:
            self.scaled.give_back(member.address, member.called)

    def _tell_faults(self) -> None:
        """Warn of what went wrong as the cluster was scaled."""
        while self.scaled is not None and not self.scaled.faults.empty():
            remedy = "look at the cluster's own log; the run goes on with the workers that it has"
            self._emit(Warned(value="cluster.adapt", reason=self.scaled.faults.get(), remedy=remedy))

    def close(self) -> None:
        """Ask for no more workers."""
        self._demand.close()

    def serve(self, hosts: Collection[str]) -> None:
        """Let others see that workers at these addresses hold the server. Raises Lost."""
        if self._hold is not None:
            with self.connection.reached():
                nbytes = self._hold.server_bytes(len(self.alive)) if self.members.server_alone else 0
                self._hold.serve(hosts, nbytes, self.connection.heed)

    def tell_news(self) -> None:
        """Log what workers have told of themselves."""
        for event in self.news.taken({member.address: name for name, member in self.alive.items()}):
            self._emit(event)

    def explain(self, error: BaseException) -> NoReturn:
        """Raise which workers were lost, as soon as the scheduler knows, in place of the error that it led to.

        One that was to leave, and is gone before the run was told so, is lost too: what it had is what is missed.
        """
        deadline = time.monotonic() + EXPLAINED
        while time.monotonic() < deadline:
            self.look_round()
            left = {*self.leavers} - self._heard.keys()
            if gone := [name for name, member in self.alive.items() if member.address in left]:
                raise WorkersLost(gone)
            time.sleep(LOOK / 5)  # look_round asks the scheduler once in LOOK, but heeds a signal each time
        raise error

    def unheard(self, seconds: float) -> list[str]:
        """Workers of the run that the scheduler has not heard of for longer than that, while it heard of others."""
        seen = {address: float(info["last_seen"]) for address, info in self.connection.workers().items()}
        newest = max(seen.values(), default=0.0)
        return [name for name, member in self.alive.items() if newest - seen.get(member.address, 0.0) > seconds]

    def require_answers(self, addresses: Iterable[str]) -> None:
        """Raise WorkersLost or ServerLost where one of these workers does not answer."""
        silent = self.connection.silent(addresses)
        if names := [name for name, member in self.alive.items() if member.address in silent]:
            raise WorkersLost(names)
        if silent:
            raise ServerLost

    def add_host(self, member: Member) -> bool:
        """Let the server go to a worker that is set apart for servers and came in mid-run, once its own is gone.

        Returns True if the server should go there now: it takes time from a worker that trains. It stays where it is
        if it was lost with a host of that name before.
        """
        others = tuple(each for each in self.members.servers if each.address != member.address)
        self.members = replace(self.members, servers=(*others, member))
        shares = self.needs_server and not self.members.server_alone
        return shares and member.called not in self._lost_hosts and self._has_room(member)

    def _has_room(self, host: Member) -> bool:
        """Return True if the servers of other runs leave room for this one's there. Raises Lost."""
        if self._hold is None or not host.memory_limit:
            return True
        with self.connection.reached():
            self._hold.look(self.connection.heed)
        theirs = self._hold.served[host.address]
        return not theirs or theirs + self._hold.server_bytes(len(self.alive)) <= FOR_SERVERS * host.memory_limit

    def new_host(self) -> Member:
        """Move the server to a worker set apart for it, else to one of the run; its own counts if it is there again.

        It does not wait for those that hang. Raises WorkersLost where none of them answers, Lost where there is none.
        """
        members, now = self.members, self.connection.workers()
        if members.server.address not in now:
            self._lost_hosts.add(members.server.called)
        stays = {a for a, info in now.items() if info.get("status") not in GOING} - self.leaving.keys() - self._barred
        first = (members.server,) if members.server_alone else ()
        apart = [member for member in (*first, *members.servers) if member.address in now]
        rest = sorted(self.alive.values(), key=lambda m: m.address != members.server.address)
        able = [member for member in apart if member.address in stays and self._has_room(member)]
        for group in (able, [m for m in rest if m.address in stays], [m for m in rest if m.address not in stays]):
            there = self.connection.first_to_answer(member.address for member in group)
            if (host := next((member for member in group if member.address == there), None)) is not None:
                servers = tuple(member for member in apart if member is not host)
                self.members = replace(members, server=host, servers=servers, server_alone=group is able)
                return host
        raise WorkersLost(self.alive) if self.alive else Lost("no worker is there that could hold the server")

    def lose(self, worker: str, reason: str) -> None:
        """Go on without this worker. Raises Lost where it was the last of the run."""
        member = self.alive.pop(worker)
        self.free(member)
        self._emit(WorkerLost(worker=worker, reason=reason, samples_moved=0))
        if not self.alive:
            raise Lost(f"worker {worker} ({member.address}): {reason}, and it was the last of the run")

    def only(self, names: Iterable[str]) -> RunWorkers:
        """The same with these workers only. What becomes of them later is not told to it."""
        part = copy(self)
        part.alive = {name: self.alive[name] for name in names}
        return part
