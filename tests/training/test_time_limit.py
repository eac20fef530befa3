"""A run with a time limit is kept before it is over, and leaves time for what it has measured that keeping takes."""

from __future__ import annotations

import pytest

from daskcnn.errors import Interrupted
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.departures import FAR
from daskcnn.training.coordinator.time_limit import ENDING, SAFE, SAVING, TimeLimit
from tests.training.coordinator_shell import Shell
from tests.training.layer_shell import Shell as LayerShell
from tests.training.layer_shell import settings_of as layer_settings
from tests.training.test_coordinator import training
from tests.training.test_coordinator_machine import SAMPLES, settings_of

LIMIT = 7200.0
SAVE = orders.Save(0.0, {}, (), None)


def begun() -> Shell:
    """A run of two workers by agwu, which trains, and is to be kept within two hours."""
    shell = training("agwu", stall_timeout=10 * LIMIT)
    shell.tell(facts.TimeLimited(LIMIT, LIMIT, 0.0))
    return shell


def test_a_run_is_kept_before_its_time_is_over_and_ends_as_after_a_request_to_end() -> None:
    """Rounds under way end behind a step, and nothing of them is trained again."""
    shell = begun()
    assert not shell.tell(facts.Tick(LIMIT - ENDING - SAFE * SAVING - FAR - 1))
    found = shell.tell(facts.Tick(LIMIT - ENDING - SAFE * SAVING - FAR))
    assert [type(order) for order in found] == [orders.IgnoreSignals, orders.EndRound, orders.EndRound]
    shell.answer_to(orders.StartRound)
    shell.answer_to(orders.StartRound)
    (save,) = shell.of(orders.Save)
    assert save.epoch == shell.reported / SAMPLES > 0
    (*_, end) = shell.tell(facts.Saved(1, LIMIT - 12))
    assert isinstance(end, orders.End)
    assert isinstance(end.error, Interrupted)
    assert (end.status, end.error.exit_code) == ("interrupted", 143)
    assert str(end.error) == "interrupted by its time limit (run.time_limit = 7200 s)"


def test_a_signal_while_a_run_is_kept_for_its_limit_changes_nothing() -> None:
    shell = begun()
    shell.tell(facts.Tick(LIMIT - 1 - FAR))
    assert not shell.tell(facts.Interrupted(2, LIMIT - 0.5 - FAR))
    shell.tell(facts.Tick(LIMIT - 1))
    shell.tell(facts.Saved(1, LIMIT))
    assert isinstance(shell.end.error, Interrupted)
    assert shell.end.error.exit_code == 143


def test_a_run_that_its_limit_meets_before_training_ends_at_once() -> None:
    shell = Shell(settings_of(("bsp", {}), "udpa"))
    shell.tell(facts.TimeLimited(LIMIT, 30.0, 0.0))
    shell.tell(facts.WorkerReady("cpu-0", "cpu", 1.0))
    shell.tell(facts.Tick(6.0))
    assert isinstance(shell.end.error, Interrupted)


def test_a_layer_sharded_run_of_long_steps_leaves_time_for_those_that_are_submitted() -> None:
    shell, limit = LayerShell(layer_settings(epochs=9)), 600.0
    shell.tell(facts.TimeLimited(limit, limit, 0.0))
    shell.start(a=0.01, b=0.01)
    shell.go_on(wait=30)
    assert limit / 2 <= shell.now <= limit
    assert shell.saved == shell.coordinator.done == 14 + 4, "four were under way, and are kept"


def test_a_layer_sharded_run_stops_its_segment_and_keeps_it() -> None:
    shell = LayerShell()
    shell.tell(facts.TimeLimited(LIMIT, LIMIT, 0.0))
    shell.start(a=0.01, b=0.01)
    shell.links()
    shell.step()
    shell.now = LIMIT - 20
    shell.then(facts.Tick)
    shell.stopped()
    last = shell.end
    while not shell.coordinator.ended:
        shell.step() if shell.trained < shell.end else shell.pieces()
    end = shell.orders[-1]
    assert isinstance(end, orders.End)
    assert isinstance(end.error, Interrupted)
    assert end.error.exit_code == 143
    assert shell.saved == last > 1, "what was under way is trained to its end, and kept"


def test_the_time_that_is_left_grows_with_the_longest_save() -> None:
    limit = TimeLimit(LIMIT, LIMIT)
    for ordered, saved in ((100.0, 130.0), (500.0, 510.0)):
        limit.note(facts.Tick(ordered), [SAVE])
        limit.note(facts.Saved(1, saved), [])
    assert not limit.near(LIMIT - ENDING - SAFE * 30 - 1)
    assert limit.near(LIMIT - ENDING - SAFE * 30)


@pytest.mark.parametrize("lost", [facts.ServerGone(1, 101.0), facts.NotKept(101.0), facts.Rescued(3, 101.0)])
def test_a_save_whose_center_is_lost_is_no_measure_of_the_next_one(lost: facts.Fact) -> None:
    limit = TimeLimit(LIMIT, LIMIT)
    limit.note(facts.Tick(100.0), [SAVE])
    limit.note(lost, [])
    limit.note(facts.Tick(1000.0), [SAVE])
    limit.note(facts.Saved(1, 1001.0), [])
    assert not limit.near(LIMIT - ENDING - SAFE * SAVING - 1)


def test_at_most_half_of_a_short_limit_is_left_for_the_end() -> None:
    limit = TimeLimit(12.0, 12.0)
    assert not limit.near(5.9)
    assert limit.near(6.0)
