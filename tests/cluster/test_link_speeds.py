"""What is measured of links, and what shares go by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from daskcnn.cluster.layers.measurements import LARGEST, _way, balance_of
from daskcnn.cluster.messages import Calibration
from daskcnn.job.tables import Job
from daskcnn.nn import sequential_from_spec
from daskcnn.sharded.cutting import stages_of

STAGES = stages_of(
    sequential_from_spec(
        [
            {"layer": "conv", "kernels": 40, "size": 3, "pad": 1},
            {"layer": "maxpool", "size": 2},
            {"layer": "dense", "units": 10},
        ]
    )
)


@pytest.mark.parametrize("bandwidth", [1e5, 5e6, 1.25e8, 1e10])
def test_a_link_is_measured_by_results_that_take_their_time_and_no_longer(bandwidth: float) -> None:
    sent: list[int] = []

    def seconds(nbytes: int) -> float:
        sent.append(nbytes)
        return 0.002 + nbytes / bandwidth

    link = _way(seconds)
    assert link.bandwidth == pytest.approx(min(bandwidth, 10 * LARGEST / (0.002 + LARGEST / bandwidth)))
    assert link.latency == pytest.approx(0.002)
    assert max(sent) <= LARGEST
    assert sum(sent) / bandwidth < 2.5


def test_one_transfer_that_was_held_up_does_not_count() -> None:
    held_up = iter([0, 0, 0, 0, 0, 0, 0, 1.0, 0, 0, 0])
    assert _way(lambda nbytes: nbytes / 1e9 + 0.001 + next(held_up)).bandwidth == pytest.approx(1e9)


def calibrated(rest: float | None) -> Calibration:
    """A whole step takes more than its stages and what stays at home add up to, as measured minutes apart."""
    return Calibration(2.0, {"conv1": 1.0}, {}, 1, "cpu", 1 << 30, rest)


@pytest.mark.parametrize("rest", [0.01, 0.0])
def test_what_stays_at_home_is_what_was_measured_there_and_not_what_is_left_of_a_step(rest: float) -> None:
    job = Job.model_validate({"train": {"strategy": "layer", "batch_size": 10}})
    context: Any = SimpleNamespace(
        job=job,
        calibrations={"a": calibrated(rest), "b": calibrated(1.0)},
        workers=SimpleNamespace(alive=dict.fromkeys("ab")),
        links=None,
        samples=100,
        dataset=SimpleNamespace(shape=(8, 8, 3)),
    )
    found = balance_of(context, STAGES, "a")
    assert found.rest == rest
    assert found.step_seconds([{"a": 20, "b": 20}]) == pytest.approx(10 * (rest + 0.5))
