"""How weights travel, on real processes: peer to peer and over a split server; and what is counted."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped] # it ships no types; Dask depends on it
import numpy as np
import pytest
from distributed import Client

from daskcnn.cluster.link.members import wait_for_members
from daskcnn.cluster.messages import RoundOrder
from daskcnn.cluster.peers import meetings as meetings_of_peers
from daskcnn.cluster.peers.meetings import PeerExchange
from daskcnn.cluster.run import server_hosts as hosting
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.run.exchange import ServerExchange
from daskcnn.cluster.run.exchange import Watch as Watching
from daskcnn.cluster.run.server_hosts import Hosted, host_server
from daskcnn.cluster.server.actor import ServerActor
from daskcnn.errors import Interrupted
from daskcnn.job.network import center_descent_of, initial_weights
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.launch.training import Result
from daskcnn.nn import OptimizerState
from daskcnn.partition.rounds import Round
from daskcnn.ps import RULES, ParameterServer, Request, Snapshot
from daskcnn.ps.bsp import BSP
from daskcnn.ps.wire import bytes_of as wire_bytes_of
from daskcnn.runs.checkpoint import load
from daskcnn.runs.state import TrainingState
from daskcnn.store import open_dataset
from daskcnn.training.coordinator import facts, orders
from tests.cluster.cluster_jobs import (
    Watch,
    assert_checkpoints_stay_finite,
    in_mid_round,
    kill_worker,
    run,
    small_job,
)
from tests.cluster.conftest import RuleRuns
from tests.training.coordinator_shell import report_of

pytestmark = pytest.mark.cluster
VECTOR = 2113  # numbers of the small network
RECORD = "DASKCNN_TEST_RECORD"
"""Environment variable of a worker: the file for what a recorded server is asked."""


def bsp(path: str, runs: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small job of BSP, whose allocation does not depend on what is measured."""
    train = {"strategy": "bsp", "partition": "udpa", "batch_size": 64} | sections.pop("train", {})
    return small_job(path, runs, train=train, **sections)


@contextmanager
def by_value() -> Iterator[None]:
    """Workers do not have this module: what is defined here travels by its code."""
    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)
    yield
    cloudpickle.unregister_pickle_by_value(here)


def bytes_of(result: Result) -> tuple[int, int]:
    return result.summary["bytes"]["up"], result.summary["bytes"]["down"]


def meetings(watch: Watch) -> int:
    """The meetings of the whole run. Every worker has the same number of them."""
    pushes = {(event["round"], event["pushes"]) for event in watch.of("round")}
    assert len(pushes) == len({number for number, _ in pushes})
    return sum(count for _, count in pushes)


@pytest.mark.parametrize("way", ["asa", "split server"])
def test_every_way_makes_the_very_weights_of_a_server(
    three_workers: Client, rule_runs: RuleRuns, runs: str, way: str
) -> None:
    """On one-thread workers, to the last bit. A peer moves 2 (k-1)/k of the vector at each meeting."""
    assert set(three_workers.nthreads().values()) == {1}
    through, through_watch, job = rule_runs("bsp")
    job = job | {"run": {"dir": runs}}
    if way == "asa":
        job["rule"] = job["rule"] | {"exchange": "asa"}
    else:
        job["cluster"] = job["cluster"] | {"ps_shards": 3}
    watch = Watch()
    result = run(three_workers, job, watch)
    np.testing.assert_array_equal(result.model.vector, through.model.vector)
    assert meetings(watch) == meetings(through_watch)
    if way == "asa":
        assert bytes_of(result) == (2 * 2 * VECTOR * 4 * meetings(watch),) * 2
        one = watch.of("round")[0]
        assert one["bytes_up"] == pytest.approx(2 * (2 / 3) * VECTOR * 4 * one["pushes"], rel=1e-3)
    else:
        assert bytes_of(result) == bytes_of(through)
    assert {event["version"] - event["base_version"] for event in watch.of("round")} == {1}


@pytest.mark.slow
def test_asa16_halves_the_bytes_and_follows_asa(three_workers: Client, synthetic: str, runs: str) -> None:
    whole, half = (
        run(three_workers, bsp(synthetic, runs, rule={"exchange": name}, cluster={"workers": {"cpu": 2}}))
        for name in ("asa", "asa16")
    )
    assert [2 * n for n in bytes_of(half)] == [*bytes_of(whole)]
    assert half.model.vector.dtype == np.float32
    assert not np.array_equal(half.model.vector, whole.model.vector)
    # increments lose a part in 2,000; the training between meetings carries that on
    assert np.abs(half.model.vector - whole.model.vector).max() < 0.02
    assert abs(half.summary["test"]["loss"] - whole.summary["test"]["loss"]) < 0.02


@pytest.mark.slow
def test_worker_that_stands_still_between_meetings_is_given_up(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    job = bsp(synthetic, runs, rule={"exchange": "asa"}, cluster={"stall_timeout": 4.0, "workers": {"cpu": 2}})
    watch = Watch()
    go_on = kill_worker(three_workers, "cpu-1", signal.SIGCONT)
    heard = in_mid_round(three_workers, kill_worker(three_workers, "cpu-1", signal.SIGSTOP))
    try:
        result = run(three_workers, job, watch, heard=heard)
    finally:
        go_on()
    (lost,) = watch.of("worker-lost")
    assert lost["worker"] == "cpu-1"
    assert "no report" in lost["reason"]
    assert result.summary["status"] == "done"
    assert sum(event["samples"] for event in watch.of("round")) == 2 * 800


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["asa", "asa16"])
def test_divergence_between_peers_keeps_the_last_finite_checkpoint(
    three_workers: Client, synthetic: str, runs: str, exchange: str
) -> None:
    job = bsp(synthetic, runs, rule={"exchange": exchange}, train={"epochs": 40})
    assert_checkpoints_stay_finite(three_workers, job)


@pytest.mark.parametrize("restored", [False, True])
def test_a_center_that_the_driver_has_is_one_to_go_on_from(monkeypatch: pytest.MonkeyPatch, restored: bool) -> None:
    """The workers that had it are lost before the next life has met."""
    monkeypatch.setattr(meetings_of_peers, "layout_of", lambda *_: np.zeros(4))
    alive, answers = {"a": None, "b": None}, [{"a": (7, None)}, {"a": np.ones(4, np.float32)}, {}]
    context: Any = SimpleNamespace(
        job=Job(), dataset=None, name="it",
        workers=SimpleNamespace(alive=alive, needs_server=True),
        dispatch=SimpleNamespace(submit=lambda *_, **__: None, send=lambda vector, _: vector),
        results=SimpleNamespace(gather=lambda *_, **__: answers.pop(0)),
    )  # fmt: skip
    state = TrainingState(3, 0.5, np.zeros(4, np.float32), {}, {})
    exchange = PeerExchange(context, BSP(exchange="asa"), state, lambda *_: None, lambda _: None)
    exchange.join(orders.Join("a", 1, 1), state, {}, {})
    exchange._holders = ("a",)  # it has met others
    assert exchange.rescue({}) == 7
    exchange.join(orders.Join("b", 2, 1), state, {}, {})
    del alive["a"]
    assert exchange.rescue({}) == 7
    exchange.rescued = not restored
    exchange.join(orders.Join("b", 3, 1), state, {}, {})
    found = exchange.snapshot()
    assert (found.version, found.center.tolist()) == ((3, [0.0] * 4) if restored else (7, [1.0] * 4))


@pytest.mark.slow
def test_peers_interrupted_in_mid_round_are_saved_and_go_on(three_workers: Client, synthetic: str, runs: str) -> None:
    job = bsp(synthetic, runs, rule={"exchange": "asa"}, train={"epochs": 3}, run={"name": "it"})
    heard = in_mid_round(three_workers, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="--resume"):
        run(three_workers, job, handle_signals=True, heard=heard)
    again = Watch()
    result = run(three_workers, job, again, resume=Path(runs) / "it")
    assert again.of("resume")[0]["step"] > 0
    assert (result.summary["status"], result.summary["epochs"]) == ("done", 3)
    assert sum(event["samples"] for event in again.of("round")) < 3 * 800


# --- pushes in int8 ---


@pytest.mark.slow
def test_a_run_in_int8_goes_on_with_its_rests_on_a_split_server(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    """Its other half goes over two ranges, which hold whole blocks."""
    cluster: dict[str, Any] = {"wire": "int8", "workers": {"cpu": 2}}
    job = bsp(synthetic, runs, train={"epochs": 2}, cluster=cluster, run={"name": "it"})
    first, again = Watch(), Watch()
    run(three_workers, job, first)
    last = sorted((Path(runs) / "it/checkpoints").glob("step-*"))[-1]
    assert {name for name in load(last).arrays if name.startswith("rest:")} == {"rest:cpu-0", "rest:cpu-1"}
    job |= {"train": job["train"] | {"epochs": 4}, "cluster": job["cluster"] | {"ps_shards": 2}}
    result = run(three_workers, job, again, resume=Path(runs) / "it")
    assert (result.summary["status"], result.summary["epochs"]) == ("done", 4)
    for event in (*first.of("round"), *again.of("round")):
        assert event["bytes_up"] == event["pushes"] * wire_bytes_of("int8", VECTOR)


# --- the server split over several actors ---


@pytest.mark.slow
def test_new_split_server_goes_on_when_the_host_of_a_range_is_killed(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    """The second range lies on cpu-0, which trains as well."""
    cluster = {"ps_shards": 2, "workers": {"cpu": 2}}
    job = small_job(synthetic, runs, train={"strategy": "agwu", "epochs": 4}, cluster=cluster)
    watch = Watch("checkpoint", kill_worker(three_workers, "cpu-0"))
    result = run(three_workers, job, watch)
    assert [event["worker"] for event in watch.of("worker-lost")] == ["cpu-0"]
    assert any("a new server starts on ps" in event["message"] for event in watch.of("warning"))
    assert (result.summary["status"], result.summary["epochs"]) == ("done", 4)


@contextmanager
def hosted(client: Client, parts: int, size: int) -> Iterator[Hosted]:
    """A Downpour server of zeros, on a cluster of three workers and one for the server."""
    cluster, train = {"workers": {"cpu": 3}, "ps_shards": parts}, {"strategy": "downpour"}
    job = resolve({"cluster": cluster, "train": train, "model": {"name": "quick"}})
    members = wait_for_members(client, job.cluster.workers, 60.0)
    none: Any = None
    # of a network without running statistics
    images: Any = SimpleNamespace(shape=(32, 32, 3), classes=range(10), train=range(50_000))
    context = RunContext.of(client, "hosted", job, images, members, emit=none, save=none)
    server = host_server(context, RULES["downpour"](), Snapshot(np.zeros(size, np.float32)), life=1)
    yield server
    server.close()


def push_and_read(at: Any, worker: str, value: float, rounds: int, size: int) -> int:
    """A worker's task. Every merge leaves a center whose numbers are all the same: returns how many reads were not."""
    from daskcnn.ps import Join, Pull, Push

    link, torn = at.link(at.stream(worker, "float32"), wire="float32", stopped=lambda: False), 0
    link.call(Join(1, worker, 1))
    for seq in range(1, rounds + 1):
        link.call(Push(1, worker, 1, seq, 0, np.full(size, value, np.float32), 1, 0.5))
        torn += bool(np.ptp(link.call(Pull(1, worker, 1)).weights))
    assert (link.bytes_up, link.bytes_down) == (rounds * size * 4, (rounds + 1) * size * 4)
    return torn


def push_bad(at: Any, size: int) -> tuple[list[str], Any]:
    """What the server says to a merge that overflows and to a push that is not finite; the center after both.

    The middle of the vector is 0 then.
    """
    from daskcnn.errors import PushRefused
    from daskcnn.ps import Join, Pull, Push

    link = at.link(at.stream("bad", "float32"), wire="float32", stopped=lambda: False)
    largest, said = np.finfo(np.float32).max, []
    link.call(Join(1, "bad", 1))
    for seq, value in ((1, largest), (2, largest), (2, np.nan), (2, -largest)):
        payload = np.zeros(size, np.float32)
        payload[size // 2] = value
        try:
            link.call(Push(1, "bad", 1, seq, 0, payload, 1, 0.5))
        except PushRefused as error:
            said.append(str(error))
    center = link.call(Pull(1, "bad", 1)).weights
    link.call(Push(1, "bad", 1, 3, 0, np.ones(size, np.float32), 1, 0.5))
    return said, center


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_no_worker_reads_a_torn_vector_and_a_bad_push_changes_nothing(three_workers: Client, parts: int) -> None:
    """Three processes push and read as fast as they can; with three ranges, two of those lie on workers that push."""
    size, rounds = 300_000, 40
    with by_value(), hosted(three_workers, parts, size) as server:
        addresses = sorted(server.hosts | set(three_workers.nthreads()))[:3]
        futures = [
            three_workers.submit(push_and_read, server.at, name, value, rounds, size, workers=[address], pure=False)
            for name, value, address in zip("abc", (1.0, -3.0, 0.25), addresses, strict=True)
        ]
        assert three_workers.gather(futures) == [0, 0, 0]
        said, center = three_workers.submit(push_bad, server.at, size, pure=False).result()
        snapshot = server.ask("snapshot").result(timeout=60)
    assert [words.partition(":")[2].partition(":")[0] for words in said] == [" merge of finite pushes", " payload"]
    expected = np.full(size, rounds * -1.75, np.float32)
    expected[size // 2] = 0.0
    np.testing.assert_array_equal(center, expected)
    np.testing.assert_array_equal(snapshot.center, center + 1)
    assert (snapshot.version, snapshot.refused) == (3 * rounds + 3, {"finite": 2})


class NotedReplicas:
    """They train nothing: what they are ordered to is noted."""

    def __init__(self) -> None:
        self.orders: list[RoundOrder] = []

    def join(self, order: RoundOrder) -> Any:
        """Do nothing."""

    def start(self, order: RoundOrder, watch: Watching) -> Any:
        self.orders.append(order)

    def stuck(self, replica: str) -> tuple[str, ...]:
        return ()


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_server_gives_the_optimizer_s_state_to_a_worker_that_is_alone_and_takes_it_back(
    three_workers: Client, synthetic: str, runs: str, parts: int
) -> None:
    cluster = {"ps_shards": parts, "workers": {"cpu": 3}}
    job, dataset = resolve(bsp(synthetic, runs, train={"optimizer": "adamw"}, cluster=cluster)), open_dataset(synthetic)
    (layout, weights), none = initial_weights(job, dataset), cast(Any, None)
    members = wait_for_members(three_workers, job.cluster.workers, 60.0)
    context = RunContext.of(three_workers, "alone", job, dataset, members, emit=lambda event: None, save=none)
    replicas, steps = NotedReplicas(), center_descent_of(job, layout)
    assert steps is not None
    exchange = ServerExchange(context, BSP(), replicas, none)
    exchange.start(orders.StartServer(1, moved=False), TrainingState(0, 0.0, weights, {}, {}))
    alone = orders.StartRound(1, 1, Round("cpu-0", 0, ((0, 64),), 64, (0.0, 0.1), alone=True), None, None, 1.0)
    exchange.rounds([alone])
    begun = replicas.orders[-1].optimizer
    assert begun is not None
    assert not begun.vectors.any()
    moved = OptimizerState(np.random.default_rng(0).random(begun.vectors.shape, np.float32), 5)
    report = report_of(alone.round)._replace(optimizer=moved)
    assert exchange.own_optimizer(facts.RoundDone("cpu-0", 1, 1, report, 0.0)) is None
    exchange.rounds([alone, replace(alone, round=replace(alone.round, alone=False))])
    assert [order.optimizer for order in replicas.orders[1:]] == [None, None]
    found = steps.state_of(exchange.snapshot().state or {}, np.float32)
    exchange.close()
    assert found.count == 5
    np.testing.assert_array_equal(found.vectors, moved.vectors)


# --- a recorded run, done again without a cluster ---


class Recorded(ServerActor):
    """A server that writes down what it begins with and every request, in order, with payloads."""

    def __init__(self, rule: Any, snapshot: Any, *, life: int, **options: Any) -> None:
        super().__init__(rule, snapshot, life=life, **options)
        self._noting = threading.Lock()
        self._out = open(os.environ[RECORD], "wb")  # noqa: SIM115 - open for as long as the server lives
        self._note((snapshot, life))

    def _note(self, what: Any) -> None:
        pickle.dump(what, self._out)
        self._out.flush()

    def serve(self, request: Request, tell: Any = None) -> None:
        with self._noting:
            self._note(request)
            super().serve(request, tell)


def write_down_at(path: str) -> None:
    """On a worker: where a server that it hosts writes."""
    os.environ[RECORD] = path


def replay(path: Path, strategy: str) -> ParameterServer:
    with path.open("rb") as file:
        snapshot, life = pickle.load(file)  # noqa: S301
        server = ParameterServer.restore(RULES[strategy](), snapshot, life=life)
        while True:
            try:
                server.handle(pickle.load(file))  # noqa: S301
            except EOFError:
                return server


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sgwu", "agwu", "easgd"])
def test_recorded_run_replayed_through_the_bare_server_gives_the_same_weights(
    three_workers: Client,
    synthetic: str,
    runs: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
) -> None:
    path = tmp_path / "requests"
    monkeypatch.setattr(hosting, "ServerActor", Recorded)
    watch = Watch()
    with by_value():
        three_workers.run(write_down_at, str(path))
        result = run(three_workers, small_job(synthetic, runs, train={"strategy": strategy}), watch)
    server = replay(path, strategy)
    server.validate()
    np.testing.assert_array_equal(server.snapshot().center, result.model.vector)
    assert server.snapshot().merged == sum(event["pushes"] for event in watch.of("round"))
