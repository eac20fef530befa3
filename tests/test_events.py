"""Events are written and read by the same models: what one run logs, the next version reads."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from daskcnn.errors import DataError
from daskcnn.events import (
    EVENTS,
    CalibratedWorker,
    Calibrating,
    CheckpointWritten,
    ClockSet,
    EpochEnded,
    EpochWorker,
    Event,
    FormedGroup,
    GroupMember,
    GroupsFormed,
    Judged,
    KernelsSharded,
    LinkSpeed,
    LinkSpeeds,
    PricedStep,
    RoundEnded,
    RunContinued,
    RunEnded,
    RunPaused,
    RunResumed,
    RunStarted,
    SamplesAllocated,
    ServerCounted,
    StepResized,
    StepsEnded,
    StepWorker,
    StrategyChosen,
    UnknownEvent,
    Warned,
    WorkerGain,
    WorkerIgnored,
    WorkerJoined,
    WorkerLeft,
    WorkerLeftOut,
    WorkerLost,
    WorkersAsked,
    WorkersCalibrated,
    parse,
    parsed,
)

ROUND: dict[str, Any] = {
    "worker": "w0",
    "round": 2,
    "samples": 100,
    "busy": 1.5,
    "wait": 0.5,
    "communication": 0.25,
    "bytes_up": 10,
    "bytes_down": 20,
    "epoch": 2.0,
    "loss": 0.5,
    "accuracy": 0.75,
}
EXAMPLES: list[Event] = [
    RunStarted(run="runs/x", strategy="sgwu", epochs=2, samples=100, rule={"alpha": 0.5}),
    RunResumed(path="c", step=3),
    ClockSet(seconds=3600.0),
    Calibrating(worker="w0", doing="a convolution", done=1, of=3),
    WorkersCalibrated(workers=[CalibratedWorker(name="w0", device="cpu", conv_seconds={"conv1": 0.1})]),
    LinkSpeeds(home="w0", task=1e-3, workers=[LinkSpeed(name="w1", bandwidth=1e6, latency=1e-3)]),
    GroupsFormed(groups=[FormedGroup(name="group-0", home="w0", members=["w0", "w1"])], left_out=["w2"]),
    KernelsSharded(home="w0", kernels={"w0": {"conv1": 20}}, of={"conv1": 32}, eq2=5),
    StrategyChosen(
        candidates=[PricedStep(strategy="alone", samples={"w0": 64}, compute=0.1, exchange=0.0, seconds=0.1 / 64)],
        parts=[WorkerGain(worker="w1", used=False, with_it=0.2, without=0.1, brings=0.0, costs=0.1)],
        before=PricedStep(strategy="alone", samples={"w1": 64}, compute=0.2, exchange=0.0, seconds=0.2 / 64),
    ),
    SamplesAllocated(sizes={"w0": 60, "w1": 40}),
    RoundEnded(**ROUND, members=[GroupMember(name="w0", busy=1.0)]),
    StepsEnded(step=25, epoch=0.5, loss=1.0, seconds_per_step=0.1, workers=[StepWorker(name="w0", kernels={"c": 1})]),
    EpochEnded(
        epoch=1.0,
        step=50,
        validation=Judged(accuracy=0.5, loss=1.0, auc=0.75),
        workers=[EpochWorker(name="w0", samples=10, wait=0.5, busy=1.0)],
    ),
    ServerCounted(server=1, merged=5, repeated=1, refused={"finite": 1}),
    CheckpointWritten(path="c", step=3),
    Warned(value="worker w0", reason="is slow", remedy="restart it"),
    WorkerLost(worker="w0", reason="killed", samples_moved=5),
    WorkerLeft(worker="w5", reason="it is shut down", samples_done=7, samples_moved=5),
    WorkerIgnored(address="tcp://10.0.0.9:1"),
    WorkerJoined(worker="w3", samples=25),
    StepResized(samples=128, before=64, rate=2.0, fixed=0.002, noise_scale=500.0, noise_error=40.0),
    WorkersAsked(workers=2, wanted=4, gain=0.25),
    RunPaused(workers=1, missing={"cpu": 1}, wait=60.0),
    RunContinued(workers=2, seconds=12.5),
    WorkerLeftOut(worker="w4", reason="out of memory", remedy="lower train.batch_size"),
    RunEnded(status="done", seconds=4.0, test=Judged(accuracy=0.5, loss=1.0, auc=0.75)),
]


def test_every_kind_has_an_example_here() -> None:
    assert {type(example) for example in EXAMPLES} == set(EVENTS.values())
    assert {model.kind for model in EVENTS.values()} == EVENTS.keys()


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.kind)
def test_a_log_line_gives_the_event_back(event: Event) -> None:
    line = json.dumps(event.record())
    assert parse(json.loads(line)) == event
    assert json.loads(line)["event"] == event.kind


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.kind)
def test_an_event_travels_and_stays_as_it_is(event: Event) -> None:
    assert pickle.loads(pickle.dumps(event)) == event  # noqa: S301
    with pytest.raises(ValidationError, match="frozen"):
        event.at = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.kind)
def test_fields_of_a_later_version_are_passed_over_and_a_writer_cannot_misspell_one(event: Event) -> None:
    assert parse({**event.record(), "mood": "sunny"}) == event
    with pytest.raises(ValidationError, match="mood"):
        type(event)(**{**event.model_dump(), "mood": "sunny"})


def test_rows_of_a_later_version_may_have_more_fields() -> None:
    found = parse({"event": "calibration", "workers": [{"name": "w0", "mood": "sunny"}]})
    assert found == WorkersCalibrated(workers=[CalibratedWorker(name="w0")])


def test_the_log_says_only_what_the_writer_gave() -> None:
    assert CheckpointWritten(path="c", step=3).record() == {"event": "checkpoint", "path": "c", "step": 3}
    assert "members" not in RoundEnded(**ROUND).record()


def test_a_logged_event_knows_its_time_in_seconds() -> None:
    dated = parse({"event": "checkpoint", "step": 3, "at": "2026-11-20T20:15:03.500+00:00"})
    assert dated.at == pytest.approx(1795205703.5)
    event = CheckpointWritten(step=3)
    assert event.at is None
    assert "at" not in event.record()
    assert event.logged(2.5).record() == {"event": "checkpoint", "step": 3, "at": 2.5}


def test_a_warning_of_parts_and_one_of_an_old_log_read_alike() -> None:
    assert Warned(value="worker w0", reason="is slow", remedy="restart it").text == "worker w0: is slow; restart it"
    old = parse({"event": "warning", "message": "it is\nlate"})
    assert isinstance(old, Warned)
    assert old.text == "it is\nlate"


def test_a_kind_of_a_later_version_is_passed_over() -> None:
    assert parse({"event": "sunshine", "busy": "very"}) == UnknownEvent(name="sunshine")
    assert [event.kind for event in parsed([{"event": "sunshine"}, {"event": "end", "status": "done"}])] == ["end"]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({}, r"line 2: says of no event what it is \(event = None\)"),
        ({"event": 3}, r"line 2: .*\(event = 3\)"),
        ({"event": "round", "worker": "w0"}, r"line 2 \(round\): round = .*field required"),
        ({"event": "round", **ROUND, "busy": -1}, r"busy = -1: .*greater than or equal to 0"),
        ({"event": "round", **ROUND, "busy": None}, r"busy = None"),
        ({"event": "epoch", "epoch": 1.0, "step": 1, "workers": [{"name": "w0"}]}, r"workers\.0\.samples"),
        ({"event": "warning"}, "message"),
        ({"event": "end", "status": "done", "at": "yesterday"}, r"at = 'yesterday'"),
    ],
)
def test_a_damaged_event_is_named_with_its_line_and_a_remedy(record: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=f"{words}.*; remove that line") as found:
        list(parsed([{"event": "end", "status": "done"}, record]))
    assert "\n" not in str(found.value)
