"""What a real cluster ran is the plan: each task of a step, on its worker, behind its inputs; and the bytes counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from distributed import Client, SchedulerPlugin

from daskcnn.sharded.plan_parts import Carried
from daskcnn.sharded.step_plan import StepPlan
from tests.cluster.cluster_jobs import LAYERS, Watch, addresses_of, run
from tests.cluster.references import reference
from tests.cluster.sharded_networks import REACHING, TOGETHER, layer_job, losses_of, step_bytes, step_plan

pytestmark = pytest.mark.cluster

IMAGE, BATCH, STEPS = (32, 32, 3), 32, 3
STEP_TASKS = ("-fwd", "-bwd", "head", "score", "take-edges")
"""Ends of the labels of a step's tasks."""


class Ran(SchedulerPlugin):  # type: ignore[misc]
    """Notes each task that has run: its key, its worker, the keys of its inputs."""

    name = "ran"

    def __init__(self) -> None:
        self.tasks: list[tuple[Any, str, list[Any]]] = []
        self.scheduler: Any = None

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if (start, finish) == ("processing", "memory"):
            inputs = [each.key for each in self.scheduler.tasks[key].dependencies]
            self.tasks.append((key, kwargs["worker"], inputs))


def noted(dask_scheduler: Any = None) -> list[tuple[Any, str, list[Any]]]:
    """On the scheduler."""
    found: list[tuple[Any, str, list[Any]]] = dask_scheduler.plugins["ran"].tasks
    return found


@contextmanager
def noting(client: Client) -> Iterator[None]:
    client.register_plugin(Ran())
    try:
        yield
    finally:
        client.unregister_scheduler_plugin("ran")


CASES = [
    (REACHING, 3, 2, "kernels", "float32"),
    (REACHING, 3, 1, "samples", "float16"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            (LAYERS, 2, 1, "kernels", "float32"),
            (LAYERS, 3, 2, "samples", "float32"),
            (REACHING, 2, 1, "kernels", "float16"),
            (TOGETHER, 3, 1, "kernels", "float32"),
        ]
    ),
]


@pytest.mark.parametrize(("layers", "workers", "parts", "first", "wire"), CASES)
def test_a_step_that_ran_is_the_plan_and_computes_what_one_process_does(
    three_workers: Client,
    synthetic: str,
    runs: str,
    layers: list[dict[str, Any]],
    workers: int,
    parts: int,
    first: str,
    wire: str,
) -> None:
    """An epoch of a few steps is compared: labels, workers, what each task hung on, bytes up and down, losses."""
    job = layer_job(
        synthetic,
        runs,
        data={"limit": STEPS * BATCH + 100},
        model={"layers": layers, "dtype": "float64" if wire == "float32" else "float32"},
        train={"epochs": 1, "batch_size": BATCH, "sub_batches": parts, "first_conv": first},
        cluster={"workers": {"cpu": workers}, "wire": wire},
    )
    watch = Watch()
    with noting(three_workers):
        run(three_workers, job, watch)
        ran = three_workers.run_on_scheduler(noted)
    plan = step_plan(job, IMAGE, watch.of("shards")[0])
    assert_ran(plan, ran, {address: name for name, address in addresses_of(three_workers).items()})
    moved = step_bytes(plan)
    for row in watch.of("epoch")[0]["workers"]:
        assert (row["bytes_up"], row["bytes_down"]) == tuple(STEPS * each for each in moved[row["name"]])
    np.testing.assert_allclose(losses_of(watch), reference(job).losses, rtol=1e-9 if wire == "float32" else 0.02)


def assert_ran(plan: StepPlan, ran: list[tuple[Any, str, list[Any]]], names: dict[str, str]) -> None:
    """Step by step, in the order of submission, which keys are numbered by. Other tasks with such labels come later."""
    run_name = next(key[0] for key, _, _ in ran if key[0].startswith("counters-")).removeprefix("counters-")
    labelled = {key: (key[0].removesuffix(f"-{run_name}"), names[worker]) for key, worker, _ in ran}
    inputs = {key: {*each} for key, _, each in ran}
    own = sorted((key for key, (label, _) in labelled.items() if label.endswith(STEP_TASKS)), key=lambda key: key[1])
    begin, left = 0, dict[Carried, Any]()
    for number in range(STEPS):
        step = replace(plan, placed=number == 0)
        keys = own[begin : begin + step.task_count]
        assert [labelled[key] for key in keys] == [(task.label, task.worker) for task in step.tasks]
        for key, task in zip(keys, step.tasks, strict=True):
            sources = [each.source for each in task.inputs]
            known = {keys[s] if isinstance(s, int) else left[s] for s in sources if isinstance(s, int) or s in left}
            placed = {(s.stage, s.worker) for s in sources if isinstance(s, Carried) and s not in left}
            found = {labelled[each] for each in inputs[key] - known}
            assert known <= inputs[key]
            assert found == {(f"{plan.stages[i].name or 'input'}-weights", worker) for i, worker in placed}
        left |= {what: keys[task] for what, task in step.carried.items()}
        begin += step.task_count
