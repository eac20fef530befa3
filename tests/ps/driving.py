"""Replicas that live by a rule as the cluster's workers do, and a server that answers them in any order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np
import pytest

from daskcnn.arrays import NUMPY, Backend, Device
from daskcnn.nn import OPTIMIZERS, SGD, Optimizer, OptimizerState
from daskcnn.ps import (
    RULES,
    Action,
    Asynchronous,
    Join,
    Leave,
    Local,
    ParameterServer,
    Pull,
    Push,
    Reply,
    Request,
    UpdateRule,
    Vector,
    View,
)
from daskcnn.ps.versions import Bases

Gradient: TypeAlias = Callable[[Vector], Vector]
Life: TypeAlias = Generator[Request, Reply, None]
DEVICE = Device()
PLAIN, MOMENTUM = SGD(), SGD(momentum=0.9, nesterov=True, weight_decay=0.01)
every_optimizer = pytest.mark.parametrize(
    "optimizer", [MOMENTUM, *(kind() for kind in OPTIMIZERS.values())], ids=["momentum", *OPTIMIZERS]
)

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "sgwu": [{"every": 3}],
    "agwu": [{"attenuation": "staleness"}, {"attenuation": "paper-uncapped"}, {"accuracy_floor": 0.5}, {"every": 3}],
    "bsp": [{"combine": "sum"}, {"every": 3}, {"every": 0}],
    "easgd": [{"alpha": 1.0}, {"alpha": 0.1, "tau": 3}],
    "downpour": [{"n_push": 2, "n_fetch": 3}, {"n_push": 5, "n_fetch": 2}, {"server": "adagrad", "server_lr": 0.5}],
    "dc-asgd": [{"every": 3}, {"every": 0, "compensation": 0.5, "memory": 0.0}, {"compensation": 0.0}],
    "admm": [
        {"rho": 0.0, "every": 1, "from_center": True},
        {"rho": 1.0, "every": 2},
        {"rho": 0.5, "from_center": True},
    ],
    "parallel-sgd": [{"rounds": 3}, {"weigh": "equal"}],
    "local-sgd": [{"every": 3}, {"outer_momentum": 0.0}, {"every": 2, "outer_lr": 0.7, "outer_momentum": 0.5}],
}
STALENESS = [{"max_staleness": 0}, {"max_staleness": 2}]


def _cases() -> list[Any]:
    """Every rule with its defaults, with each of its variants and, where it may be, with bounded staleness."""
    return [
        pytest.param(rule(**options), id=f"{name} {options}")
        for name, rule in RULES.items()
        for options in ({}, *VARIANTS.get(name, []), *(STALENESS if issubclass(rule, Asynchronous) else []))
    ]


every_variant = pytest.mark.parametrize("rule", _cases())


def push(
    worker: str, payload: Vector, *, accuracy: float = 0.5, base: int = 0, seq: int = 1, samples: int = 10
) -> Push:
    return Push(0, worker, 1, seq, base, payload, samples, accuracy)


def view(version: int, bases: dict[str, int]) -> View:
    known = Bases()
    for worker, base in bases.items():
        known.set(worker, base)
    return View(version, len(bases), known)


def vectors(count: int, size: int = 7, dtype: str = "float32") -> list[Vector]:
    return list(np.random.default_rng(count).standard_normal((count, size)).astype(dtype))


def parabola(curvature: float, minimum: Sequence[float]) -> Gradient:
    """The gradient of curvature/2·‖w - minimum‖²."""
    return lambda weights: curvature * (weights - np.asarray(minimum, weights.dtype))


def rule_of(name: str, **parameters: Any) -> UpdateRule:
    """The rule of this name with these parameters, which `UpdateRule` itself does not declare."""
    return RULES[name](**parameters)


@dataclass
class UnderWay:
    """An exchange with the server: after which step it began, the weights that were sent then, what came back."""

    begun: int
    sent: Vector
    replies: list[tuple[Action, Reply]] = field(default_factory=list)


@dataclass
class Replica:
    """One worker: what it trains on, and for how long. `local` is there once it has joined.

    late: steps that it makes before it takes in what an exchange within a round brings, where its rule allows that.
    """

    rule: UpdateRule
    worker: str
    gradient: Gradient
    rounds: int = 1
    steps: int = 1
    lr: float = 0.1
    optimizer: Optimizer = PLAIN
    samples: int = 10
    accuracy: float = 0.5
    late: int = 0
    besides: tuple[slice, ...] = ()
    backend: Backend = NUMPY
    local: Local = field(init=False)
    state: OptimizerState = field(init=False)
    trained: list[Vector] = field(default_factory=list)  # what each step added to the weights

    def life(self) -> Life:
        """Its events, each sent the reply to it: as `training.replica_exchange` does it."""
        rule, seq = self.rule, 0
        reply = yield Join(0, self.worker, 1)
        weights = self.backend.from_host(np.zeros_like(reply.weights))
        self.local = local = Local(weights, weights, besides=self.besides)
        self.state = self.optimizer.init(weights, self.backend.xp)
        rule.begin(local, self.backend.from_host(reply.weights), reply.version)
        late = self.late if rule.overlaps else 0
        for _ in range(self.rounds):
            under_way: UnderWay | None = None
            for step in range(1, self.steps + 1):
                self._step()
                last = step == self.steps
                due = rule.due(step, round_end=last)
                if under_way and (due or last or step >= under_way.begun + late):
                    self._take_in(under_way)
                    under_way = None
                if not due:
                    continue
                under_way = UnderWay(step, local.weights.copy())
                if Action.PUSH in due:
                    seq += 1
                    base, payload = local.base_version, self.backend.to_host(rule.pushed(local)).copy()
                    reply = yield Push(0, self.worker, 1, seq, base, payload, self.samples, self.accuracy)
                    under_way.replies.append((Action.PUSH, reply))
                if Action.PULL in due:
                    under_way.replies.append((Action.PULL, (yield Pull(0, self.worker, 1))))
                if last or not late:
                    self._take_in(under_way)
                    under_way = None
        yield Leave(self.worker, 1)

    def _take_in(self, exchange: UnderWay) -> None:
        """Go on from the replies, and from what was trained since the weights were sent."""
        weights = self.local.weights
        gained = weights - exchange.sent
        weights[...] = exchange.sent
        for action, reply in exchange.replies:
            take_in = self.rule.adopt if action == Action.PUSH else self.rule.pulled
            take_in(self.local, self.backend.from_host(reply.weights), reply.version)
        weights += gained

    def _step(self) -> None:
        local, before = self.local, self.local.weights.copy()
        grads = self.rule.local_step(self.gradient(local.weights), local)
        self.state = self.optimizer.step(local.weights, grads, self.state, self.lr, Device(self.backend))
        self.trained.append(local.weights - before)


class Cluster:
    """A server and its replicas. All join first; then `run` lets one after the other send what it has to say."""

    def __init__(self, server: ParameterServer, replicas: Iterable[Replica]) -> None:
        self.server, self.now = server, 0.0
        self.events: list[Request] = []
        self.replies: list[Reply] = []
        self.centers: list[Vector] = [server.snapshot().center]
        self.lives = {replica.worker: replica.life() for replica in replicas}
        self.asking = {worker: next(life) for worker, life in self.lives.items()}
        for worker in list(self.lives):
            self.tell(worker)

    def run(self, turns: Iterable[int] | None = None) -> None:
        """To the end of all lives. turns: whose turn it is among those that wait for nothing; all in turn if None."""
        for turn in cycle(turns or [0]):
            if not self.asking:
                break
            self.tell(list(self.asking)[turn % len(self.asking)])
        assert not self.lives, f"{list(self.lives)} wait for ever"

    def tell(self, worker: str) -> None:
        """Send the worker's event; whoever is answered goes on to its own next one."""
        self.now += 1.0
        event = replace(self.asking.pop(worker), at=self.now)
        self.events.append(event)
        instructions = self.server.handle(event)
        self.server.validate()
        if isinstance(event, Leave):
            del self.lives[worker]
        for reply in instructions:
            assert isinstance(reply, Reply), reply
            self.replies.append(reply)
            self.asking[reply.worker] = self.lives[reply.worker].send(reply)
        if self.server.snapshot().center is not self.centers[-1]:
            self.centers.append(self.server.snapshot().center)


def trained(
    rule: UpdateRule, start: Vector, gradients: Iterable[Gradient], *, turns: Iterable[int] | None = None, **how: object
) -> tuple[Cluster, list[Replica]]:
    """Replicas w0, w1, … of these gradients, run to the end."""
    replicas = [Replica(rule, f"w{i}", gradient, **how) for i, gradient in enumerate(gradients)]  # type: ignore[arg-type]
    cluster = Cluster(ParameterServer(rule, start), replicas)
    cluster.run(turns)
    return cluster, replicas


def alone(start: Vector, gradient: Gradient, steps: int, *, lr: float = 0.1, optimizer: Optimizer = PLAIN) -> Vector:
    """The weights after so many steps without any server."""
    weights, state = start.copy(), optimizer.init(start)
    for _ in range(steps):
        state = optimizer.step(weights, gradient(weights), state, lr, DEVICE)
    return weights
