"""Requests: what the service answers, and what it refuses, in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daskcnn import __version__
from daskcnn.batch.drivers import without_secrets
from daskcnn.show.queue_table import readable_jobs, row_of
from tests.batch.fake_queue import FakeQueue


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[FakeQueue]:
    made = FakeQueue(tmp_path, "desk-1")
    yield made
    made.close()


def ask(queue: FakeQueue, name: str, **values: Any) -> Any:
    return queue.requests.answer(asked(name, **values))["answer"]


def refused(queue: FakeQueue, request: Any) -> str:
    code, *texts = queue.requests.answer(request)["refused"]
    return f"{code} {'; '.join(texts)}"


def sent(**values: Any) -> dict[str, Any]:
    return {"token": "t", "user": "ann", "content": {}, "workers": {"cpu": [1, 1]}, **values}


def test_a_job_is_queued_listed_held_released_and_cancelled(queue: FakeQueue) -> None:
    answer = ask(queue, "submit", jobs=[sent(name="first", priority=2)])
    assert answer == {"ids": [1], "seen": [], "runs": [str(queue.folder / "first")]}
    assert ask(queue, "hold", number=1)["state"] == "held"
    assert ask(queue, "release", number=1)["state"] == "queued"
    (job,) = ask(queue, "jobs")
    assert (job["name"], job["priority"], job["workers"], job["state"]) == ("first", 2, {"cpu": [1, 1]}, "queued")
    assert ask(queue, "cancel", number=1)["state"] == "cancelled"
    assert ask(queue, "job", number=1)["why"] == "cancelled before it ran"


def test_the_last_ended_jobs_are_listed_and_all_where_they_are_wanted(queue: FakeQueue) -> None:
    numbers = [queue.add() for _ in range(25)]
    for number in numbers[:23]:
        queue.spool.cancel(number, 0)
    assert [job["id"] for job in ask(queue, "jobs")] == numbers[3:]
    assert [job["id"] for job in ask(queue, "jobs", everything=True)] == numbers


def asked(name: str, **values: Any) -> dict[str, Any]:
    return {"ask": name, "version": __version__, **values}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (asked("jobs") | {"version": "0"}, "3 daskcnn; version 0 asks; the service has"),
        ({"ask": "jobs"}, "3 daskcnn; version None asks"),
        (asked("job", number=9), "2 job 9; there is none; `daskcnn jobs` lists"),
        (asked("job"), "2 request; TypeError"),
        (asked("cancle", number=1), "2 request 'cancle'; unknown; did you mean 'cancel'?"),
        (asked("submit", jobs=[sent(modules=[("../x.py", "")])]), "no path of a source within a folder"),
        (asked("submit", jobs=[sent(modules=[("/etc/x.py", "")])]), "no path of a source within a folder"),
        (asked("submit", jobs=[sent(content={"run": 3})]), "[run]; it is no table"),
        (asked("submit", jobs=[sent(content={"data": {"path": "/none/x"}})]), "does not see it; give a path that"),
        (
            asked("submit", jobs=[sent(content={"data": {"path": "/none/x", "name": "shapes"}}, makes_data=False)]),
            "does not see it; give a path that",
        ),
        (asked("submit", jobs=[sent(content={"data": {"x": None}})]), "2 request; TypeError"),
        (asked("submit", jobs=[sent(state="done")]), "2 request; TypeError"),
        (asked("submit", jobs=[sent(only=3)]), "2 request; TypeError"),
        (asked("submit", jobs=[sent(priority="high")]), "2 request; IntegrityError"),
        (asked("submit", jobs=[sent(workers={"cpu": ["two", 2]})]), "2 request; ValueError"),
        (asked("submit", jobs=[sent(name="../x")]), "no name of a run"),
        (asked("submit", jobs=[sent(name="7")]), "run.name = '7'; a number is that of a job; choose a name with"),
        (asked("submit", jobs=[sent(name="7-a", sweep="7")]), "run.name = '7'; a number is that of a job"),
        (asked("submit", jobs=[sent(folder="a\0b")]), "run.dir = 'a\\x00b'; no folder has a NUL character"),
        (asked("submit", jobs=[sent(modules=[("a\0.py", "")])]), "no path of a source within a folder"),
        (asked("job", number=2**70), "2 request; OverflowError"),
        ([1, 2], "2 request; TypeError"),
        (None, "2 request; TypeError"),
    ],
)
def test_what_is_wrong_is_refused_in_words(queue: FakeQueue, request_: Any, words: str) -> None:
    assert words in refused(queue, request_)
    assert queue.spool.jobs() == []


def test_submit_says_what_the_services_machine_sees(queue: FakeQueue) -> None:
    (queue.folder / "there").mkdir()
    there, made = str(queue.folder / "there"), str(queue.folder / "made.zarr")
    jobs = [
        sent(token="a", content={"data": {"path": there}}),
        sent(token="b", content={"data": {"path": made, "name": "cifar10"}}, makes_data=True),
        sent(token="c", content={"data": {"path": "s3://bucket/x.zarr"}}),
    ]
    seen = ask(queue, "submit", jobs=jobs)["seen"]
    assert [text.partition(": ")[2].rpartition(" ")[0] for text in seen] == ["seen by", "to be made by"]


def test_a_full_disk_refuses_a_submission_in_words(queue: FakeQueue) -> None:
    pages = queue.spool._db.execute("PRAGMA page_count").fetchone()[0]
    queue.spool._db.execute(f"PRAGMA max_page_count = {pages}")
    words = refused(
        queue, {"ask": "submit", "version": __version__, "jobs": [sent(content={"model": {"x": "y" * 10**5}})]}
    )
    assert words.startswith("3 ")
    assert "full; make room; try again" in words


def test_logs_and_events_come_piece_by_piece_without_secrets(queue: FakeQueue) -> None:
    number = queue.add()
    queue.turn()
    queue.drivers.output(number, 0, 1)
    log = queue.drivers.folder(number) / "output.log"
    log.write_text("epoch 1\nmlflow at http://ann:geheim@host/x?token=abc&y=1\n")
    found = ask(queue, "logs", number=number)
    assert found["text"] == "epoch 1\nmlflow at http://…@host/x?token=…&y=1\n"
    assert ask(queue, "logs", number=number, offset=found["offset"]) == {
        "text": "", "offset": found["offset"], "more": True
    }  # fmt: skip
    events = Path(queue.job(number).run) / "events.jsonl"
    events.parent.mkdir(parents=True)
    events.write_text('{"event": "epoch", "epoch": 1.5, "step": 3, "epochs": 4}\n{"event": "tor')
    found = ask(queue, "events", number=number)
    assert found["text"].count("\n") == 1
    (job,) = ask(queue, "jobs")
    assert (job["epoch"], job["epochs"], job["accuracy"]) == (1.5, 4, None)
    queue.end(number, 0)
    queue.turn(cluster=False)
    assert ask(queue, "logs", number=number, offset=log.stat().st_size)["more"] is False


def test_nothing_of_what_was_submitted_is_listed_but_names_and_numbers(queue: FakeQueue) -> None:
    secret = {"run": {"mlflow": "http://ann:geheim@host"}}
    ask(queue, "submit", jobs=[sent(content=secret)])
    assert "geheim" not in str(ask(queue, "jobs"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:pass@bucket/a", "s3://…@bucket/a"),
        ("see https://host/a@b", "see https://host/a@b"),
        ("password=x1 token=y2", "password=… token=…"),
        ("mail ann@host", "mail ann@host"),
    ],
)
def test_secrets_are_taken_out(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_the_table_says_why_a_job_waits(queue: FakeQueue) -> None:
    first, second = queue.add(name="a"), queue.add(name="b", user="bob\x1b")
    queue.turn()
    queue.turn()
    jobs = ask(queue, "jobs")
    assert row_of(jobs[0]) == [str(first), "ann", "a", "running", "-", "-", "-", "desk-1", ""]
    text = readable_jobs(jobs)
    assert f"waits for 1 cpu worker: desk-1 is job {first}'s since" in text.splitlines()[2]
    assert "bob\\x1b" in text
    queue.spool.cancel(first, 0)
    assert row_of(ask(queue, "job", number=first))[3] == "cancelling"
    assert readable_jobs([]) == "no jobs in the queue"
    assert second == jobs[1]["id"]
