"""The cluster's workers: the resources that each advertises, its name, and those that a job takes.

A worker is called by its user's name, else by its kind and a number. Every name is decided here. Two workers never
share one, and each can be part of a file's name.
"""

from __future__ import annotations

import re
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, Literal

from distributed import Client

from daskcnn.cluster.link.allowed import AllowedWorkers
from daskcnn.cluster.link.calls import Check, answer_to, no_check, scheduler_of
from daskcnn.cluster.link.demand import Demand
from daskcnn.cluster.link.leases import Hold, in_words
from daskcnn.errors import ClusterError
from daskcnn.job.cluster_table import Workers

LONGEST = 60  # letters of a name; a longer one is cut off
_ALLOWED = "._-+@"
_MADE = re.compile(r"(cpu|gpu|ps)-\d+")  # names that are made here, and for the workers of a local cluster
_RESERVED = re.compile(r"group-\d+|layer")  # names of replicas that are not workers


def given_name(name: object) -> str:
    """Return the name that a user gave a worker, as it is shown and kept; empty where none was given.

    Dask calls a worker without a name by its address, and `LocalCluster` by a number. Characters that cannot be part
    of a file's name become hyphens.
    """
    if not isinstance(name, str) or "://" in name:
        return ""
    letters = unicodedata.normalize("NFC", name)
    found = "".join(c if c.isalnum() or c in _ALLOWED else "-" for c in letters).strip(".-")[:LONGEST]
    return f"worker-{found}" if _RESERVED.fullmatch(found) else found


def unique_names(given: Sequence[str], kinds: Sequence[str], taken: Collection[str] = ()) -> list[str]:
    """Return a name for each worker: the given one, or where that is empty one such as `cpu-0`.

    A given name that is in use gets a number. taken: names that none of them may have.
    """
    used, names = set(taken), list(given)

    def use(i: int, candidates: Iterable[str]) -> None:
        names[i] = next(name for name in candidates if name not in used)
        used.add(names[i])

    for i, name in enumerate(given):  # first, so that no made name takes a given one
        if name and name in used and _MADE.fullmatch(name):
            use(i, (f"{kinds[i]}-{number}" for number in count()))
        elif name:
            use(i, chain([name], (f"{name}-{number}" for number in count(2))))
    for i, name in enumerate(names):
        if not name:
            use(i, (f"{kinds[i]}-{number}" for number in count()))
    return names


GOING = frozenset({"closing_gracefully", "closing"})
"""States, in Dask's words, of workers that are to end."""
Kind = Literal["cpu", "gpu", "ps"]
RESOURCES: dict[Kind, str] = {"cpu": "CPU", "gpu": "GPU", "ps": "PS"}
POLL = 0.25  # seconds between two questions to the scheduler
REMIND = 15.0  # seconds after which a message of waiting is repeated
FOR_SERVERS = 0.6
"""The part of a worker's memory that servers of several jobs may take: beyond it Dask begins to write to the disk."""
Say = Callable[[str], None]


class Patience:
    """A wait of limited length.

    Parameters
    ----------
    check : called repeatedly meanwhile; may raise
    say : is told what is missing
    begun : when the wait began, on the monotonic clock; now if not given
    """

    def __init__(self, seconds: float, check: Check, say: Say, begun: float | None = None) -> None:
        self.seconds, self.check, self.say = seconds, check, say
        self._deadline = (time.monotonic() if begun is None else begun) + seconds
        self._said, self._again = "", 0.0

    @property
    def over(self) -> bool:
        """True once all the time has passed."""
        return time.monotonic() >= self._deadline

    def wait_for(self, missing: str) -> None:
        """Wait for a moment. Says what is missing when that changes, and every `REMIND` seconds."""
        self.check()
        if missing != self._said or time.monotonic() >= self._again:
            self.say(f"waiting for {missing}; {max(0.0, self._deadline - time.monotonic()):.0f} s left")
            self._said, self._again = missing, time.monotonic() + REMIND
        time.sleep(min(POLL, max(0.0, self._deadline - time.monotonic())))


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as the scheduler knows it.

    It counts as the first `kind` that it advertises; `also` holds the others. A `plain` one advertises none of our
    resources and is taken as a CPU worker; only its address pins its tasks. `amount` is how much of its resource it
    advertises. Dask's own name for it (`called`) tells that a worker is back. A `paused` one has no memory left, and
    begins no task for now.
    """

    name: str
    address: str
    host: str
    kind: Kind
    threads: int
    memory_limit: int
    also: tuple[Kind, ...] = ()
    plain: bool = False
    called: str = ""
    paused: bool = False
    amount: float = 1

    @property
    def declared(self) -> str:
        """The resources that it advertises, joined by "and"."""
        return " and ".join(RESOURCES[kind] for kind in (self.kind, *self.also))

    def named(self, name: str) -> Member:
        """Return the worker under its name in a run."""
        return replace(self, name=name)

    @property
    def resource(self) -> dict[str, float]:
        """The whole resource, which pins a task to the worker and keeps others out; empty for a plain one."""
        return {} if self.plain else {RESOURCES[self.kind]: self.amount}


@dataclass(frozen=True)
class Members:
    """The workers that a run uses, the host of its parameter server, and other hosts that are set apart for it."""

    workers: tuple[Member, ...]
    server: Member
    server_alone: bool
    servers: tuple[Member, ...] = ()
    full: tuple[str, ...] = ()
    """Names of workers set apart for servers whose memory others' servers take."""


def present(client: Client, check: Check = no_check) -> dict[str, dict[str, Any]]:
    """Return the scheduler's workers by address. Raises OSError where the scheduler is gone or does not answer.

    This asks the scheduler itself: `client.scheduler_info` returns a cache that a timer empties of workers.
    """
    return dict(answer_to(client, client.scheduler.identity(n_workers=-1), check=check)["workers"])


def advertised(workers: Mapping[str, Mapping[str, Any]], *, plain: bool | None = None) -> list[Member]:
    """Return the workers that a job may use, by kind and name. Each has a name of its own, the user's if one was given.

    These are the workers that declare one of our resources. Where none declares CPU or GPU, workers that declare none
    of our resources are CPU workers too. `plain` decides this in place of these workers.
    """
    kinds = {address: _kinds(info) for address, info in workers.items()}
    if plain is None:
        plain = not any({"cpu", "gpu"} & {*own} for own in kinds.values())
    found = []
    for address, info in workers.items():
        if kinds[address] or plain:
            first, *also = kinds[address] or ("cpu",)
            name, host, threads = str(info.get("name", address)), str(info["host"]), int(info["nthreads"])
            limit = int(info.get("memory_limit") or 0)
            how: dict[str, Any] = {"plain": not kinds[address], "paused": info.get("status") == "paused"}
            how["amount"] = (info.get("resources") or {}).get(RESOURCES[first], 1)
            found.append(Member(name, address, host, first, threads, limit, tuple(also), called=name, **how))
    found.sort(key=lambda m: (m.kind, _natural(m.name), m.address))
    names = unique_names([given_name(workers[m.address].get("name")) for m in found], [m.kind for m in found])
    return [member.named(name) for member, name in zip(found, names, strict=True)]


def _kinds(info: Mapping[str, Any]) -> tuple[Kind, ...]:
    resources = info.get("resources") or {}
    return tuple(kind for kind, resource in RESOURCES.items() if resources.get(resource, 0) >= 1)


def taken_as_cpu(members: Iterable[Member]) -> tuple[str, ...]:
    """Return a line to say if workers that advertise nothing are taken as CPU workers; none if there are no such."""
    count = sum(member.plain for member in members)
    taken = "1 worker is taken as a CPU worker" if count == 1 else f"{count} workers are taken as CPU workers"
    remedy = "to choose others, start them with --resources CPU=1 (or GPU=1, PS=1)"
    return (f"no worker advertises CPU or GPU: {taken}; {remedy}",) if count else ()


def _natural(name: str) -> tuple[Any, ...]:
    digits = "".join(c if c.isdigit() else " " for c in name).split()
    return (name.rstrip("0123456789"), tuple(map(int, digits)), name)


def wait_for_members(
    client: Client,
    wanted: Workers,
    wait: float,
    check: Check = no_check,
    *,
    say: Say = lambda _: None,
    settle: float = 0.0,
    silent: Mapping[str, str] | None = None,
    begun: float | None = None,
    only: AllowedWorkers | None = None,
    hold: Hold | None = None,
) -> Members:
    """Wait up to `wait` seconds until the wanted workers are there. Returns those that a job takes.

    Raises ClusterError where workers are missing; it names those that were found, the runs that have them, and the
    command that adds others.

    Parameters
    ----------
    wanted : their numbers or ranges by kind; where none is given, any number will do
    check, say, begun : see `Patience`
    settle : seconds without a new worker after which any number will do, or one within the ranges
    silent : reports on workers that do not answer, by address; these are not chosen
    only : the workers that may train; None: any
    hold : the run's hold, which takes the workers; those of other runs are not chosen, and clusters that adapt see what
        is missing. None: all may be chosen
    """
    with closing(_Look(client, check, silent or {}, only or AllowedWorkers(), hold, wanted)) as look:
        return _waited_for(look, wanted, Patience(wait, check, say, begun), settle)


def _waited_for(look: _Look, wanted: Workers, patience: Patience, settle: float) -> Members:
    found, since = look.free(), time.monotonic()
    while True:
        patience.check()
        before, found = found, look.free()
        since = since if found == before else time.monotonic()
        enough = _enough(found, wanted) or look.has_all_listed(found)
        settled = enough or patience.over or time.monotonic() >= since + settle
        if (missing := missing_members(found, wanted)) and patience.over:
            raise look.refusal(found, wanted, patience.seconds)
        if settled and not missing and look.taken(members := chosen(found, wanted)):
            return replace(members, full=tuple(m.name for m in look.full))
        if missing:
            look.ask_for(sum(missing.values()))
            patience.wait_for(f"workers: {_more(missing)} ({'; '.join([f'found {_counted(found)}', *look.why()])})")
        else:
            time.sleep(POLL)


@dataclass
class _Look:
    """Looks at a cluster's workers while some are waited for. Raises ClusterError where the scheduler is gone."""

    client: Client
    check: Check
    silent: Mapping[str, str]
    only: AllowedWorkers
    hold: Hold | None
    wanted: Workers
    barred: list[Member] = field(default_factory=list)  # by their names
    full: list[Member] = field(default_factory=list)  # of others' servers
    nbytes: int = 0  # of the job's server
    others: list[Member] = field(default_factory=list)  # that train for other runs
    going: list[Member] = field(default_factory=list)  # that are to end
    demand: Demand | None = None

    def free(self) -> list[Member]:
        """Return the workers that the job may take; last of their kind those that hold servers, or are paused."""
        with _reached(self.client):
            known = present(self.client, self.check)
            there = advertised(known)
            leases = () if self.hold is None else self.hold.look(self.check)
        theirs = {} if self.hold is None else self.hold.others
        self.only.look()
        self.going = [m for m in there if known[m.address].get("status") in GOING]
        able = [m for m in there if m.address not in self.silent and m not in self.going]
        named = [m for m in able if m.kind == "ps" or m.name in self.only]
        self.barred = [m for m in able if m not in named]
        self.others = [m for m in named if m.address in theirs]
        servers = Counter(lease.worker for lease in leases if lease.serves)
        free = [m for m in named if m.address not in theirs]
        self._see_room(free)
        return sorted((m for m in free if m not in self.full), key=lambda m: (m.kind, m.paused, servers[m.address]))

    def _see_room(self, free: Sequence[Member]) -> None:
        """Note workers set apart for servers that have no room for the job's, beside those of others."""
        if self.hold is not None:
            most = sum(self.wanted.most.values()) or sum(m.kind != "ps" for m in free)
            self.nbytes, served = self.hold.server_bytes(most), self.hold.served
            sets = [m for m in free if m.kind == "ps" and m.memory_limit and served[m.address]]
            self.full = [m for m in sets if served[m.address] + self.nbytes > FOR_SERVERS * m.memory_limit]

    def has_all_listed(self, found: Sequence[Member]) -> bool:
        """Return True if these are all that a list names: others are no more to come."""
        return self.only.listed is not None and self.only.listed <= {m.name for m in found}

    def taken(self, members: Members) -> bool:
        """Take the workers; False where another run was faster."""
        if self.hold is None:
            return True
        place: dict[str, Any] = {}
        if members.server_alone and self.nbytes and (limit := members.server.memory_limit):
            place = {"host": members.server.address, "nbytes": self.nbytes, "room": int(FOR_SERVERS * limit)}
        with _reached(self.client):
            return self.hold.take([m.address for m in members.workers], self.check, **place)

    def ask_for(self, missing: int) -> None:
        """Let clusters that adapt see that this many workers are missing."""
        if self.demand is None and self.hold is not None:
            self.demand = Demand(self.client)
        if self.demand is not None:
            self.demand.set(missing)

    def close(self) -> None:
        """Ask for no more workers."""
        if self.demand is not None:
            self.demand.close()

    def why(self) -> list[str]:
        """Return why workers that are there are not free, in words."""
        names = {m.address: m.name for m in self.others}
        held = [] if self.hold is None else [self.hold.others[address] for address in names]
        barred = [f"{self.only.text} leaves out {_listed(self.barred)}"] if self.barred else []
        going = [f"leaving the cluster: {_listed(self.going)}"] if self.going else []
        return [*in_words(held, names), *barred, *going]

    def refusal(self, found: list[Member], wanted: Workers, wait: float) -> ClusterError:
        """Return the error that workers are missing."""
        scheduler = self.client.scheduler.address
        if self.barred and not self.others and not any(m.kind != "ps" for m in found):
            reason = f"no worker of scheduler {scheduler} has such a name, but {_listed(self.barred)}, after {wait:g} s"
            return ClusterError(self.only.text, reason, NAMES)
        if not missing_members([*found, *self.others], wanted):
            missing = _more(missing_members(found, wanted))
            reason = f"{_counted(found)} workers are free after {wait:g} s, but the job wants {missing}"
            remedy = (
                "wait longer (cluster.wait, --wait), start more, ask for fewer (--workers) here or in that run, "
                "or let a queue share them out (daskcnn serve)"
            )
            return ClusterError(f"scheduler {scheduler}", "; ".join([reason, *self.why()]), remedy)
        return ClusterError(_missing(self.client, found, wanted, wait, self))


NAMES = "give names as `daskcnn doctor --scheduler …` shows them, or patterns of them, such as desk-*"


def _listed(members: Sequence[Member]) -> str:
    more = f" and {len(members) - 8} more" if len(members) > 8 else ""
    return ", ".join(m.name for m in members[:8]) + more


def _more(missing: Mapping[Kind, int]) -> str:
    return ", ".join(f"{n} more with {RESOURCES[kind]}=1" for kind, n in missing.items())


def _counted(found: list[Member]) -> str:
    have = Counter(m.kind for m in found)
    return ", ".join(f"{have[kind]} {kind}" for kind in RESOURCES)


@contextmanager
def _reached(client: Client) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = "connection lost while waiting for workers"
        raise ClusterError(scheduler_of(client), reason, "start it again") from error


def missing_members(found: list[Member], wanted: Workers) -> dict[Kind, int]:
    """Return the number of workers of each kind that are missing; one CPU worker if any will do and there is none."""
    have = Counter(m.kind for m in found)
    if not wanted.given:
        return {} if have["cpu"] + have["gpu"] else {"cpu": 1}
    return {kind: n - have[kind] for kind, n in wanted.given.items() if have[kind] < n}  # type: ignore[index, misc]


def _enough(found: list[Member], wanted: Workers) -> bool:
    """Return True if no more workers are of use than those that are there, or that are missing."""
    have = Counter(str(m.kind) for m in found)
    return bool(wanted.given) and (not wanted.ranged or all(have[kind] >= n for kind, n in wanted.most.items()))


def chosen(found: list[Member], wanted: Workers) -> Members:
    """Return the members that a job takes of those found, where none is missing."""
    workers: list[Member] = []
    for kind in ("cpu", "gpu"):
        of_kind = [m for m in found if m.kind == kind]
        workers += of_kind[: wanted.most.get(kind, 0)] if wanted.given else of_kind
    servers = [m for m in found if m.kind == "ps"]
    used = {m.address for m in workers}
    spare = [m for m in found if m.kind == "cpu" and m.address not in used]
    shared = [m for m in workers if m.kind == "cpu"] or workers
    return Members(tuple(workers), (servers or spare or shared)[0], bool(servers or spare), tuple(servers[1:]))


def _missing(client: Client, found: list[Member], wanted: Workers, wait: float, look: _Look) -> str:
    address = client.scheduler.address
    lines = [f"scheduler {address}: found {_counted(found)} workers after {wait:g} s, but the job wants more:"]
    start = f"on each machine: dask worker {address} --nthreads 1 --resources"
    for kind, n in missing_members(found, wanted).items():
        remedy = f"{start} {RESOURCES[kind]}=1"
        if address.startswith("inproc://"):  # no other process reaches it
            remedy = "this cluster is one process's own: start it with more, such as LocalCluster(n_workers=…)"
        lines.append(f"  {n} more with {RESOURCES[kind]}=1; {remedy}")
    lines += [
        f"  worker {m.name} advertises {m.declared}, and counts as {m.kind}: restart it with one of them"
        for m in found
        if m.also
    ]
    lines += [f"  {words}" for words in (*look.silent.values(), *look.why())]
    known = {m.address for m in (*found, *look.others, *look.barred, *look.going)}
    if others := present(client).keys() - known - look.silent.keys():
        who = "1 worker advertises" if len(others) == 1 else f"{len(others)} workers advertise"
        lines.append(f"  {who} none of CPU, GPU, PS: restart with --resources CPU=1")
    return "\n".join(lines)
