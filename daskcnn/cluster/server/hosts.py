"""Where the parameter server goes: whole to one worker, or split over several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from distributed import Future

from daskcnn.cluster.members import RESOURCES, Member
from daskcnn.cluster.run_context import RunContext
from daskcnn.cluster.server.actor import ServerActor, ServerAt
from daskcnn.cluster.server.split import RangeActor, RangeAt, SequencerActor, SplitServer, SplitServerAt
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
    handle = context.gather({server.name: future})[server.name]
    return Hosted(at, handle, (future,), frozenset([server.address]))


def _split(context: RunContext, rule: UpdateRule, snapshot: Snapshot, epoch: int) -> Hosted:
    """The ranges go to the server's worker, to others set apart for it, and then to the run's own, in turn."""
    server, wire = context.members.server, context.job.cluster.wire
    cuts = spans(snapshot.center.size, context.job.cluster.ps_shards)
    ranges, futures = [], []
    for (lo, hi), part, host in zip(cuts, split_snapshot(snapshot, cuts), _hosts(context, len(cuts)), strict=True):
        at = RangeAt(host.address, context.key("parameter-range"), lo, hi)
        held = context.send_to(part, [host.address])
        futures.append(_start(context, host, at.key, RangeActor, rule, held, wire=wire))
        ranges.append(at)
    empty = replace(snapshot, center=snapshot.center[:0].copy(), state=None)
    where = SplitServerAt(server.address, context.key("parameter-server"), tuple(ranges))
    futures.append(_start(context, server, where.key, SequencerActor, rule, empty, epoch=epoch, ranges=where.ranges))
    *parts, sequencer = context.gather(dict(enumerate(futures))).values()
    hosts = frozenset([server.address, *(at.address for at in ranges)])
    return Hosted(where, SplitServer(sequencer, parts), tuple(futures), hosts)


def _hosts(context: RunContext, count: int) -> list[Member]:
    first = (context.members.server, *context.members.servers)
    rest = [member for member in context.alive.values() if member.address not in {m.address for m in first}]
    return list(islice(cycle([*first, *rest]), count))


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
