"""Runs whose server averages the center: the average is judged and kept, and nothing is trained otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.errors import DataError
from daskcnn.events import EpochEnded
from daskcnn.job.tables import Job
from daskcnn.ps import RULES, ParameterServer, Push
from daskcnn.ps.average import AVERAGE, TRAINED
from daskcnn.runs.state import to_checkpoint, to_state, weights_of
from daskcnn.store import Dataset
from daskcnn.store.image_facts import Facts
from daskcnn.training.coordinator.evaluations import guessing_on
from daskcnn.training.replica import Replica
from tests.cluster.run_here import RunHere
from tests.cluster.test_runs_here import EPOCHS, SAMPLES, SEVERAL_MEETINGS, WHOLE, grouped, job_of
from tests.replays import assert_played
from tests.toy_data import toy_dataset

EMA, JUDGED = 0.9, 30
COURSES: dict[str, tuple[Job, int]] = {
    name: (
        job_of(name, rule=SEVERAL_MEETINGS.get(name, {}), model=WHOLE, cluster={"overlap": False}),
        3 if rule.barrier else 1,
    )
    for name, rule in RULES.items()
    if not rule.chooses_workers  # it makes steps of bsp
} | {"groups": (grouped(job_of("sgwu", model=WHOLE)), 4)}
"""The asynchronous rules have one worker, and no steps during exchanges, so that a run makes the same merges again."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return toy_dataset(tmp_path_factory.mktemp("toy"), train=SAMPLES + JUDGED, size=8)


def averaged(job: Job) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update={"ema": EMA})})


def losses(run: RunHere) -> list[float | None]:
    """Of the validation samples, epoch by epoch."""
    return [event.validation.loss for event in run.of(EpochEnded) if event.validation]


@pytest.mark.parametrize("course", COURSES)
def test_the_average_is_judged_and_kept_and_the_center_trained_as_ever(dataset: Dataset, course: str) -> None:
    job, workers = COURSES[course]
    plain, run = RunHere(job, dataset, workers), RunHere(averaged(job), dataset, workers)
    center, average = plain.train(), run.train()
    last = run.saved[-1]
    np.testing.assert_allclose(last.rule_state[TRAINED], center, rtol=1e-12, atol=1e-14)
    assert np.abs(average - center).max() > 1e-6
    np.testing.assert_array_equal(average, average_of_requests(job, dataset, run))
    replica = Replica(job, dataset, Device(), clock=lambda: 0.0)
    assert len(losses(run)) == EPOCHS
    for state, logged in zip(run.saved, losses(run), strict=True):
        found = replica.evaluate(dataset.train, SAMPLES, SAMPLES + JUDGED, weights=state.weights)
        assert logged == pytest.approx(found.loss, rel=1e-5)  # it has travelled in float32
        assert state.validation is not None
        assert state.validation.loss == pytest.approx(found.loss, rel=1e-5)
    assert losses(run) != pytest.approx(losses(plain), rel=1e-3)


def average_of_requests(job: Job, dataset: Dataset, run: RunHere) -> Any:
    """The average that a bare server makes of what the workers asked."""
    assert job.rule is not None
    begin = Replica(job, dataset, Device(), clock=lambda: 0.0).host_weights()
    server = ParameterServer(job.rule, begin, life=1, ema=EMA)
    for request in run.requests:
        server.handle(
            replace(request, payload=request.payload.astype("float64")) if isinstance(request, Push) else request
        )
    server.validate()
    return (server.snapshot().state or {})[AVERAGE]


@pytest.mark.parametrize("strategy", ["sgwu", "easgd"])
def test_recorded_facts_give_the_same_events(dataset: Dataset, strategy: str) -> None:
    """As the agenda of a simulation."""
    job = averaged(job_of(strategy))
    run = RunHere(job, dataset, 3)
    run.train()
    assert_played(job, SAMPLES, run.heard, run.events, guessing_on(job, dataset))


def test_a_checkpoint_has_the_average_as_weights_and_the_center_beside_it(dataset: Dataset) -> None:
    job = averaged(job_of("sgwu"))
    run = RunHere(job, dataset, 1)
    run.train()
    state, replica = run.saved[-1], Replica(job, dataset, Device(), clock=lambda: 0.0)
    kept = to_checkpoint(state, replica.layout, dataset, 1.0, ("velocity",))
    np.testing.assert_array_equal(weights_of(kept, job, Facts.of(dataset)), state.weights)
    back = to_state(kept, job)
    np.testing.assert_array_equal(back.weights, state.weights)
    np.testing.assert_array_equal(back.rule_state[TRAINED], state.rule_state[TRAINED])
    with pytest.raises(DataError, match=f"it keeps {TRAINED} for the update rule, 'sgwu' keeps nothing"):
        to_state(kept, job_of("sgwu"))
    shorter = {f"rule:{TRAINED}": kept.arrays[f"rule:{TRAINED}"][:-1]}
    with pytest.raises(DataError, match=TRAINED):
        to_state(replace(kept, arrays={**kept.arrays, **shorter}), job)
