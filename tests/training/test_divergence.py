"""A run that diverges goes back once with a lower rate; one that is no better than guessing is told."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskcnn.errors import Diverged
from daskcnn.events import Warned
from daskcnn.job.resolve import resolve
from daskcnn.nn.score import Score
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.evaluations import LOWER, Evaluation, Evaluations, Guessing, guessing_on
from daskcnn.training.coordinator.orders import Order
from tests.training import layer_shell
from tests.training.coordinator_shell import Shell, report_of
from tests.training.test_coordinator_machine import settings_of

RULES = [("sgwu", {}), ("agwu", {}), ("bsp", {}), ("bsp", {"exchange": "asa"})]
ERROR = Diverged("loss = nan", "training diverged at learning rate 0.1, first in the output of conv1", "lower train.lr")


def of_kind(found: list[Order], kind: type) -> list[Any]:
    return [order for order in found if isinstance(order, kind)]


def training(which: tuple[str, dict[str, Any]], **more: Any) -> Shell:
    shell = Shell(settings_of(which, "udpa", lowers=True), **more)
    shell.start("cpu-0", "cpu-1")
    return training_again(shell)


def training_again(shell: Shell) -> Shell:
    """Up to the rounds of a life that begins."""
    if not shell.settings.peers:
        shell.answer_to(orders.StartServer)
    while any(isinstance(order, orders.Join) for order, _ in shell.pending):
        shell.answer_to(orders.Join)
    return shell


def diverges(shell: Shell) -> list[Order]:
    return shell.tell(facts.RoundFailed("cpu-0", shell.coordinator.life, ERROR, shell.now))


@pytest.mark.parametrize("which", RULES, ids=str)
def test_the_first_divergence_goes_back_with_a_third_of_the_rate(which: tuple[str, dict[str, Any]]) -> None:
    shell = training(which)
    before = shell.of(orders.StartRound)
    found = diverges(shell)
    (warned,) = [order.event for order in of_kind(found, orders.Log) if isinstance(order.event, Warned)]
    assert (
        warned.message
        == "loss = nan: training diverged; back to the state of epoch 0.00, with a third of the learning rate"
    )
    assert of_kind(found, orders.CancelAll)
    training_again(shell)
    after = shell.of(orders.StartRound)[len(before) :]
    assert [order.scale for order in after] == pytest.approx([LOWER * order.scale for order in before])
    assert {order.round.progress for order in after} == {order.round.progress for order in before}
    assert shell.finish().status == "done"
    assert shell.of(orders.Save)[-1].book["rate_scale"] == pytest.approx(LOWER)


@pytest.mark.parametrize("which", RULES, ids=str)
def test_the_second_divergence_ends_the_run(which: tuple[str, dict[str, Any]]) -> None:
    shell = training(which)
    diverges(shell)
    training_again(shell)
    diverges(shell)
    assert shell.end.status == "diverged"
    assert "first in the output of conv1; a third of the rate was tried, and diverged too" in str(shell.end.error)


def test_a_report_of_the_other_worker_comes_too_late() -> None:
    """Both diverge in one life: the run goes back once for it."""
    shell = training(("sgwu", {}))
    diverges(shell)
    assert shell.tell(facts.RoundFailed("cpu-1", 1, ERROR, shell.now)) == []
    training_again(shell)
    assert shell.finish().status == "done"


def test_a_run_that_went_back_before_it_was_resumed_does_not_go_back_again() -> None:
    shell = training(("sgwu", {}))
    diverges(shell)
    training_again(shell)
    while not shell.of(orders.Save):
        shell.answer(0)
    shell.answer_to(orders.Save)
    resumed = training(("sgwu", {}), kept=shell.coordinator.kept)
    assert resumed.of(orders.StartRound)[0].scale == pytest.approx(LOWER)
    diverges(resumed)
    assert resumed.end.status == "diverged"


def test_kernels_are_placed_anew_and_steps_go_a_third_as_far() -> None:
    """From the last checkpoint: a snapshot behind it may be spoilt."""
    shell = layer_shell.Shell(layer_shell.settings_of(lowers=True, chain=3, checkpoint_every=0.6))
    shell.start(a=1.0, b=1.0)
    shell.links()
    for _ in range(3):
        shell.steps(3)
        shell.pieces()
    assert (shell.saved, shell.kept) == (6, 9)
    found = shell.step(float("nan"))
    (warned,) = [order.event for order in of_kind(found, orders.Log) if isinstance(order.event, Warned)]
    assert warned.message == (
        "loss = nan at step 9: training diverged; back to the state of step 6, with a third of the learning rate"
    )
    (segment,) = of_kind(found, orders.RunSegment)
    assert (segment.begin, segment.scale) == (6, LOWER)
    (end,) = of_kind(shell.step(float("inf")), orders.End)
    assert end.status == "diverged"


def evaluation(right: int, trained: int) -> Evaluation:
    """200 samples each."""
    return Evaluation(Score(200.0, trained, 200), Score(200.0, right, 200), 200, 1.0)


HALF = Guessing(0.5, math.log(2))


def told(found: Evaluation, *, guess: Guessing | None = HALF, epoch: float = 3.0) -> str | None:
    evaluations = Evaluations({}, None, 10, 0.0, 0.0)
    return evaluations.guesses(found, guess, epoch=epoch, steps=21.0)


def test_a_run_that_guesses_is_told_why_it_may() -> None:
    text = told(evaluation(104, 100))
    assert text is not None
    for part in ("after 3 epochs", "52.0 %", "50.0 %", "21 so far", "train.lr", "train.batch_size", "labels"):
        assert part in text


@pytest.mark.parametrize(
    ("found", "known"),
    [
        (evaluation(120, 100), {}),  # 2.8 standard errors above guessing
        (evaluation(100, 120), {}),  # it learns, and overfits
        (evaluation(100, 100), {"guess": None}),
        (evaluation(100, 100), {"epoch": 2.0}),
        (Evaluation(Score(200.0, None, 200), Score(200.0, None, 200), 200, 1.0), {}),
    ],
)
def test_a_run_that_learns_or_that_has_just_begun_is_not_told(found: Evaluation, known: dict[str, Any]) -> None:
    assert told(found, **known) is None


@pytest.mark.parametrize(
    ("found", "steps", "reasons"),
    [
        (evaluation(100, 100), 21.0, ["few steps (21 so far", "too high a learning rate (training loss 1"]),
        (evaluation(100, 100), 900.0, ["too high a learning rate"]),
        (Evaluation(Score(140.0, 100, 200), Score(140.0, 100, 200), 200, 1.0), 900.0, ["three times train.lr"]),
        (evaluation(100, 190), 900.0, ["95.0 % right", "few training images (180;", "data.augment", "model.from"]),
    ],
)
def test_a_run_is_told_the_reasons_that_apply(found: Evaluation, steps: float, reasons: list[str]) -> None:
    evaluations = Evaluations({}, None, 10, 0.0, 0.0)
    text = evaluations.guesses(found, replace(HALF, samples=180), epoch=3.0, steps=steps)
    assert text is not None
    every = ["few steps", "too high a learning rate", "three times train.lr", "few training images"]
    assert [reason for reason in every if reason in text] == [
        reason for reason in every if any(reason in part for part in reasons)
    ]
    assert "labels that belong to other images" in text


HEAD: dict[str, Any] = {"layer": "auxiliary", "weight": 0.3, "path": [{"layer": "dense", "units": 2}]}


def test_a_network_with_heads_in_its_middle_that_guesses_is_not_said_to_have_too_high_a_rate() -> None:
    """Their losses are in the training loss, and not in that of the center."""
    model = {"layers": [HEAD, {"layer": "dense", "units": 8}, HEAD, {"layer": "dense", "units": 2}]}
    job = resolve({"data": {"path": "x", "validation": 20}, "model": model})
    guess = guessing_on(job, labelled([0, 1] * 10))
    assert guess is not None
    center = Score(200 * math.log(2), 100, 200)
    for times, high in ((1.6, False), (2.4, True)):
        trained = Score(times * 200 * math.log(2), 100, 200)
        text = guess.warning(center, trained, 3.0, 900.0)
        assert ("too high a learning rate" in text) == high
        assert ("three times train.lr" in text) != high
    far = replace(center, loss_sum=3 * center.loss_sum)
    assert not guess.ruined(far, replace(center, loss_sum=2.4 * center.loss_sum))
    assert guess.ruined(far, replace(center, loss_sum=3.6 * center.loss_sum))


def test_a_run_is_told_once() -> None:
    """And once more if it knows its training images since; a resumed run remembers."""
    evaluations, by_heart = Evaluations({}, None, 10, 0.0, 0.0), evaluation(100, 190)
    assert evaluations.guesses(by_heart, HALF, epoch=3.0, steps=21.0) is None, "running statistics may not be settled"
    assert evaluations.guesses(evaluation(100, 100), HALF, epoch=3.0, steps=21.0)
    assert evaluations.guesses(evaluation(100, 100), HALF, epoch=4.0, steps=21.0) is None
    assert evaluations.guesses(by_heart, HALF, epoch=5.0, steps=80.0)
    resumed = Evaluations(evaluations.book(), None, 10, 5.0, 0.0)
    for each in (evaluations, resumed):
        assert each.guesses(by_heart, HALF, epoch=6.0, steps=80.0) is None


def test_guessing_is_rarely_taken_for_learning_and_learning_not_for_guessing() -> None:
    """Of 1,000 runs of either kind, on 200 samples of two classes; those that learn are right 7 times of 10."""
    rng = np.random.default_rng(0)
    guess, learn = ([told(evaluation(*rng.binomial(200, p, 2))) for _ in range(1000)] for p in (0.5, 0.7))
    assert sum(text is not None for text in guess) > 930
    assert not any(learn)


# --- weights that are worth less than the initial ones ---

RUINED = Score(15.0 * 20, 1, 20)
"""Of ten classes, without a loss that is not finite."""


def judged(shell: Shell, center: Score, trained: float) -> list[Order]:
    """The rounds under way end; the center scores that."""
    found: list[Order] = []
    for order, _ in [each for each in shell.pending if isinstance(each[0], orders.StartRound)]:
        assert isinstance(order, orders.StartRound)
        part = None if order.score is None else center
        report = report_of(order.round, center=part)
        report = report._replace(score=Score(trained * order.round.samples, 0, order.round.samples))
        found += shell.tell(facts.RoundDone(order.round.worker, order.life, order.session, report, shell.now))
    return found


@pytest.mark.parametrize(
    ("center", "trained", "back"),
    [
        (RUINED, 1e18, True),
        (Score(math.inf, 1, 20), 2.3, True),
        (RUINED, 2.3, False),  # few samples, and a network that is sure of itself
        (Score(15.0 * 20, 9, 20), 1e18, False),  # it is far better than guessing
        (Score(2.4 * 20, 1, 20), 2.4, False),  # it has not learnt yet
    ],
)
def test_a_run_never_goes_on_from_ruined_weights(center: Score, trained: float, back: bool) -> None:
    """They are not kept, and the run goes back at once: a step later the loss may be NaN."""
    shell = Shell(settings_of(("sgwu", {}), "udpa", lowers=True, guess=Guessing(0.1, math.log(10))))
    shell.start("cpu-0", "cpu-1")
    found = judged(training_again(shell), center, trained)
    assert bool(of_kind(found, orders.CancelAll)) == back
    assert bool(of_kind(found, orders.Save)) != back
    assert bool(of_kind(found, orders.StartRound)) != back, "a shell starts rounds behind all other orders"
    assert shell.coordinator.kept.epoch == 0.0


def test_peers_go_back_to_what_was_saved_and_not_to_what_was_rescued() -> None:
    shell = Shell(settings_of(("bsp", {"exchange": "asa"}), "udpa", lowers=True))
    shell.start("cpu-0", "cpu-1", "cpu-2")
    training_again(shell)
    shell.tell(facts.WorkerGone(("cpu-2",), "gone", shell.now))
    shell.version = 7
    found = shell.answer_to(orders.Rescue)
    assert not of_kind(found, orders.Restore)
    assert "begun again from version 7" in shell.of(Warned)[-1].message
    training_again(shell)
    found = diverges(shell)
    assert shell.coordinator.kept.step == 0
    assert of_kind(found, orders.Restore)


def test_a_ruined_report_that_was_held_takes_the_run_back_too() -> None:
    """It came while another replica was joining, and that one is lost."""
    shell = Shell(settings_of(("agwu", {}), "udpa", lowers=True, guess=Guessing(0.1, math.log(10))))
    shell.start("cpu-0", "cpu-1")
    training_again(shell)
    shell.tell(facts.WorkerReady("cpu-2", "cpu", shell.now))
    shell.answer_to(orders.Calibrate)
    shell.ruins = True
    while not shell.of(orders.Restore) and not shell.coordinator.ended:
        shell.answer(0)
    assert shell.of(orders.Restore)
    assert shell.finish().status == "done"


@pytest.mark.parametrize(("labels", "known"), [([0] * 20, False), ([0, 1] * 4, False), ([0, 1] * 10, True)])
def test_few_validation_samples_or_one_class_tell_nothing(labels: list[int], known: bool) -> None:
    job = resolve({"data": {"path": "x", "validation": len(labels)}, "model": {"name": "quick"}})
    assert (guessing_on(job, labelled(labels)) is not None) == known


def labelled(validation: list[int]) -> Any:
    """A data set of two classes, as far as guessing goes by it."""
    train = Labelled([0, 1, *validation])
    return SimpleNamespace(labels="classes", classes=("a", "b"), shape=(32, 32, 3), train=train)


class Labelled(list[int]):
    """A training part as far as its labels go."""

    def labels(self) -> Any:
        return np.array(self)


def test_a_ruined_snapshot_is_not_saved() -> None:
    shell = layer_shell.Shell(layer_shell.settings_of(lowers=True, guess=Guessing(0.5, 0.2)))
    shell.start(a=1.0, b=1.0)
    shell.links()
    shell.steps(10)
    shell.pieces()
    shell.judged(correct=1)
    found = [order for _ in range(2) if orders.AskCounters in shell.open for order in shell.counted()]
    assert not of_kind(found, orders.Save)
    (segment,) = of_kind(found, orders.RunSegment)
    assert (segment.begin, segment.scale) == (0, LOWER)
