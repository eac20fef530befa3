"""The model: a roofline a stage, exact where it can be worked out by hand, and sensible everywhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daskcnn.conv import ALGORITHMS, ConvSpec
from daskcnn.conv.spec import Work
from daskcnn.conv.timings import CPU, GPU, Rates, Seconds, arithmetic_seconds, predict, total_seconds
from tests.conv.fake_algorithm import FakeAlgorithm

PLAIN = Rates(gemm_flops=100.0, bytes_per_second=10.0, half=(1, 2, 3), memory_threads=2, stage=0.0)
SPEC = ConvSpec(N=64, H=16, W=16, C=50, K=500, R=5, S=5, pad=(2, 2))
HALVED = replace(SPEC, R=3, S=3, pad=(1, 1), stride=(2, 2))
ADJACENT = (SPEC, replace(SPEC, R=3, S=3), replace(SPEC, H=32, W=32))
APART = tuple(replace(spec, H=2 * spec.H, W=2 * spec.W, dilation=(2, 2)) for spec in ADJACENT)
OF_ONE_GROUP = (*ADJACENT, *APART, replace(SPEC, R=1, S=1, pad=(0, 0)), HALVED, replace(SPEC, C=4, K=32))
KINDS = (*OF_ONE_GROUP, *(replace(spec, groups=2) for spec in OF_ONE_GROUP), replace(SPEC, K=50, groups=50))
"""Every algorithm supports one of them."""
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


def test_a_step_is_forward_and_one_kind_of_backward() -> None:
    assert Seconds(1.0, 20.0, 300.0).step(need_dx=True) == 21.0
    assert Seconds(1.0, 20.0, 300.0).step(need_dx=False) == 301.0


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work("moves", 0, 50), 5.0),
        (Work("computes", 700, 10), 7.0),
        (Work("both", 700, 90), 9.0),
        (Work("GEMM, every side at its half", 100, 0, (1, 2, 3)), 8.0),
        (Work("GEMM, short by one side", 100, 0, (10**9, 2, 10**9)), 2.0),
    ],
)
def test_a_stage_takes_as_long_as_the_slower_of_arithmetic_and_traffic(work: Work, seconds: float) -> None:
    assert total_seconds([work], PLAIN, threads=1, itemsize=4) == pytest.approx(seconds)


def test_stages_add_up_with_what_each_takes_to_start() -> None:
    works = [Work("a", 100, 0), Work("b", 0, 10)]
    assert total_seconds(works, replace(PLAIN, stage=0.5), threads=1, itemsize=4) == pytest.approx(3.0)


def test_threads_share_arithmetic_and_memory_only_up_to_its_bandwidth() -> None:
    computes, moves = [Work("a", 800, 0)], [Work("b", 0, 80)]
    assert [total_seconds(computes, PLAIN, n, 4) for n in (1, 2, 8)] == [8.0, 4.0, 1.0]
    assert [total_seconds(moves, PLAIN, n, 4) for n in (1, 2, 8)] == [8.0, 4.0, 4.0]


def test_double_precision_computes_at_half_the_rate() -> None:
    work = Work("a", 800, 0, (4, 5, 6))
    assert arithmetic_seconds(work, PLAIN, 8) == 2 * arithmetic_seconds(work, PLAIN, 4)


def test_each_direction_is_predicted_for_itself() -> None:
    class Uneven(FakeAlgorithm):
        def work(self, spec: ConvSpec, direction: str) -> tuple[Work, ...]:
            flops = {"forward": 100, "backward": 200, "backward_filter": 400}[direction]
            return (Work("all", flops, 0),)

    assert predict(Uneven("uneven", 0.0), SPEC, PLAIN, 1) == (1.0, 2.0, 4.0)


@every_algorithm
@pytest.mark.parametrize("rates", [CPU, GPU])
def test_more_samples_take_longer_and_more_threads_less(name: str, rates: Rates) -> None:
    algorithm = ALGORITHMS[name]
    spec = next(spec for spec in KINDS if algorithm.supports(spec))
    one, twice = (predict(algorithm, replace(spec, N=n), rates, 1) for n in (64, 128))
    four = predict(algorithm, spec, rates, 4)
    assert all(0 < a < b for a, b in zip(one, twice, strict=True))
    assert all(a <= b for a, b in zip(four, one, strict=True))


def test_what_was_measured_where_the_rates_were_fitted_is_ranked_alike() -> None:
    """One thread, milliseconds of a step: im2col 749 and 51.6, spectral-8 185 and 39.6."""

    def step(name: str, spec: ConvSpec, need_dx: bool = True) -> float:
        return predict(ALGORITHMS[name], spec, CPU, 1).step(need_dx)

    first = ConvSpec(N=64, H=32, W=32, C=3, K=50, R=5, S=5, pad=(2, 2))
    assert step("spectral-8", SPEC) < step("im2col", SPEC) / 2
    assert step("spectral-8", first) < step("im2col", first)
    assert step("im2col", first, need_dx=False) < step("spectral-8", first, need_dx=False)
