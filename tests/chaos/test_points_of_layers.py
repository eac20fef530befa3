"""Each fault at each point of a layer-sharded run, on its coordinator's machine: the run ends as it should."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from daskcnn.errors import Lost
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.layer_records import REPLICA
from tests.training.layer_shell import Shell, row_of, settings_of
from tests.training.test_layer_coordinator import OFTEN

SCHEDULER = Lost("scheduler tcp://s: connection lost")


def started(shell: Shell) -> None:
    """In a step."""
    shell.start(a=0.01, b=0.02, c=0.04)
    shell.links()
    shell.step()


def calibrating(shell: Shell) -> None:
    shell.tell(facts.WorkerReady("a", "cpu", 0.0))
    shell.tell(facts.WorkerReady("b", "cpu", 0.0))
    shell.tell(facts.Calibrated("a", 0.01, row_of("a", 0.01), 0.0))


def measuring_links(shell: Shell) -> None:
    shell.start(a=0.01, b=0.02, c=0.04)


def collecting(shell: Shell) -> None:
    started(shell)
    while orders.Collect not in shell.open:
        shell.step()


def judging(shell: Shell) -> None:
    collecting(shell)
    while orders.Judge not in shell.open:
        shell.pieces() if orders.Collect in shell.open else shell.step()


def counting(shell: Shell) -> None:
    judging(shell)
    shell.judged()


def one_leaves(shell: Shell) -> None:
    """A worker was asked to end; the steps under way go on."""
    started(shell)
    shell.leave("c")


def one_comes(shell: Shell) -> None:
    """A worker has come in mid-run, and measures itself."""
    started(shell)
    shell.then(facts.WorkerReady, "y", "cpu")


def hangs(shell: Shell) -> None:
    """No step ends for long, and the scheduler has not heard of a worker meanwhile."""
    for _ in range(1 + ("b" in shell.alive)):  # the first look notes that nothing is heard
        shell.then(facts.Tick, after=10 * shell.settings.stall_timeout)
    if shell.open.pop(orders.AskWaiting, None) is not None:
        shell.tell(facts.Waits(frozenset(), shell.now, {REPLICA: ("b",)}, silent=("b",)))


POINTS: Mapping[str, Callable[[Shell], None]] = {
    "in a calibration": calibrating,
    "while links are measured": measuring_links,
    "in a step": started,
    "while weights are collected": collecting,
    "while weights are judged": judging,
    "while workers are asked for what they spent": counting,
    "in a leave": one_leaves,
    "while a worker joins in mid-run": one_comes,
}
FAULTS: Mapping[str, Callable[[Shell], object]] = {
    "lost": lambda shell: shell.lose("b"),
    "leaves": lambda shell: shell.leave("b"),
    "hangs": hangs,
    "comes": lambda shell: shell.then(facts.WorkerReady, "z", "cpu"),
    "out of step": lambda shell: shell.then(facts.OutOfStep, shell.coordinator.life, "a task was run twice"),
    "cut off": lambda shell: shell.cut_off(),
    "interrupted": lambda shell: shell.interrupt(),
    "the scheduler goes": lambda shell: shell.then(facts.SchedulerGone, SCHEDULER),
}
GONE = ("lost", "leaves", "hangs")
"""Faults behind which the worker measures itself no more."""
ENDS = {"interrupted": "interrupted", "the scheduler goes": "lost"}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("point", POINTS)
def test_a_fault_at_this_point_leaves_a_run_that_ends(point: str, fault: str) -> None:
    """A run that is done has made every step; what one that ends early has kept is a step that it made."""
    shell = Shell()
    POINTS[point](shell)
    FAULTS[fault](shell)
    if point == "in a calibration" and not shell.coordinator.ended and fault not in GONE:
        shell.tell(facts.Calibrated("b", 0.02, row_of("b", 0.02), shell.now))
    if fault == "comes" and not shell.coordinator.ended:
        shell.tell(facts.Calibrated("z", 0.02, row_of("z", 0.02), shell.now))
    shell.go_on()
    end = shell.orders[-1]
    assert isinstance(end, orders.End)
    assert end.status == ENDS.get(fault, "done"), end
    if end.status == "done":
        assert shell.saved == shell.settings.steps


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_while_kernels_move_leaves_a_run_that_ends(fault: str) -> None:
    """A worker has become slower: its kernels go to the others at the segment's end, which is asked for."""
    shell = Shell(settings_of(samples=800, **OFTEN))
    started(shell)
    shell.seconds = {"b": 1.5}
    while orders.StopSegment not in shell.open and not shell.coordinator.ended:
        if orders.AskCounters in shell.open:
            shell.counted()
        elif orders.Collect in shell.open:
            shell.pieces()
        elif orders.Judge in shell.open:
            shell.judged()
        else:
            shell.step()
    assert orders.StopSegment in shell.open, "kernels move in this run"
    FAULTS[fault](shell)
    shell.go_on()
    end = shell.orders[-1]
    assert isinstance(end, orders.End)
    assert end.status == ENDS.get(fault, "done")
