"""Laws of the gradient noise scale: what is known of gradients comes out, within the error that is told with it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.ps import Join, NoiseScale, ParameterServer, Push, PushPart, Reply, Snapshot, Vector
from daskcnn.ps.bsp import BSP
from daskcnn.ps.gradient_noise import NOISE_SIZE, WITHIN_ERROR, GradientNoise, estimates, takes_norms
from tests.ps.split_here import SplitServer

SIZE = 64
PLACES = np.arange(1.0, SIZE + 1)
GRADIENT = 1.0 / PLACES  # of a parabola at rest: |G|² and tr(Σ) are known
DEVIATION = 2.0 + np.sin(PLACES)
SQUARE, TRACE = float(GRADIENT @ GRADIENT), float(DEVIATION @ DEVIATION)
SCALE = TRACE / SQUARE
batches = st.lists(st.integers(1, 500), min_size=2, max_size=6)
dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])


class AtRest:
    """Stands for an optimizer whose steps lead nowhere, so that the gradient stays. What layers keep is behind."""

    parameters, splits = SIZE, True

    def begin(self, center: Vector) -> dict[str, Vector]:
        return {}

    def step(self, center: Vector, kept: object, gradients: Vector, pace: object) -> tuple[Vector, dict[str, Vector]]:
        gradients *= 3.0  # as an optimizer may
        return center.copy(), {}

    def part(self, lo: int, hi: int) -> AtRest:
        part = AtRest()
        part.parameters = min(max(SIZE - lo, 0), hi - lo)
        return part


def gradients(samples: list[int], rng: np.random.Generator) -> list[Vector]:
    return [GRADIENT + DEVIATION * rng.normal(size=SIZE) / math.sqrt(b) for b in samples]


def squares(own: list[Vector], samples: list[int]) -> list[float]:
    merged = sum(b * g for b, g in zip(samples, own, strict=True)) / sum(samples)
    return [float(np.vdot(g, g)) for g in (*own, merged)]


def smoothed(samples: list[int], meetings: int, seed: int = 0, times: float = 1.0) -> GradientNoise:
    found, rng = GradientNoise(), np.random.default_rng(seed)
    for _ in range(meetings):
        found.met(samples, squares([times * g for g in gradients(samples, rng)], samples))
    return found


# --- one meeting ---


@given(samples=batches, square=st.floats(0.1, 10), trace=st.floats(0.1, 1000))
def test_means_of_the_norms_give_gradient_and_noise_whatever_the_batches(
    samples: list[int], square: float, trace: float
) -> None:
    expected = [square + trace / b for b in (*samples, sum(samples))]
    assert estimates(samples, expected) == pytest.approx((square, trace), rel=1e-9)


@given(batch=st.integers(1, 500), norms=st.tuples(st.floats(1, 9), st.floats(1, 9)), part=st.floats(0.1, 1))
def test_of_equal_workers_it_is_mccandlish_s(batch: int, norms: tuple[float, float], part: float) -> None:
    """Appendix A.1 by a small batch b, the mean of both workers' norms, and a large one 2 b."""
    small, large = sum(norms) / 2, part * sum(norms) / 2
    square = (2 * batch * large - batch * small) / (2 * batch - batch)
    trace = (small - large) / (1 / batch - 1 / (2 * batch))
    assert estimates([batch, batch], [*norms, large]) == pytest.approx((square, trace), rel=1e-9)


@given(samples=batches, seed=st.integers(0, 99))
@settings(max_examples=20)
def test_the_order_of_workers_makes_no_difference(samples: list[int], seed: int) -> None:
    own = gradients(samples, np.random.default_rng(seed))
    swapped = estimates(samples[::-1], squares(own[::-1], samples[::-1]))
    assert swapped == pytest.approx(estimates(samples, squares(own, samples)), rel=1e-9)


def test_no_other_weights_of_the_workers_pairs_give_less_variance() -> None:
    samples, rng = [10, 30, 120], np.random.default_rng(1)
    total = sum(samples)
    pairs, found = [], []
    for _ in range(4000):
        *own, merged = squares(gradients(samples, rng), samples)
        each = [
            ((total * merged - b * g) / (total - b), (g - merged) / (1 / b - 1 / total))
            for b, g in zip(samples, own, strict=True)
        ]
        pairs.append(each)
        found.append(estimates(samples, [*own, merged]))
    least = np.var(found, axis=0)
    for weights in ([1 / 3, 1 / 3, 1 / 3], [1, 0, 0], [0, 0, 1], [b / total for b in samples]):
        others = np.var(np.einsum("twe,w->te", np.array(pairs), weights), axis=0)
        assert (least <= 1.01 * others).all(), weights


# --- many meetings ---


@pytest.mark.parametrize("samples", [[32, 32], [8, 56], [56, 8], [10, 20, 34]])
def test_on_a_parabola_it_finds_the_known_scale_within_its_error(samples: list[int]) -> None:
    found = [smoothed(samples, 400, seed).scale for seed in range(20)]
    assert all(each is not None for each in found)
    off = [(each.scale - SCALE) / each.error for each in found if each]
    assert max(each.error for each in found if each) < 0.3 * SCALE
    assert sum(abs(each) < 2 for each in off) >= 17
    assert max(map(abs, off)) < 4
    assert abs(np.mean(off)) < 0.8


def test_its_error_is_the_spread_of_what_it_finds() -> None:
    found = [each for seed in range(60) if (each := smoothed([8, 56], 200, seed).scale)]
    spread, told = np.std([each.scale for each in found]), np.mean([each.error for each in found])
    assert told == pytest.approx(spread, rel=0.3)


def test_the_error_shrinks_with_the_number_of_meetings_until_they_fill_the_average() -> None:
    errors = [found.error for n in (25, 50, 100) if (found := smoothed([200, 600], n).scale)]
    assert all(0.5 < later / sooner < 0.95 for sooner, later in pairwise(errors))


@given(power=st.integers(-20, 20))
@settings(max_examples=10)
def test_the_size_of_gradients_makes_no_difference(power: int) -> None:
    plain, scaled = smoothed([20, 60], 30).scale, smoothed([20, 60], 30, times=10.0**power).scale
    assert plain is not None
    assert scaled == pytest.approx(plain, rel=1e-6)


def test_a_scale_that_noise_hides_is_not_known() -> None:
    found, rng = GradientNoise(), np.random.default_rng(0)
    for _ in range(50):
        own = [rng.normal(size=SIZE) for _ in range(2)]
        found.met([1, 1], squares(own, [1, 1]))
    assert found.scale == WITHIN_ERROR
    assert GradientNoise().scale is None


def test_gradients_without_noise_have_a_scale_of_nothing() -> None:
    found = GradientNoise()
    for _ in range(3):
        found.met([5, 9], squares([GRADIENT, GRADIENT], [5, 9]))
    assert found.scale == pytest.approx((0.0, 0.0), abs=1e-12)


@pytest.mark.parametrize("shrunk", [1.0, 1e-3])
def test_it_follows_a_scale_that_grows_while_gradients_shrink(shrunk: float) -> None:
    found, rng = GradientNoise(), np.random.default_rng(0)
    for times, size in ((1.0, 1.0), (0.25, shrunk)):
        for _ in range(500):
            own = [size * (g + (times - 1) * GRADIENT) for g in gradients([500, 900], rng)]
            found.met([500, 900], squares(own, [500, 900]))
    assert found.scale is not None
    assert abs(found.scale.scale - 16 * SCALE) < 3 * found.scale.error


@pytest.mark.parametrize("norm", [math.inf, math.nan, 1e200])
def test_norms_that_overflow_are_passed_over(norm: float) -> None:
    found = smoothed([20, 60], 10)
    before = found.kept()
    found.met([20, 60], [norm, 1.0, 1.0])
    assert found.kept() == before


def test_damaged_estimates_of_a_snapshot_begin_anew() -> None:
    kept = smoothed([20, 60], 10).kept()
    assert len(kept) == NOISE_SIZE
    assert GradientNoise.of(kept).kept() == kept
    assert not GradientNoise.of((*kept[:-1], math.nan)).count
    assert not GradientNoise.of(kept[:-1]).count
    assert not GradientNoise.of(()).count


# --- in the server ---


def drive(
    server: ParameterServer | SplitServer,
    samples: list[int],
    meetings: range,
    dtype: type = np.float64,
    ahead: tuple[int, ...] = (),
) -> list[NoiseScale | None]:
    """Let workers with these batches meet. Returns the noise that each meeting's answers tell.

    ahead: the numbers from which on parts of each push go ahead of it.
    """
    found, first = [], meetings.start
    for i in range(len(samples)):
        server.handle(Join(0, f"w{i}", first + 1))
    for meeting in meetings:
        own = gradients(samples, np.random.default_rng(meeting))
        payloads: list[Vector] = [
            np.concatenate([g, [1e6, -1e6]]).astype(dtype) for g in own
        ]  # what layers keep is no gradient
        seq, ticket = meeting - first + 1, meeting + 1 if ahead else 0
        pushes = [
            Push(0, f"w{i}", first + 1, seq, meeting, payload, b, 1.0, pace=(0.1, 0.0), ticket=ticket)
            for i, (b, payload) in enumerate(zip(samples, payloads, strict=True))
        ]
        for lo, hi in pairwise([*ahead, SIZE + 2]):
            assert isinstance(server, ParameterServer)
            parts = [PushPart(replace(push, payload=push.payload[lo:hi]), lo, hi) for push in pushes]
            assert [len(server.handle_part(part)) for part in parts][-1] == len(samples)
        answers = [each for push in pushes for each in server.handle(push)]
        assert len(answers) == len(samples)
        assert all(isinstance(each, Reply) for each in answers)
        noises = {each.noise for each in answers if isinstance(each, Reply)}
        found.append(noises.pop())
        assert not noises
    return found


def server_at_rest(dtype: type = np.float64) -> ParameterServer:
    return ParameterServer(BSP(), np.zeros(SIZE + 2, dtype), steps=AtRest())


@dtypes
def test_a_server_tells_the_noise_of_what_it_merges(dtype: type) -> None:
    last = drive(server_at_rest(dtype), [100, 300], range(60), dtype)[-1]
    assert last is not None
    assert abs(last.scale - SCALE) < 3 * last.error
    assert last.error < 0.3 * SCALE


def test_norms_are_taken_of_all_first_meetings_and_of_a_quarter_of_the_others() -> None:
    server = server_at_rest()
    drive(server, [100, 300], range(200))
    assert server.snapshot().noise[0] == 100 + 100 / 4
    assert sum(map(takes_norms, range(10_000))) < 2_600


def test_float32_tells_what_float64_tells() -> None:
    single, double = (drive(server_at_rest(dtype), [100, 300], range(60), dtype) for dtype in (np.float32, np.float64))
    assert single[-1] == pytest.approx(double[-1], rel=1e-4)


def test_a_split_server_tells_what_a_whole_one_does() -> None:
    snapshot = Snapshot(np.zeros(SIZE + 2))
    split = SplitServer(BSP(), snapshot, parts=3, steps=AtRest())  # type: ignore[arg-type]
    whole = drive(server_at_rest(), [100, 300], range(60))
    assert drive(split, [100, 300], range(60)) == [each and pytest.approx(each, rel=1e-9) for each in whole]
    kept = split.snapshot()
    assert SplitServer(BSP(), kept, parts=2, steps=AtRest()).snapshot().noise == kept.noise != ()  # type: ignore[arg-type]


def test_gradients_that_come_in_parts_tell_what_whole_ones_do() -> None:
    parted = drive(server_at_rest(), [100, 300], range(20), ahead=(SIZE // 2,))
    assert parted == [each and pytest.approx(each, rel=1e-9) for each in drive(server_at_rest(), [100, 300], range(20))]


def test_a_server_goes_on_from_the_noise_of_its_snapshot() -> None:
    whole = drive(server_at_rest(), [100, 300], range(80))
    first = server_at_rest()
    found = drive(first, [100, 300], range(41))
    second = ParameterServer.restore(BSP(), first.snapshot(), life=0, steps=AtRest())
    assert [*found, *drive(second, [100, 300], range(41, 80))] == whole


def test_a_worker_alone_and_means_of_weights_tell_nothing() -> None:
    assert set(drive(server_at_rest(), [100], range(20))) == {None}
    averaging = ParameterServer(BSP(combine="average"), np.zeros(SIZE + 2))
    assert set(drive(averaging, [100, 300], range(20))) == {None}
    assert averaging.snapshot().noise == ()
