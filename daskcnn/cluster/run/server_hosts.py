"""The driver's side of the parameter server, which goes whole to one worker, or split over several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import cycle
from secrets import token_hex
from typing import Any

from distributed import Actor, Client, Future

from daskcnn.cluster.link.calls import WorkersLost, cancel
from daskcnn.cluster.link.client import bound_to
from daskcnn.cluster.link.sent import sent
from daskcnn.cluster.link.streams import PROTOCOLS
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.server.actor import ServerActor, ServerAt
from daskcnn.cluster.server.ranges import RangeActor, RangeAt, begin_to_load
from daskcnn.errors import Lost
from daskcnn.job.network import center_descent_of, frozen_spans, layout_of, network_of
from daskcnn.partition.step_shares import fixed_samples
from daskcnn.ps import Snapshot, UpdateRule
from daskcnn.ps.split import StoredVector, joined_snapshot, spans, split_snapshot
from daskcnn.ps.vectors import within
from daskcnn.ps.wire import Wire
from daskcnn.training.coordinator.settings import Settings


@dataclass
class ComingSnapshot:
    """A snapshot to come, as an actor's answer is. asked: the ranges' answers to come, once the actor's is here."""

    answer: Any
    ranges: Sequence[Any]
    asked: tuple[Any, ...] = ()

    def result(self, timeout: float) -> Snapshot:
        """The whole of it. Raises OSError where a part of the server does not answer within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        snapshot: Snapshot = self.answer.result(timeout=timeout)
        if not isinstance(snapshot.center, StoredVector):
            return snapshot
        self.asked = self.asked or tuple(each.kept(snapshot.center.number) for each in self.ranges)
        left = [piece.result(timeout=max(0.001, deadline - time.monotonic())) for piece in self.asked]
        return joined_snapshot(snapshot, left)


@dataclass(frozen=True)
class Hosted:
    """A server that runs. at: for the workers' tasks; ranges: the actors of a split one's, in the vector's order."""

    at: ServerAt
    actor: Any
    ranges: Sequence[Any]
    futures: tuple[Future, ...]
    hosts: frozenset[str]

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the server's actor. Returns the answer to come; a snapshot's includes the ranges."""
        answer = getattr(self.actor, method)(*args)
        return ComingSnapshot(answer, self.ranges) if method == "snapshot" else answer

    def close(self) -> None:
        """Cancel the server's actors."""
        cancel(self.futures)


def ready_host(context: RunContext) -> Future:
    """Let the server's host load the merges while workers are calibrated, else the first push waits for them.

    Returns the task, which need not be waited for.
    """
    host, dtype = context.workers.members.server, context.job.model.dtype
    return context.dispatch.submit_at(host, "load-merges", begin_to_load, dtype)


def host_server(context: RunContext, rule: UpdateRule, snapshot: Snapshot, *, life: int) -> Hosted:
    """Start a server of this life that goes on from the snapshot. Raises ServerLost or WorkersLost.

    The ranges of a split server go to the server's worker, to others set apart for it, and then to the run's own, in
    turn.
    """
    server, cluster = context.workers.members.server, context.job.cluster
    ranges, futures = _start_ranges(context, rule, snapshot) if cluster.ps_shards > 1 else ((), [])
    streams = not ranges and server.address.startswith(PROTOCOLS)
    secret = token_hex(16) if streams else ""
    at = ServerAt(server.address, context.dispatch.key("parameter-server"), ranges, secret, len(snapshot.center))
    whole = replace(snapshot, center=snapshot.center[:0].copy(), state=None) if ranges else snapshot
    held = context.dispatch.send_to(whole, server.address)
    options: dict[str, Any] = {"wire": cluster.wire, "ranges": ranges, "limit": cluster.stall_timeout}
    options |= {"life": life, "secret": secret, "run": context.name} | (
        {} if ranges else _of_center(context, rule, 0, len(snapshot.center))
    )
    if replace(Settings.of(context.job, context.samples), rule=rule).resizes_steps:
        batch, measured = context.job.train.batch_size, context.calibrations.items()
        options["step_fixed"] = {w: fixed_samples(c.step_fixed, c.seconds_per_sample, batch) for w, c in measured}
    known = sent(rule, context.job)
    futures.append(context.dispatch.submit_actor(at.key, ServerActor, known, held, host=server, **options))
    held_by = [server.address, *(each.address for each in ranges)]
    *parts, actor = _running(context, futures, held_by)
    context.workers.serve(held_by)
    return Hosted(at, actor, parts, tuple(futures), frozenset(held_by))


def _running(context: RunContext, futures: Sequence[Future], hosts: Sequence[str]) -> list[Any]:
    """The actors, once they run. Raises WorkersLost or ServerLost where one of the hosts does not answer, else Lost."""
    limit = context.job.cluster.stall_timeout
    try:
        found = context.results.gather(dict(enumerate(futures)), within=limit)
        return [_called_through(context.connection.client, actor) for actor in found.values()]
    except WorkersLost as lost:
        if set(lost.names) <= context.workers.alive.keys():
            raise
        context.workers.require_answers(list(hosts))
        reason = f"the parameter server did not start within {limit:g} s"
        remedy = "are they busy with other tasks, such as predictions? Let them end, or raise cluster.stall_timeout"
        raise Lost(f"workers {', '.join(hosts)}", reason, remedy) from lost


def _called_through(client: Client, actor: Any) -> Any:
    """The handle of an actor, whose calls go through this client: Dask takes the default one, if there is any."""
    if not isinstance(actor, Actor):
        return actor
    with bound_to(client):
        return copy(actor)  # a handle is bound to a client when it is made


def _of_center(context: RunContext, rule: UpdateRule, lo: int, hi: int) -> dict[str, Any]:
    """Return the arguments, besides the rule, of the actor that holds the numbers lo…hi of the center."""
    job, dataset = context.job, context.dataset
    own: dict[str, Any] = {"kept": within(frozen_spans(job, dataset), lo, hi), "ema": job.train.ema}
    if rule.overshoots:
        own["besides"] = within(layout_of(job, dataset).besides, lo, hi)
    if not rule.merges_gradients:
        return own
    steps = center_descent_of(job, layout_of(job, dataset), network_of(job, dataset).frozen)
    return own | {"steps": None if steps is None else sent(steps.part(lo, hi), job)}


def _start_ranges(
    context: RunContext, rule: UpdateRule, snapshot: Snapshot
) -> tuple[tuple[RangeAt, ...], list[Future]]:
    cluster = context.job.cluster
    cuts = spans(snapshot.center.size, cluster.ps_shards, Wire.of(cluster.wire, rule).unit)
    ranges, futures = [], []
    known = sent(rule, context.job)
    first = (context.workers.members.server, *context.workers.members.servers)
    rest = [member for member in context.workers.alive.values() if member.address not in {m.address for m in first}]
    for (lo, hi), part, host in zip(cuts, split_snapshot(snapshot, cuts), cycle([*first, *rest]), strict=False):
        at = RangeAt(host.address, context.dispatch.key("parameter-range"), lo, hi)
        held = context.dispatch.send_to(part, host.address)
        options = {"wire": cluster.wire, "run": context.name, **_of_center(context, rule, lo, hi)}
        futures.append(context.dispatch.submit_actor(at.key, RangeActor, known, held, host=host, **options))
        ranges.append(at)
    return tuple(ranges), futures
