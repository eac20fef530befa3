from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from rich.console import Console

from daskcnn.events import Warned, parse
from daskcnn.show.board import Board
from daskcnn.show.renderers.terminal import PlainProgress, TerminalProgress, choose
from tests.show.run_events import asynchronous, calibration, data_parallel, epoch, layer_sharded, round_of, start, steps

AT = datetime(2026, 11, 20, 20, 15, 3)
EVIL = "killed [/bold][red]\x1b[31m\r\nby \x07OOM\x9b2J"
WARNING = {"event": "warning", "message": EVIL}
CHECKPOINT = {"event": "checkpoint", "path": "runs/x/checkpoints/step-000000375", "step": 375}
RESUME = {"event": "resume", "path": "runs/x/checkpoints/step-000000375", "step": 375}
END = {"event": "end", "status": "done"}
RUNS = {"sgwu": data_parallel, "agwu": asynchronous, "layer": layer_sharded}


class Screen:
    """A terminal of a size, with a clock of its own."""

    def __init__(self, width: int = 120, height: int = 30) -> None:
        self.now = 0.0
        self.file = io.StringIO()
        self.console = Console(
            record=True, force_terminal=True, width=width, height=height, file=self.file, highlight=False
        )
        self.progress = TerminalProgress(self.console, now=lambda: self.now)

    def show(self, *events: Any, every: float = 10.0) -> str:
        for event in events:
            self.now += every
            self.progress.handle(parse(event))
        return self.frame()

    def frame(self) -> str:
        self.console.export_text()
        self.console.print(self.progress.render())
        return self.console.export_text()


def row(text: str, name: str) -> list[str]:
    """The cells of a worker's line."""
    return next(line for line in text.splitlines() if line.startswith(f"│ {name} ")).strip("│ ").split()


@pytest.mark.parametrize("width", [80, 100, 112, 120, 200])
@pytest.mark.parametrize("kind", RUNS)
def test_the_display_fits_and_loses_nothing(width: int, kind: str) -> None:
    text = Screen(width).show(*RUNS[kind]())
    lines = text.splitlines()
    assert {len(line) for line in lines} == {min(width, 120)}
    assert len(lines) <= 11
    assert "…" not in text.replace("…0.0.0.9:40123", "")
    assert f"2026-11-20T20-15-03-sgwu · {kind} · training" in lines[0]


def test_a_data_parallel_run_shows_its_figures_and_a_line_a_worker() -> None:
    text = Screen().show(*data_parallel())
    assert "epoch 3.4/10" in text
    assert "34 %" in text
    for figure in ("loss 1.234", "accuracy 55.1 %", "validation 57.3 % (best 57.3 %)", "2,345 images/s", "lr 0.013"):
        assert figure in text
    assert row(text, "w0")[1:5] == ["cpu", "24,000", "1.234", "1,187"]
    assert row(text, "w0")[-6:] == ["97", "%", "2", "%", "1", "%"]
    assert row(text, "w1")[-6:] == ["50", "%", "45", "%", "5", "%"]
    assert row(text, "w2") == ["w2", "cpu", "8,000", "-", "-", "-", "-", "-"]
    assert "stale" not in text
    assert "state" not in text


def test_shares_are_of_all_rounds_so_far() -> None:
    events = [
        round_of("w0", busy=1.0, wait=0.0, communication=0.0),
        round_of("w0", busy=1.0, wait=2.0, communication=0.0),
    ]
    assert row(Screen(80).show(start(), *events), "w0")[-6:] == ["50", "%", "50", "%", "0", "%"]


@pytest.mark.parametrize("width", [80, 120])
def test_an_asynchronous_run_shows_staleness_and_who_is_lost(width: int) -> None:
    text = Screen(width).show(*asynchronous())
    assert row(text, "w1")[-1] == "2"
    assert row(text, "w2")[-2:] == ["-", "lost"]
    address = "…0.0.0.9:40123" if width == 80 else "tcp://10.0.0.9:40123"
    assert row(text, address)[-1] == "ignored"


def test_a_lost_worker_does_not_count_in_the_speed() -> None:
    events = [round_of("w0", samples_per_second=100.0), round_of("w1", samples_per_second=30.0)]
    screen = Screen()
    assert "130 images/s" in screen.show(start(), *events)
    lost = {"event": "worker-lost", "worker": "w1", "reason": "", "samples_moved": 0}
    assert "100 images/s" in screen.show(lost, events[0])


def test_a_layer_sharded_run_shows_steps_and_kernels() -> None:
    text = Screen().show(*layer_sharded())
    for figure in ("loss 1.900", "step 640", "0.213 s/step", "epoch 1.7/10"):
        assert figure in text
    assert "conv1 20  conv2 16  conv3 40" in text
    assert "conv1  6  conv2  8  conv3 12" in text
    assert row(text, "w1")[-1] == "0.250"
    assert "busy" not in text


def test_a_worker_without_kernels_is_shown_as_such() -> None:
    *before, last = layer_sharded()
    first, second = last["workers"]
    idle = {**last, "workers": [first, {**second, "kernels": dict.fromkeys(second["kernels"], 0)}]}
    screen = Screen()
    assert row(screen.show(*before, idle), "w1")[-2:] == ["no", "kernels"]
    assert "no kernels" not in screen.show(last)


def test_a_layer_divided_by_samples_is_shown_in_per_cent() -> None:
    of = {"conv1": 26, "conv2": 24, "conv3": 52}
    divided = {w: {"conv1": "samples", "conv2": "kernels", "conv3": "kernels"} for w in ("w0", "w1")}
    text = Screen().show(
        {"event": "shards", "home": "w0", "kernels": {}, "divided": divided, "of": of}, *layer_sharded()
    )
    assert "conv1 77 %  conv2 16  conv3 40" in text
    assert "conv1 23 %  conv2  8  conv3 12" in text


def test_the_best_validation_accuracy_is_kept_on_show() -> None:
    worse = epoch(validation={"loss": 1.2, "accuracy": 0.5})
    assert "validation 50.0 % (best 57.3 %)" in Screen().show(start(), epoch(), worse, epoch(validation=None))


def test_numbers_that_are_not_there_or_not_finite_are_shown_as_such() -> None:
    text = Screen().show(start(), round_of("w0", loss=float("nan"), samples_per_second=None, accuracy=None))
    assert "loss nan" in text
    assert row(text, "w0")[1:4] == ["-", "nan", "-"]


def test_more_workers_than_lines_are_counted() -> None:
    text = Screen(height=20).show(start(), calibration(*(f"w{i}" for i in range(50))))
    assert len(text.splitlines()) < 20
    assert "… and 39 more workers" in text
    assert row(text, "w10")
    assert "w11" not in text


def test_the_title_tells_how_it_ended() -> None:
    screen = Screen()
    assert "daskcnn · starting" in screen.frame()
    assert "· done" in screen.show(*data_parallel(), {"event": "end", "status": "done"})


def test_unknown_events_change_nothing() -> None:
    screen = Screen()
    before = screen.show(*data_parallel())
    assert screen.show({"event": "from a later version"}, every=0) == before


# --- time left ---


def test_time_left_is_told_by_the_pace_since_training_began() -> None:
    screen = Screen()
    screen.show(start(), every=100.0)
    assert "left" not in screen.frame()
    screen.show(calibration("w0"), every=100.0)
    assert "5:00 · 5:00 left" in screen.show(round_of("w0", epoch=2.5), every=100.0)
    screen.now += 20
    assert "5:20 · 4:40 left" in screen.frame()
    assert "left" not in screen.show(round_of("w0", epoch=10.0))


@pytest.mark.parametrize("first", [RESUME, calibration("w0")])
def test_time_left_after_a_resume_counts_only_what_was_done_since(first: Any) -> None:
    second = calibration("w0") if first is RESUME else RESUME
    board = Board()
    for now, event in [(0.0, start()), (5.0, first), (6.0, second), (10.0, round_of("w0", epoch=8.0))]:
        board.apply(parse(event), now)
    assert board.remaining(10.0) is None
    board.apply(parse(round_of("w0", epoch=9.0)), 40.0)
    assert board.remaining(40.0) == pytest.approx(30.0)


def test_a_run_that_resumes_shows_its_epoch_at_once() -> None:
    shown = Screen().show(start(), {**RESUME, "epoch": 7.5}, calibration("w0"))
    assert "epoch 7.5/10" in shown
    assert "75 %" in shown


def test_time_left_goes_on_where_a_worker_joins() -> None:
    screen = Screen()
    screen.show(start(), calibration("w0"), round_of("w0", epoch=2.0), every=50.0)
    joined = {"event": "worker-joined", "worker": "w1", "samples": 10}
    assert "3:20 left" in screen.show(calibration("w1"), joined, every=0.0)
    assert "3:30 left" in screen.show(round_of("w0", epoch=2.5), every=20.0)


def test_an_event_that_is_no_advance_leaves_the_time_left_alone() -> None:
    board = Board()
    for now, event in [(0.0, start()), (0.0, calibration("w0")), (10.0, round_of("w0", epoch=5.0)), (15.0, CHECKPOINT)]:
        board.apply(parse(event), now)
    assert board.remaining(15.0) == pytest.approx(5.0)


def test_a_worker_that_is_behind_does_not_turn_the_run_back() -> None:
    assert "epoch 3.4/10" in Screen().show(*data_parallel(), round_of("w1", epoch=2.9))


# --- what a worker says does not drive the terminal ---


def test_names_and_messages_are_shown_as_text() -> None:
    screen = Screen()
    events = [start(run=f"run {EVIL}"), round_of("[red]w0\x1b[2J"), WARNING]
    events.append({"event": "worker-lost", "worker": "[red]w0\x1b[2J", "reason": EVIL, "samples_moved": 0})
    frame = screen.show(*events)
    written = screen.file.getvalue()
    assert "\x1b[31m" not in written.replace("\x1b[31m─", "")
    assert "\x1b[2J" not in written
    assert "\x07" not in written
    assert "\x9b" not in written
    assert "[/bold][red]\\x1b[31m\\r by \\x07OOM\\x9b2J" in frame
    assert "[red]w0\\x1b[2J" in frame


def test_plain_lines_hold_no_control_characters() -> None:
    stream = io.StringIO()
    with PlainProgress(stream) as progress:
        for event in [start(run=EVIL), calibration(EVIL), WARNING, {"event": "end", "status": EVIL}]:
            progress.handle(parse(event))
    lines = stream.getvalue().split("\n")
    assert len(lines) == 5
    assert all(line[:4].isdigit() for line in lines[:4]), "each begins with its time"
    assert all(line.isprintable() for line in lines)


# --- plain lines ---


def plain(*events: Any) -> list[str]:
    stream = io.StringIO()
    with PlainProgress(stream, now=lambda: AT) as progress:
        for event in events:
            progress.handle(parse(event))
    lines = stream.getvalue().splitlines()
    assert all(line.startswith("2026-11-20 20:15:03  ") for line in lines)
    return [line[21:] for line in lines]


def test_a_plain_run_is_a_line_an_epoch_and_what_is_out_of_the_ordinary() -> None:
    assert plain(*asynchronous(), WARNING, CHECKPOINT, RESUME, END) == [
        "run 2026-11-20T20-15-03-sgwu: agwu, 10 epochs of 48,000 samples, 2,000 for validation, 89,578 parameters",
        "worker w0: cpu, 1 thread, 8.0 GB, 1,234 images/s, node (tcp://10.0.0.0:4000)",
        "worker w1: cpu, 1 thread, 8.0 GB, 1,234 images/s, node (tcp://10.0.0.1:4000)",
        "worker w2: cpu, 1 thread, 8.0 GB, 1,234 images/s, node (tcp://10.0.0.2:4000)",
        "epoch 3.4/10  merges 1,275  loss 1.234  accuracy 55.1 %  validation 57.3 % (loss 1.100)  "
        "2,345 images/s  lr 0.013  20.0 s",
        "warning: worker w2 lost: killed; 8,000 samples moved to the others",
        "warning: worker tcp://10.0.0.9:40123 joined late and is ignored: the job asks for 2 cpu workers; name 3",
        "warning: killed [/bold][red]\\x1b[31m\\r by \\x07OOM\\x9b2J",
        "checkpoint of step 375: runs/x/checkpoints/step-000000375",
        "resumed from step 375: runs/x/checkpoints/step-000000375",
        "end: done",
    ]


def test_a_known_noise_scale_is_shown() -> None:
    known = epoch(noise_scale=1200.4, noise_error=35.2)
    (line,) = plain(known)
    assert "  noise scale 1,200 ± 35  " in line
    assert "noise scale 1,200 " in Screen().show(*data_parallel()[:-1], known)


def test_a_noise_scale_that_cannot_be_told_is_said_to_be_unknown() -> None:
    (line,) = plain(epoch(noise_within_error=True))
    assert "  noise scale unknown (the gradient is within its error)  " in line


def test_steps_that_grow_are_shown() -> None:
    grown = {"event": "step-samples", "samples": 128, "before": 64, "rate": 2.0, "fixed": 0.0123}
    assert plain({**grown, "noise_scale": 1200.4, "noise_error": 35.2}) == [
        "128 samples a step from here on, 64 before: noise scale 1,200 ± 35, 12 ms of a step at any size; "
        "learning rate x 2 of the schedule's"
    ]
    assert "64 before: 12 ms of a step" in plain(grown)[0]
    assert "  128 samples a step  " in plain(epoch(step_samples=128))[0]
    assert "samples a step 128" in Screen().show(*data_parallel()[:-1], epoch(step_samples=128))


@pytest.mark.parametrize(("most", "words"), [(0, "what the workers' memory has room for"), (512, "512 samples")])
def test_a_run_says_that_its_steps_may_grow(most: int, words: str) -> None:
    begun = start(optimizer="sgd", lr=0.01, largest_batch=most)
    assert plain(begun)[1].endswith(f", which may grow with the gradient noise scale to {words}")


def test_an_epoch_without_validation_leaves_it_out() -> None:
    (line,) = plain(epoch(validation=None, epoch=4.0))
    assert "validation" not in line
    assert line.startswith("epoch 4/10  ")


def test_a_plain_layer_sharded_run_shows_its_steps() -> None:
    assert plain(steps()) == ["epoch 1.7  step 640  loss 1.900  0.213 s/step"]


def test_a_stream_of_few_characters_gets_question_marks() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    PlainProgress(stream, now=lambda: AT).handle(Warned(message="γ is 0"))
    assert stream.buffer.getvalue() == b"2026-11-20 20:15:03  warning: ? is 0\n"


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_stream_that_fails_ends_no_run() -> None:
    with PlainProgress(FullDisk()) as plain_progress:
        plain_progress.handle(parse(WARNING))
    terminal = TerminalProgress(Console(file=FullDisk(), force_terminal=True))
    terminal.handle(parse(WARNING))
    terminal.handle(parse(round_of("w0")))


# --- live ---


def test_the_live_display_ends_with_its_last_state_and_gives_the_cursor_back() -> None:
    screen = Screen()
    with screen.progress as progress:
        for event in [*data_parallel(), WARNING, CHECKPOINT, END]:
            progress.handle(parse(event))
    written = screen.file.getvalue()
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    final = screen.console.export_text()
    assert "warning: killed" in final
    assert "· done" in final[final.index("warning: killed") :]


def test_the_live_display_is_closed_when_the_run_raises() -> None:
    screen = Screen()
    with pytest.raises(KeyboardInterrupt), screen.progress:
        raise KeyboardInterrupt
    assert "\x1b[?25h" in screen.file.getvalue()


# --- calibrating ---


def test_what_is_measured_is_shown_until_training_begins() -> None:
    screen = Screen(80)
    calibrating = {"event": "calibrating", "worker": "desk-1", "doing": "a convolution", "done": 3, "of": 7}
    text = screen.show(start(), calibrating)
    assert "· calibrating" in text
    assert row(text, "desk-1") == ["desk-1", "a", "convolution", "3/7"]
    assert "loss" not in text
    text = screen.show(calibration("desk-1"))
    assert "a convolution" not in text
    assert "· training" in text


def test_a_worker_that_comes_later_is_measured_beside_those_that_train() -> None:
    later = {"event": "calibrating", "worker": "desk-2", "doing": "a step of training"}
    text = Screen(120).show(*data_parallel(), later)
    assert "· training" in text
    assert row(text, "desk-2")[-4:] == ["a", "step", "of", "training"]
    left_out = {"event": "worker-left-out", "worker": "desk-2", "reason": "no GPU", "remedy": ""}
    assert "desk-2" not in Screen(120).show(*data_parallel(), later, left_out).partition("╭")[2]


def test_a_worker_that_was_left_out_stays_so_when_it_is_measured_again() -> None:
    """A run that chooses anew measures all workers that are there."""
    left_out = {"event": "worker-left-out", "worker": "w2", "reason": "it costs more than it brings", "remedy": ""}
    again = [{"event": "calibrating", "worker": "w2", "doing": "a step"}, calibration("w2")]
    screen = Screen(120)
    assert "│ w2 " not in screen.show(start(), calibration("w0", "w1", "w2"), left_out, *again, round_of("w0"))
    given = {"event": "allocation", "sizes": {"w0": 100, "w2": 50}}
    assert row(screen.show(given), "w2")[:3] == ["w2", "cpu", "50"], "until it gets samples"


@pytest.mark.parametrize("width", [79, 100, 120])
def test_long_names_that_end_alike_are_told_apart(width: int) -> None:
    names = [f"desk-{i}.physik.schule.de" for i in (1, 2)]
    text = Screen(width).show(start(), calibration(*names), *(round_of(name) for name in names))
    assert [row(text, f"desk-{i}…")[0] for i in (1, 2)] == ["desk-1…", "desk-2…"]


def test_plain_lines_say_what_is_measured_and_how_far() -> None:
    events = [
        {"event": "calibrating", "worker": "desk-1", "doing": "a convolution", "done": 3, "of": 7},
        {"event": "calibrating", "worker": "desk-1", "doing": "a step of training"},
    ]
    assert plain(*events) == [
        "worker desk-1: calibrating, a convolution (3 of 7 done)",
        "worker desk-1: calibrating, a step of training",
    ]


# --- which one ---


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.TextIOWrapper]:
    monkeypatch.setenv("TERM", "xterm-256color")
    master, slave = os.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        yield stream
    os.close(master)


def test_a_terminal_gets_the_live_display(terminal: io.TextIOWrapper) -> None:
    assert isinstance(choose(terminal, False), TerminalProgress)


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    terminal: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    monkeypatch.setenv("TERM", term)
    assert isinstance(choose(terminal, False), PlainProgress)


def test_a_terminal_without_utf8_gets_lines(terminal: io.TextIOWrapper) -> None:
    terminal.reconfigure(encoding="latin-1")
    assert isinstance(choose(terminal, False), PlainProgress)


def test_a_file_gets_lines(tmp_path: Any) -> None:
    with open(tmp_path / "log", "w", encoding="utf-8") as stream:
        assert isinstance(choose(stream, False), PlainProgress)


def test_quiet_shows_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    with choose(sys.stdout, False, quiet=True) as progress:
        for event in [*asynchronous(), WARNING, END]:
            progress.handle(parse(event))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split("  ")[1][:16] for line in captured.err.splitlines()] == ["warning: worker "] * 2 + [
        "warning: killed "
    ]


def test_with_json_stdout_stays_empty(terminal: io.TextIOWrapper, capsys: pytest.CaptureFixture[str]) -> None:
    with choose(sys.stdout, True) as progress:
        progress.handle(parse(WARNING))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "  warning: killed" in captured.err
    assert isinstance(choose(terminal, True), PlainProgress), "stderr is no terminal, whatever the stream is"
