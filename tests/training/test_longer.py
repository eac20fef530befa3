"""A run that has ended is given more epochs: it goes on from what was done, and its schedule is laid anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from daskcnn.events import SamplesAllocated
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.layer_records import LayerSnapshot
from daskcnn.training.coordinator.records import Kept
from tests.training.coordinator_shell import Shell
from tests.training.layer_shell import Shell as LayerShell
from tests.training.layer_shell import settings_of as layer_settings
from tests.training.test_coordinator_machine import EPOCHS, EXCHANGES, SAMPLES, settings_of

WORKERS = "cpu-0", "cpu-1"


def ended(which: tuple[str, dict[str, Any]], partition: str = "idpa", **more: Any) -> Shell:
    """A run of `EPOCHS` epochs that was trained to its end."""
    shell = Shell(settings_of(which, partition, **more))
    shell.start(*WORKERS)
    assert shell.finish().status == "done"
    return shell


def longer(shell: Shell, kept: Kept, epochs: int) -> Shell:
    """The same run, resumed with this number of epochs."""
    again = Shell(replace(shell.settings, epochs=epochs), kept)
    again.start(*WORKERS)
    return again


@pytest.mark.parametrize("which", EXCHANGES, ids=lambda which: "-".join([which[0], *which[1].values()]))
def test_only_the_epochs_that_are_missing_are_trained(which: tuple[str, dict[str, Any]]) -> None:
    first = ended(which)
    again = longer(first, first.coordinator.kept, 2 * EPOCHS)
    assert again.finish().status == "done"
    assert (first.reported, again.reported) == (EPOCHS * SAMPLES, EPOCHS * SAMPLES)
    assert again.of(orders.Save)[-1].epoch == 2 * EPOCHS
    begun = [order.round for order in again.of(orders.StartRound)]
    assert begun[0].progress[0] == pytest.approx(0.5), "done, of the new total"
    assert max(round_.progress[1] for round_ in begun) == 1.0


def test_shares_and_increments_go_on() -> None:
    first = ended(("sgwu", {}))
    sizes = first.of(SamplesAllocated)[-1].sizes
    assert sum(sizes.values()) == SAMPLES, "all increments were given"
    again = longer(first, first.coordinator.kept, 2 * EPOCHS)
    numbers = {order.round.worker: order.round.number for order in first.of(orders.StartRound)}
    again.finish()
    assert [event.sizes for event in again.of(SamplesAllocated)] == [sizes]
    for order in again.of(orders.StartRound)[: len(WORKERS)]:
        assert order.round.number == numbers[order.round.worker] + 1


def test_increments_that_were_left_are_given() -> None:
    first = Shell(settings_of(("sgwu", {}), "idpa"))
    first.start(*WORKERS)
    while not first.of(orders.Save):
        first.answer(0)
    first.answer_to(orders.Save)
    kept = first.coordinator.kept
    assert 0 < kept.epoch < 1, "the first of two increments"
    again = longer(first, kept, 2 * EPOCHS)
    again.finish()
    assert sum(again.of(SamplesAllocated)[-1].sizes.values()) == SAMPLES
    assert again.reported == 2 * EPOCHS * SAMPLES - round(kept.epoch * SAMPLES)


def test_a_run_of_the_same_epochs_has_nothing_left() -> None:
    first = ended(("sgwu", {}))
    again = longer(first, first.coordinator.kept, EPOCHS)
    assert again.finish().status == "done"
    assert again.reported == 0


@pytest.mark.parametrize(("epochs", "trains"), [(EPOCHS, False), (2 * EPOCHS, True)])
def test_a_run_that_stopped_early_is_patient_anew_with_more_epochs(epochs: int, trains: bool) -> None:
    first = ended(("sgwu", {}))
    book = {**(first.coordinator.kept.book or {}), "best": 1.0, "worse": 2}
    impatient = replace(first.coordinator.kept, epoch=2.0, book=book)
    again = Shell(replace(first.settings, epochs=epochs, patience=2), impatient)
    again.start(*WORKERS)
    again.finish()
    assert (again.reported > 0) is trains


def test_a_layer_sharded_run_goes_on() -> None:
    ended_early = LayerSnapshot(20, 2.0, {"best": 0.9, "worse": 2, "epochs": 2})
    shell = LayerShell(layer_settings(epochs=3, patience=2), ended_early)
    shell.start(a=1.0)
    assert (shell.trained, shell.end) == (20, 30)


def test_a_checkpoint_of_an_earlier_version_goes_on_too() -> None:
    """It does not say how many epochs its run had."""
    first = ended(("sgwu", {}))
    kept = first.coordinator.kept
    book = {key: value for key, value in (kept.book or {}).items() if key != "epochs"}
    again = longer(first, replace(kept, book=book), EPOCHS + 1)
    again.finish()
    assert again.reported == SAMPLES
