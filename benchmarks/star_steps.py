"""Steps of layer sharding as Marques et al. send them: a star over plain sockets, in doubles.

The first worker is the master and has the network. For each convolution of each minibatch it sends every slave the
whole input and the slave's kernels, convolves its own kernels, and reads the slaves' maps (Algorithms 1 and 2). Eq. 1
shares kernels out, once. The papers do not say what becomes of the way back: here the master makes it by itself, or
slaves are sent the gradients of their maps and return those of their kernels and of the input. Convolutions and all
other layers are ours, so that a comparison is one of what is sent, and when.
"""

from __future__ import annotations

import itertools
import json
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
from distributed import get_worker
from distributed.comm import get_address_host

from daskcnn.arrays import Array, single_threaded_blas
from daskcnn.cluster.layers.task_context import TaskContext, batch_plan
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.worker.session import session_of
from daskcnn.job.network import training_samples
from daskcnn.nn import Context, Params, Sequential, State, StepPace
from daskcnn.nn.layer import Residual
from daskcnn.nn.layers.conv import Conv
from daskcnn.nn.scaled import channel_sum
from daskcnn.partition.proportions import kernel_shards
from daskcnn.planning.simulate import conv_layers
from daskcnn.store import load_batch
from daskcnn.training.replica import Replica
from daskcnn.training.stopwatch import Stopwatch

WARM = 2
"""Steps that are not counted."""
LENGTH = struct.Struct("<Q")
OVER = "over"

# --- messages ---


class Link:
    """One end of a connection. Arrays travel as doubles. moved: bytes of arrays that went either way."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self.moved = sock, 0

    def send(self, what: str, about: Any = None, *arrays: Array) -> None:
        """Send a message: what it is, a few words, and arrays."""
        doubles = [np.ascontiguousarray(array, np.float64) for array in arrays]
        head = json.dumps([what, about, [array.shape for array in doubles]]).encode()
        self._sock.sendall(LENGTH.pack(len(head)) + head)
        for array in doubles:
            self._sock.sendall(array.data.cast("B"))
            self.moved += array.nbytes

    def receive(self) -> tuple[str, Any, list[Array]]:
        """The next message, its arrays in float32."""
        (length,) = LENGTH.unpack(self._read(bytearray(LENGTH.size)))
        what, about, shapes = json.loads(self._read(bytearray(length)))
        arrays = [np.empty(shape, np.float64) for shape in shapes]
        for array in arrays:
            self._read(array.data.cast("B"))
            self.moved += array.nbytes
        return what, about, [array.astype(np.float32) for array in arrays]

    def _read(self, into: Any) -> Any:
        view, at = memoryview(into), 0
        while at < len(view):
            count = self._sock.recv_into(view[at:])
            if not count:
                raise ConnectionError("the other end of the star is gone")
            at += count
        return into

    def close(self) -> None:
        self._sock.close()


# --- the master ---


@dataclass
class Star:
    """The master's links to its slaves, and the kernels of each layer for itself and for each slave.

    back: slaves take part in the way back. What the master computes between two exchanges is throttled as in a run.
    """

    links: Sequence[Link]
    kernels: Mapping[str, Sequence[int]]
    watch: Stopwatch
    back: bool

    def __post_init__(self) -> None:
        self.begun = self.watch.begin()

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Send or receive: what was computed before is at its end, and what comes behind begins."""
        self.watch.since(self.begun)
        yield
        self.begun = self.watch.begin()

    def cuts(self, layer: str) -> list[slice]:
        """Its own kernels, and those of each slave."""
        ends = [0, *itertools.accumulate(self.kernels[layer])]
        return [slice(a, b) for a, b in itertools.pairwise(ends)]


@dataclass(frozen=True)
class StarConv(Conv):
    """A convolution whose kernels the master shares out anew with each minibatch."""

    name: str = ""
    star: Any = field(default=None, compare=False)

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        star, w, b = self.star, params["w"], params.get("b")
        own, *theirs = star.cuts(self.name)
        with star.exchanging():
            for link, cut in zip(star.links, theirs, strict=True):
                link.send("forward", (self.name, ctx.need_dx, star.back), x, w[..., cut])
        y, state, residual = super().forward({"w": np.ascontiguousarray(w[..., own])}, state, x, ctx)
        with star.exchanging():
            maps = [link.receive()[2][0] for link in star.links]
        y = np.concatenate([y, *maps], axis=-1)
        if b is not None:
            y += b
        return y, state, (x, residual)

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        star, (x, kept) = self.star, residual
        if not star.back:
            return super().backward(params, self.residual(params, x, ctx), dy, ctx)
        own, *theirs = star.cuts(self.name)
        with star.exchanging():
            for link, cut in zip(star.links, theirs, strict=True):
                link.send("backward", None, dy[..., cut])
        dx, grads = replace(self, bias=False).part_backward(kept, np.ascontiguousarray(dy[..., own]), ctx)
        with star.exchanging():
            found = [link.receive()[2] for link in star.links]
        dws = [grads["w"], *(arrays[0] for arrays in found)]
        if dx is not None:
            dx = sum((arrays[1] for arrays in found), start=dx)
        bias = {"b": channel_sum(dy, ctx.device)} if self.bias else {}
        return dx, {"w": np.concatenate(dws, axis=-1), **bias}

    def part_backward(self, kept: Residual, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        """The way back of the master's own kernels."""
        return super().backward({}, kept, dy, ctx)


class Listening:
    """The master's socket, until its slaves have come."""

    def __init__(self) -> None:
        self.sock = socket.create_server((get_address_host(get_worker().address), 0))


def listen(at: TaskContext) -> tuple[str, int]:
    """Open the master's socket. Returns its address."""
    host, port = session_of(at.run).kept.put(Listening()).sock.getsockname()[:2]
    return host, port


def master(at: TaskContext, kernels: Mapping[str, Sequence[int]], slaves: int, seconds: float, back: bool) -> Any:
    """Make steps of the star until these seconds have passed. Returns when each ended, and a step's bytes."""
    session = session_of(at.run)
    replica, whole = session.replica, session.replica.model
    with ExitStack() as stack:
        with closing(session.kept.find(Listening).sock) as listening:
            links: dict[int, Link] = {}
            for _ in range(slaves):
                link = stack.enter_context(closing(Link(listening.accept()[0])))
                links[link.receive()[1]] = link
        star = Star([links[number] for number in sorted(links)], kernels, replica.watch, back)
        replica.model = shared_out(whole, star)
        try:
            return _steps(replica, star, seconds)
        finally:
            replica.model = whole
            for link in star.links:
                link.send(OVER)


def shared_out(model: Sequential, star: Star) -> Sequential:
    """The network with each of its convolutions shared out by the star."""
    layers = []
    for name, layer in model.layers:
        if isinstance(layer, Conv):
            layer = StarConv(**vars(layer), name=name, star=star)
        layers.append((name, layer))
    return replace(model, layers=tuple(layers))


def _steps(replica: Replica, star: Star, seconds: float) -> tuple[list[float], float]:
    dataset = replica.dataset
    plan = batch_plan(replica.job, training_samples(replica.job, dataset), 0)
    batch = load_batch(dataset, dataset.train, plan, replica.job.model.dtype, np.arange(replica.batch_size))

    def step() -> None:
        star.begun = star.watch.begin()
        replica.step(batch, StepPace(1e-4))
        star.watch.since(star.begun)

    with single_threaded_blas():
        for _ in range(WARM):
            step()
        before, ends = sum(link.moved for link in star.links), [time.time()]
        while time.time() - ends[0] < seconds or len(ends) < 3:
            step()
            ends.append(time.time())
    return ends, (sum(link.moved for link in star.links) - before) / (len(ends) - 1)


# --- a slave ---


def slave(at: TaskContext, address: tuple[str, int], number: int) -> None:
    """Convolve for the master at this address until it says that training is over."""
    replica = session_of(at.run).replica
    with closing(Link(socket.create_connection(address))) as link, single_threaded_blas():
        link.send("slave", number)
        convolve(link, replica.model, Context(replica.device), replica.watch)


def convolve(link: Link, model: Sequential, ctx: Context, watch: Stopwatch) -> None:
    """Answer every message with the maps or the gradients of the kernels in it."""
    layers = {name: replace(layer, bias=False) for name, layer in model.layers if isinstance(layer, Conv)}
    passed: list[tuple[Conv, Residual, Context]] = []
    while (message := link.receive())[0] != OVER:
        what, about, arrays = message
        begun = watch.begin()
        if what == "forward":
            name, need_dx, back = about
            (x, w), layer, own = arrays, layers[name], replace(ctx, need_dx=need_dx)
            y, _, residual = layer.forward({"w": w}, {}, x, own)
            answer = [y]
            if back:
                passed.append((layer, residual, own))
        else:
            layer, residual, own = passed.pop()
            dx, grads = layer.backward({}, residual, arrays[0], own)
            answer = [grads["w"]] if dx is None else [grads["w"], dx]
        watch.since(begun)
        link.send("result", None, *answer)


# --- the driver ---


def star_on(context: RunContext, seconds: float, *, back: bool) -> tuple[float, float]:
    """Median seconds of a step of the star of all workers, the first of whom is its master, and a step's bytes."""
    names = sorted(context.workers.alive)
    tasks = {name: TaskContext(context.name, name, 0, 0, "float64") for name in names}
    first, *others = names
    known = [context.calibrations[name].conv_seconds for name in names]
    convs = conv_layers(context.job, context.dataset)
    kernels = {layer: kernel_shards(spec.K, [own[layer] for own in known]) for layer, spec in convs}
    address = context.results.gather({first: context.dispatch.submit("listen", listen, tasks[first], worker=first)})
    futures = {
        name: context.dispatch.submit("slave", slave, tasks[name], address[first], number, worker=name)
        for number, name in enumerate(others)
    }
    told = kernels, len(others), seconds, back
    futures[first] = context.dispatch.submit("master", master, tasks[first], *told, worker=first)
    ends, moved = context.results.gather(futures)[first]
    return median(b - a for a, b in itertools.pairwise(ends)), moved
