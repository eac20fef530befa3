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
        self._roster, self._even = roster, settings.even
        seconds = roster.seconds
        if settings.even:  # names decide who has which samples, and not who comes first
            seconds = dict(sorted(seconds.items()))
        if settings.replica_size == 1:
            self.members: dict[str, tuple[str, ...]] = {worker: (worker,) for worker in seconds}
        else:
            self._form_groups(settings, seconds, out)
        self.judges = {name: min(seconds[worker] for worker in own) for name, own in self.members.items()}

    def _form_groups(self, settings: Settings, seconds: dict[str, float], out: Outbox) -> None:
        size = settings.replica_size
        formed = form_groups(seconds, size)
        self.members = {f"group-{i}": members for i, members in enumerate(formed.groups)}
        out.put(orders.FormGroups(dict(self.members), formed.left_out, settings.measures_links))
        if formed.left_out:
            names = ", ".join(formed.left_out)
            out.warn(
                f"{names}: left out, the slowest; train.replica_size = {size} does not divide {len(seconds)} workers"
            )

    def add(self, worker: str) -> None:
        """Make the worker a replica."""
        self.members[worker], self.judges[worker] = (worker,), self._roster.alive[worker].seconds

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
