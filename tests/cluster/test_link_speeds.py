"""What a link's transfers say of it: without any process."""

from __future__ import annotations

import pytest

from daskcnn.cluster.link_speeds import LARGEST, _way


@pytest.mark.parametrize("bandwidth", [1e5, 5e6, 1.25e8, 1e10])
def test_a_link_is_measured_by_parcels_that_take_their_time_and_no_longer(bandwidth: float) -> None:
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
