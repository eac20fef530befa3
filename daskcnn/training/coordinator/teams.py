"""The replicas of a life: each worker is one, or groups are made of them."""

from __future__ import annotations

from daskcnn.errors import ClusterError
from daskcnn.partition.proportions import as_counted, form_groups, proportional
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.orders import Outbox
from daskcnn.training.coordinator.roster import Roster
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.judging import JudgedPart


def too_few(settings: Settings, workers: int) -> ClusterError | None:
    """Return the error of a run with too few workers; None if it can begin."""
    size, fewest = settings.replica_size, settings.rule.fewest
    if workers < size:
        return ClusterError(
            f"train.replica_size = {size}: there are {workers} workers; lower it, or start more workers"
        )
    learners, replicas = ("groups", workers // size) if size > 1 else ("workers", workers)
    if replicas < fewest:
        return ClusterError(
            f"train.strategy = {settings.strategy!r} is for {fewest} {learners} or more, and there are {replicas}; "
            "start more, or choose sgwu or agwu"
        )
    return None


class Teams:
    """The replicas of one life.

    members: their workers, in the order in which they judge validation samples. judges: seconds a sample of the worker
    that judges for each replica.
    """

    def __init__(self, settings: Settings, roster: Roster, out: Outbox) -> None:
        self._roster, self._even, self._out = roster, settings.even, out
        self._size, self._measures_links = settings.replica_size, settings.measures_links
        seconds = roster.seconds
        if settings.even:  # names decide who has which samples, and not who comes first
            seconds = dict(sorted(seconds.items()))
        if settings.replica_size == 1:
            self.members: dict[str, tuple[str, ...]] = {worker: (worker,) for worker in seconds}
        else:
            self._form_groups(seconds)
        self.judges = {name: min(seconds[worker] for worker in own) for name, own in self.members.items()}

    def _form_groups(self, seconds: dict[str, float]) -> None:
        size = min(self._size, len(seconds))  # after losses there may be fewer workers than a group is to have
        formed = form_groups(seconds, size)
        self.members = {f"group-{i}": members for i, members in enumerate(formed.groups)}
        self._order(*self.members)
        if formed.left_out:
            names = ", ".join(formed.left_out)
            self._out.warn(
                f"{names}: left out, the slowest; train.replica_size = {size} does not divide {len(seconds)} workers"
            )

    def _order(self, *names: str) -> None:
        """Order to make these of the groups."""
        self._out.put(orders.FormGroups(dict(self.members), tuple(self.free), self._measures_links, names))

    def add(self, replica: str, workers: tuple[str, ...]) -> None:
        """Make these workers a replica, or the replica one of these workers."""
        self.members[replica] = workers
        self.judges[replica] = min(self._roster.alive[worker].seconds for worker in workers)

    # --- groups are formed anew ---

    @property
    def free(self) -> list[str]:
        """Workers that are in no replica, the fastest first."""
        used = {worker for own in self.members.values() for worker in own}
        return sorted(self._roster.alive.keys() - used, key=lambda worker: (self._roster.alive[worker].seconds, worker))

    @property
    def lacks_free(self) -> bool:
        """True if free workers could fill up a group, or make another one."""
        free = len(self.free)
        return free >= self._size or (free > 0 and any(map(self.short, self.members)))

    def short(self, replica: str) -> bool:
        """Return True if a group has fewer workers than it is to have."""
        return len(self.members[replica]) < self._size

    def left(self, replica: str) -> tuple[str, ...]:
        """Return the members that the run still has."""
        return tuple(worker for worker in self.members[replica] if worker in self._roster.alive)

    def regroup(self, replica: str) -> None:
        """Form a group anew of those that are left of it, and of workers that are free."""
        self.add(replica, (*self.left(replica), *self.free)[: self._size])
        self._order(replica)

    def new_groups(self) -> list[str]:
        """Form as many groups as there are free workers for; return their names."""
        found = []
        while self._size > 1 and len(free := self.free) >= self._size:
            name = next(name for i in range(len(self.members) + 1) if (name := f"group-{i}") not in self.members)
            self.add(name, tuple(free[: self._size]))
            found.append(name)
        if found:
            self._order(*found)
        return found

    def drop(self, replica: str) -> None:
        """Forget the replica."""
        del self.members[replica], self.judges[replica]

    def of(self, worker: str) -> str | None:
        """Return the replica that the worker belongs to, if it is in one."""
        return next((name for name, own in self.members.items() if worker in own), None)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds a sample of every replica, if the members of a group went on at once."""
        each = self._roster.seconds
        return {
            name: each[name] if own == (name,) else 1 / sum(1 / each[worker] for worker in own)
            for name, own in self.members.items()
        }

    def parts(self, part: JudgedPart) -> dict[str, JudgedPart]:
        """Cut the part over the replicas in proportion to the speed of the workers that judge for them."""
        parts, lo = {}, part.lo
        counted = as_counted([*self.judges.values()], even=self._even)
        sizes = proportional(part.samples, [1 / seconds for seconds in counted])
        for replica, size in zip(self.judges, sizes, strict=True):
            if size:
                parts[replica] = part._replace(lo=lo, hi=lo + size)
            lo += size
        return parts

    def validate(self) -> None:
        """Assert the invariants between two facts."""
        assert self.members.keys() == self.judges.keys()
        assert all(worker in self._roster.alive for own in self.members.values() for worker in own)
