"""Where the parameter server goes: whole to one worker, or split over several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from distributed import Future

from daskcnn.cluster.members import RESOURCES, Member
from daskcnn.cluster.run_context import RunContext, WorkersLost
from daskcnn.cluster.server.actor import ServerActor, ServerAt
from daskcnn.cluster.server.split import RangeActor, RangeAt, SequencerActor, SplitServer, SplitServerAt
from daskcnn.errors import Lost
from daskcnn.ps import Snapshot, UpdateRule
from daskcnn.ps.split import spans, split_snapshot


@dataclass(frozen=True)
class Hosted:
    """A server that runs. at: for the workers' tasks; handle: for the driver. It ends with its futures."""

    at: ServerAt | SplitServerAt
    handle: Any
    futures: tuple[Future, ...]
    hosts: frozenset[str]

    def close(self) -> None:
        for future in self.futures:
            future.cancel()


def host_server(context: RunContext, rule: UpdateRule, snapshot: Snapshot, *, epoch: int) -> Hosted:
    """Start a server of this epoch that goes on from the snapshot. Raises ServerLost or WorkersLost."""
    if context.job.cluster.ps_shards == 1:
        return _whole(context, rule, snapshot, epoch)
    return _split(context, rule, snapshot, epoch)


def _whole(context: RunContext, rule: UpdateRule, snapshot: Snapshot, epoch: int) -> Hosted:
    server, wire = context.members.server, context.job.cluster.wire
    at = ServerAt(server.address, context.key("parameter-server"))
    held = context.send_to(snapshot, [server.address])
    future = _start(context, server, at.key, ServerActor, rule, held, epoch=epoch, wire=wire)
    handle = _running(context, [future], [server])[0]
    return Hosted(at, handle, (future,), frozenset([server.address]))


def _split(context: RunContext, rule: UpdateRule, snapshot: Snapshot, epoch: int) -> Hosted:
    """The ranges go to the server's worker, to others set apart for it, and then to the run's own, in turn."""
    server, wire = context.members.server, context.job.cluster.wire
    cuts = spans(snapshot.center.size, context.job.cluster.ps_shards)
    ranges, futures, hosts = [], [], [*_hosts(context, len(cuts)), server]
    for (lo, hi), part, host in zip(cuts, split_snapshot(snapshot, cuts), hosts[:-1], strict=True):
        at = RangeAt(host.address, context.key("parameter-range"), lo, hi)
        held = context.send_to(part, [host.address])
        futures.append(_start(context, host, at.key, RangeActor, rule, held, wire=wire))
        ranges.append(at)
    empty = replace(snapshot, center=snapshot.center[:0].copy(), state=None)
    where = SplitServerAt(server.address, context.key("parameter-server"), tuple(ranges))
    futures.append(_start(context, server, where.key, SequencerActor, rule, empty, epoch=epoch, ranges=where.ranges))
    *parts, sequencer = _running(context, futures, hosts)
    addresses = frozenset(host.address for host in hosts)
    return Hosted(where, SplitServer(sequencer, parts), tuple(futures), addresses)


def _hosts(context: RunContext, count: int) -> list[Member]:
    first = (context.members.server, *context.members.servers)
    rest = [member for member in context.alive.values() if member.address not in {m.address for m in first}]
    return list(islice(cycle([*first, *rest]), count))


def _running(context: RunContext, futures: Sequence[Future], hosts: Sequence[Member]) -> list[Any]:
    """The actors, once they run. Raises WorkersLost or ServerLost where one of the hosts does not answer, else Lost."""
    try:
        return list(context.gather(dict(enumerate(futures))).values())
    except WorkersLost as lost:
        if set(lost.names) <= context.alive.keys():
            raise
        context.require_answers([host.address for host in hosts])
        names = ", ".join(dict.fromkeys(host.name for host in hosts))
        raise Lost(
            f"workers {names}: the parameter server did not start within {context.job.cluster.stall_timeout:g} s; "
            "are they busy with another job? Give each job its own, or raise cluster.stall_timeout"
        ) from lost


def _start(
    context: RunContext, host: Member, key: tuple[str, int], actor: Callable[..., Any], *args: Any, **options: Any
) -> Future:
    return context.client.submit(
        actor,
        *args,
        **options,
        actor=True,
        key=key,
        workers=[host.address],
        resources={RESOURCES[host.kind]: 1},
        allow_other_workers=False,
        pure=False,
    )
