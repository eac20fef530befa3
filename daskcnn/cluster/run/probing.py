"""The driver's side of probes: what a meeting of these workers would cost (`cluster.server.probe`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from secrets import token_hex
from typing import Any

from daskcnn.cluster.link.streams import PROTOCOLS
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.server.probe import TOGETHER, expect_probes, probe_together, probe_way
from daskcnn.events import LinkSpeed, LinkSpeeds
from daskcnn.job.network import layout_of, network_of
from daskcnn.ps.wire import INT8, bytes_of
from daskcnn.sharded.balance import WorkerLink
from daskcnn.training.coordinator.facts import ServerProbed
from daskcnn.training.gradient_parts import ahead_of
from daskcnn.training.strategy_prices import MEETING


class ServerProbes:
    """Probes of a run's workers to the host of its server."""

    def __init__(self, context: RunContext) -> None:
        self._context, self._secret = context, token_hex(16)
        self._expected = ""  # the address of the host that expects probes
        self._merge, self._shared = 0.0, inf
        layout, train = layout_of(context.job, context.dataset), context.job.train
        cluster = context.job.cluster
        self._nbytes, coded = bytes_of(cluster.wire, layout.size), cluster.wire == INT8
        in_parts = train.clip is None and train.optimizer.name != "lars" and cluster.ps_shards == 1 and not coded
        self._ahead = ahead_of(network_of(context.job, context.dataset), layout) if in_parts else 0.0

    def measure(self, workers: Sequence[str], at: float, *, training: bool = False) -> ServerProbed:
        """Measure the ways of these workers, one after the other and then all at once. Emits them as an event.

        Where Dask's connections are no sockets nothing is measured, nor where the host is training. A host that is gone
        before it has a server is replaced. Raises Lost, WorkersLost and ServerLost.
        """
        context, links = self._context, dict[str, WorkerLink]()
        if not training and context.workers.members.server.address not in context.connection.workers():
            context.workers.new_host()
        host = context.workers.members.server
        if self._expects(host.address, training=training):
            for worker in workers:
                found = self._gather("probe", probe_way, [worker], self._nbytes)[worker]
                if found is not None:
                    links[worker] = WorkerLink(*found)
            if len(links) > 1:
                self._shared = self._measured_together([*links], links)
        if links:
            rows = [LinkSpeed(name=name, bandwidth=own.bandwidth, latency=own.latency) for name, own in links.items()]
            context.emit(LinkSpeeds(home=host.name, workers=rows))
        return self._probed(workers, links, at)

    def unmeasured(self, workers: Sequence[str], at: float) -> ServerProbed:
        """Return the answer where nothing can be measured."""
        return self._probed(workers, {}, at)

    def _probed(self, workers: Sequence[str], links: dict[str, WorkerLink], at: float) -> ServerProbed:
        shards, home = self._context.job.cluster.ps_shards, self._context.workers.members.server.host
        of_server = {"bandwidth": self._shared * shards, "merge": self._merge / shards, "overhead": MEETING}
        return ServerProbed(tuple(workers), links, self._nbytes, at, **of_server, ahead=self._ahead, home=home)

    def _expects(self, address: str, *, training: bool) -> bool:
        """Let the host expect probes, unless it trains or has no streams. Returns True if it does."""
        context = self._context
        if not address.startswith(PROTOCOLS):
            return False
        busy = (training or self._expected) and not context.workers.members.server_alone
        if self._expected != address and not busy:
            host = context.workers.members.server
            told = context.dispatch.submit_at(host, "expect-probes", expect_probes, self._secret, self._nbytes)
            self._merge = float(context.results.gather({host.name: told})[host.name])
            self._expected = address
        return self._expected == address

    def _measured_together(self, workers: Sequence[str], links: dict[str, WorkerLink]) -> float:
        """Return the server's bandwidth as all workers send at once."""
        nbytes = min(TOGETHER, self._nbytes)
        found = self._gather("probe-together", probe_together, workers, nbytes)
        ways = [way - links[name].latency for name, way in found.items() if way is not None]
        return len(ways) * nbytes / max(*ways, 1e-9) if len(ways) > 1 else inf

    def _gather(self, label: str, function: Callable[..., Any], workers: Sequence[str], nbytes: int) -> dict[str, Any]:
        context = self._context
        address = context.workers.members.server.address
        asked = {
            worker: context.dispatch.submit(label, function, address, self._secret, nbytes, worker=worker)
            for worker in workers
        }
        return context.results.gather(asked)
