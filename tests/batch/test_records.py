"""The tables of a queue hold its laws by themselves."""

from __future__ import annotations

import sqlite3
from typing import get_args

import pytest

from daskcnn.batch.records import ACTIVE, ENDED, SCHEMA, STARTABLE, State

JOB = (
    "INSERT INTO jobs (token, user, submitted, state, since, name, run, priority, after, workers, only, content)"
    " VALUES (?, 'ann', 0, ?, 0, 'first', ?, 0, '[]', '{}', '[]', '{}')"
)


@pytest.fixture
def tables() -> sqlite3.Connection:
    made = sqlite3.connect(":memory:", isolation_level=None)
    made.executescript(SCHEMA)
    return made


def test_the_tables_know_every_state(tables: sqlite3.Connection) -> None:
    assert {*ACTIVE, *ENDED} == {*get_args(State)}
    assert {*STARTABLE} < {*ACTIVE}
    for i, state in enumerate(get_args(State)):
        tables.execute(JOB, (str(i), state, f"runs/{i}"))
    with pytest.raises(sqlite3.IntegrityError):
        tables.execute(JOB, ("x", "lost", "runs/x"))


def test_a_worker_is_one_jobs_at_a_time(tables: sqlite3.Connection) -> None:
    tables.execute(JOB, ("a", "running", "runs/a"))
    tables.execute("INSERT INTO grants VALUES (1, 'desk-1', 0, NULL)")
    with pytest.raises(sqlite3.IntegrityError):
        tables.execute("INSERT INTO grants VALUES (1, 'desk-1', 1, NULL)")
    tables.execute("UPDATE grants SET ended = 2")
    tables.execute("INSERT INTO grants VALUES (1, 'desk-1', 3, NULL)")


def test_two_jobs_that_have_not_ended_never_write_one_run(tables: sqlite3.Connection) -> None:
    tables.execute(JOB, ("a", "done", "runs/a"))
    tables.execute(JOB, ("b", "queued", "runs/a"))
    with pytest.raises(sqlite3.IntegrityError):
        tables.execute(JOB, ("c", "held", "runs/a"))
