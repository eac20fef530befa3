"""What a step submits is its plan: labels, workers and what every task hangs on. Without any process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from dask.task_spec import Alias

from daskcnn.cluster.layers.step_graph import LayerGraph, MinibatchStep
from daskcnn.cluster.run.context import RunContext
from daskcnn.job.tables import Job
from daskcnn.nn import SGD, Layout, StepPace, build_model, init_network, sequential_from_spec
from daskcnn.nn.sequential import Sequential
from daskcnn.sharded.balance import ShareSearch, added_traffic, stage_weight_traffic, traffic, weight_traffic
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.plan_parts import Carried, WorkerTraffic
from daskcnn.sharded.step_plan import StepPlan
from tests.cluster.sharded_networks import BLOCKS, INCEPTION, MERGED, step_bytes

IMAGE, BATCH = (32, 32, 3), 64
REACHING: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 24, "size": 5, "pad": 2},
    {"layer": "lrn", "size": 3},
    {"layer": "maxpool", "size": 4},
    {"layer": "conv", "kernels": 40, "size": 3, "pad": 1},
    {"layer": "lrn", "size": 3},
    {"layer": "relu"},
    {"layer": "dense", "units": 16},
    {"layer": "relu"},
    {"layer": "dense", "units": 10},
]
"""Neighbours need each other's channels, and a head with weights stays at home."""
MODELS = {
    "50:500": build_model("50:500", None, IMAGE, 10, True),
    "lenet5": build_model("lenet5", None, IMAGE, 10, True),
    "reaching": sequential_from_spec(REACHING),
    "merged": sequential_from_spec(MERGED),
    "blocks": sequential_from_spec(BLOCKS),
    "inception": sequential_from_spec(INCEPTION),
}


class Noting:
    """Stands for a run's surroundings: tasks are noted, none is run."""

    def __init__(self, workers: int, parts: int) -> None:
        self.workers = SimpleNamespace(alive={f"w{i}": None for i in range(workers)})
        self.dispatch = self
        self.job = Job.model_validate({"train": {"batch_size": BATCH, "sub_batches": parts}})
        self.name, self.samples, self._serial = "run", 40_000, count()
        self.submitted: list[tuple[str, str, tuple[Any, ...]]] = []
        self.refs: list[Alias] = []

    def bundle(self) -> Noting:
        return self

    def send(self, piece: Any, worker: str) -> Alias:
        return Alias(("sent", next(self._serial)))

    def add(self, label: str, function: Any, context: Any, *args: Any, worker: str) -> Alias:
        self.submitted.append((label, worker, args))
        self.refs.append(Alias((label, next(self._serial))))
        return self.refs[-1]

    def submit(self, *args: Any, worker: str = "") -> Any:
        if worker:
            return self.add(*args, worker=worker)
        return {ref.key: ref for ref in args[0]}

    def forget(self) -> None:
        self.submitted.clear()
        self.refs.clear()


def layout_of(model: Sequential) -> Layout:
    params, state = init_network(model, 0, IMAGE, "float32")
    return Layout.of(params, state)


@pytest.fixture(params=[*MODELS])
def model(request: pytest.FixtureRequest) -> Sequential:
    found: Sequential = MODELS[request.param]
    return found


def graph_of(model: Sequential, workers: int, parts: int, first: Any, monkeypatch: Any) -> tuple[LayerGraph, Noting]:
    """Pieces are placed."""
    stages, noting = stages_of(model), Noting(workers, parts)
    compute = {w: {s.name: 1.0 + i / 10 for s in stages if s.name} for i, w in enumerate(noting.workers.alive)}
    search = ShareSearch(stages, IMAGE, "w0", compute, samples=BATCH, parts=parts)
    try:
        search = search.divided_by(first)
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.setattr("daskcnn.cluster.layers.step_graph.fastest", lambda _: "w0")
    monkeypatch.setattr("daskcnn.cluster.layers.step_graph.balance_of", lambda *_: search)
    layout = layout_of(model)
    graph = LayerGraph(cast(RunContext, noting), stages, layout)
    weights = np.zeros(layout.size, layout.dtype)
    graph.place(weights, SGD().init(weights[: layout.parameter_size]), 0)
    noting.forget()
    return graph, noting


def hung_on(args: tuple[Any, ...]) -> Iterator[Any]:
    """Keys of the results that a task is given, by themselves or in a list."""
    for value in args:
        if isinstance(value, Alias):
            yield value.key
        elif isinstance(value, list):
            yield from hung_on(tuple(value))


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("first", ["kernels", "samples"])
def test_a_step_submits_the_tasks_of_its_plan_and_no_others(
    model: Sequential, workers: int, parts: int, first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step behind the pieces, one behind that, and the last minibatch of a pass, which is smaller."""
    graph, noting = graph_of(model, workers, parts, first, monkeypatch)
    for number, samples in enumerate((BATCH, BATCH, 2)):
        plan, held = graph.plan_of(samples), dict(graph.held)
        graph.submit(MinibatchStep(number, 0, number, StepPace(0.1), samples))
        assert len(noting.submitted) == len(plan.tasks) == plan.task_count
        for task, (label, worker, args) in zip(plan.tasks, noting.submitted, strict=True):
            assert (label, worker) == (task.label, task.worker)
            sources = [each.source for each in task.inputs]
            expected = [held[s].key if isinstance(s, Carried) else noting.refs[s].key for s in sources]
            assert sorted(map(str, hung_on(args))) == sorted(map(str, expected))
        assert {what: ref.key for what, ref in graph.held.items()} == {
            what: noting.refs[plan.carried[what]].key if what in plan.carried else ref.key for what, ref in held.items()
        }
        noting.forget()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("first", ["kernels", "samples"])
def test_every_task_comes_behind_what_it_hangs_on_and_every_result_is_of_use(
    model: Sequential, workers: int, first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, _ = graph_of(model, workers, 3, first, monkeypatch)
    plan = replace(graph.plan, parts=3, samples=BATCH)
    used = {each.source for task in plan.tasks for each in task.inputs}
    for number, task in enumerate(plan.tasks):
        assert all(source < number for each in task.inputs if isinstance(source := each.source, int))
        assert number in used or number in plan.carried.values() or task.label == "score"
    assert {source for source in used if isinstance(source, Carried)} <= graph.held.keys()


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_tasks_bytes_add_up_to_what_travels(
    model: Sequential, workers: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers a sample of the flows, and numbers a step of what neighbours need, whatever the parts."""
    graph, _ = graph_of(model, workers, parts, "kernels", monkeypatch)
    plan = replace(graph.plan_of(BATCH), itemsize=2, weight_itemsize=8)
    weights = weight_traffic(plan)
    for worker, (up, down) in traffic(plan).items():
        more = weights.get(worker, WorkerTraffic(0, 0))
        assert step_bytes(plan)[worker] == (2 * BATCH * up + 8 * more.up, 2 * BATCH * down + 8 * more.down)


@pytest.mark.parametrize("parts", [1, 3])
def test_shards_by_samples_send_whole_samples(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes in all as its flows have on average, and gradients of all weights where any are left over."""
    graph, _ = graph_of(MODELS["50:500"], 3, parts, "samples", monkeypatch)
    plan = replace(graph.plan, parts=parts, samples=BATCH, placed=True)
    moved, flows = step_bytes(plan), traffic(plan)
    edges = added_traffic(stage_weight_traffic(plan, i) for i in range(1, len(plan.stages)))
    for way in ("up", "down"):
        expected = sum(4 * BATCH * getattr(own, way) for own in flows.values())
        expected += sum(4 * getattr(own, way) for own in edges.values())
        assert sum(getattr(own, way) for own in moved.values()) == expected
    owed = step_bytes(replace(plan, placed=False))
    vectors = stage_weight_traffic(plan, 0)
    assert all(owed[w].up - moved[w].up == 4 * vectors[w].up > 0 for w in plan.kernels[0])


def first_layer_s_work(plan: StepPlan, worker: str) -> float:
    return sum(task.work for task in plan.tasks if task.worker == worker and task.stage == 0)


@pytest.mark.parametrize("parts", [1, 3])
def test_the_tasks_work_adds_up_to_the_plan_s(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = graph_of(MODELS["50:500"], 3, parts, "kernels", monkeypatch)
    plan = graph.plan_of(BATCH)
    assert all(first_layer_s_work(plan, w) == pytest.approx(plan.work(0, w)) for w in plan.kernels[0])
