"""Places in the center that no merge changes (frozen layers), and those that follow the mean (running statistics)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskcnn.ps import RULES, Join, ParameterServer, Push
from daskcnn.ps.admm import ADMM
from daskcnn.ps.rule import UpdateRule, View
from daskcnn.ps.server import CenterRange
from daskcnn.ps.split import spans
from daskcnn.ps.vectors import within
from daskcnn.ps.versions import Bases
from tests.ps.driving import Cluster, Replica, every_variant, parabola

PLACES = (slice(2, 5), slice(9, 10))


@pytest.mark.parametrize("strategy", RULES)
def test_every_rule_leaves_them_as_they_are(strategy: str) -> None:
    """Even of pushes that say something else."""
    rng = np.random.default_rng(0)
    center = rng.standard_normal(12)
    center[2] = -0.0
    server = ParameterServer(RULES[strategy](), center, kept=PLACES)
    workers = ("a", "b", "c")
    for worker in workers:
        server.handle(Join(0, worker, 0))
    for worker in workers:
        server.handle(Push(0, worker, 0, 1, 0, rng.standard_normal(12), 10, 0.5))
    after = server.snapshot().center
    assert server.snapshot().merged
    for place in PLACES:
        assert after[place].tobytes() == center[place].tobytes()
    assert (np.delete(after, [2, 3, 4, 9]) != np.delete(center, [2, 3, 4, 9])).all()
    again = ParameterServer.restore(RULES[strategy](), server.snapshot(), kept=PLACES)
    assert again.snapshot().center[2:5].tobytes() == center[2:5].tobytes()


def test_each_range_of_a_split_server_has_its_part() -> None:
    marked = np.zeros(12)
    for lo, hi in spans(12, 5):
        for place in within(PLACES, lo, hi):
            marked[lo:hi][place] += 1
    np.testing.assert_array_equal(np.flatnonzero(marked), [2, 3, 4, 9])
    assert marked.max() == 1
    assert within(PLACES, 5, 9) == ()


def test_a_range_keeps_its_places() -> None:
    part = CenterRange(RULES["sgwu"](), np.arange(4.0), kept=[slice(1, 3)])
    merge = part.merge([Push(0, "a", 0, 1, 0, np.full(4, 7.0), 1, 1.0)], View(0, 1, Bases()))
    assert merge is not None
    np.testing.assert_array_equal(part.kept()[0], [7, 1, 2, 7])


@pytest.mark.parametrize("strategy", [name for name, rule in RULES.items() if rule().overshoots and rule.barrier])
@pytest.mark.parametrize("parts", [1, 3])
def test_what_layers_keep_besides_parameters_is_the_mean_whatever_the_momentum(strategy: str, parts: int) -> None:
    """Or a variance that falls would fall below 0. Of a split server each range has its part."""
    rule, (center, *gains) = RULES[strategy](), np.random.default_rng(0).standard_normal((4, 12))
    mean, places = center.copy(), (slice(7, 9),)
    held = [
        CenterRange(rule, center[lo:hi].copy(), kept=within(PLACES, lo, hi), besides=within(places, lo, hi))
        for lo, hi in spans(12, parts)
    ]
    for version, gain in enumerate(gains):
        for part, (lo, hi) in zip(held, spans(12, parts), strict=True):
            pushes = [Push(0, w, 0, 1, 0, times * gain[lo:hi], 10, 0.5) for w, times in (("a", 1.0), ("b", 3.0))]
            assert part.merge(pushes, View(version, 2, Bases())) is not None
        mean += 2 * gain
    after = np.concatenate([part.kept()[0] for part in held])
    np.testing.assert_allclose(after[7:9], mean[7:9], rtol=1e-12)
    assert not np.isclose(after[:2], mean[:2]).any()
    np.testing.assert_array_equal(after[2:5], center[2:5])


@every_variant
@pytest.mark.parametrize(("workers", "steps"), [(2, 2), (5, 12)])
def test_running_statistics_do_not_go_beyond_what_all_replicas_move_towards(
    rule: UpdateRule, workers: int, steps: int
) -> None:
    """Each step moves a replica's own by a tenth, as batch normalising does. A variance below 0 is none."""
    if isinstance(rule, ADMM):
        rule = rule.model_copy(update={"rho": 0.0})  # its term is one of gradients, and statistics have none
    begun, ended, places = 1.0, 0.1, (slice(2),)
    server = ParameterServer(rule, np.full(2, begun), besides=places)
    how: dict[str, Any] = {"rounds": 25, "steps": steps, "lr": 1.0, "late": 2, "besides": places}
    turns = [0, 0, 0, 1, 2, 3, 4]  # the first is the fastest
    cluster = Cluster(server, [Replica(rule, f"w{i}", parabola(0.1, [ended] * 2), **how) for i in range(workers)])
    cluster.run(turns)
    values = [value for center in cluster.centers for value in center]
    assert min(values) >= ended - 1e-6
    assert max(values) <= begun + 1e-6
    assert values[-1] - ended < 0.1 * (begun - ended)
