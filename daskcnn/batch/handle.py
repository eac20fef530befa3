"""`daskcnn.submit`: a job is queued from Python, and a handle follows it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from distributed import Client

from daskcnn.batch.asking import LOOK, Ask, at_client, at_scheduler, patient, printed
from daskcnn.batch.records import ENDED
from daskcnn.batch.submission import message_of, send
from daskcnn.cluster.link.client import given_or_default
from daskcnn.errors import ClusterError, DataError, UserError
from daskcnn.events import Event
from daskcnn.job.resolve import resolve
from daskcnn.launch.jobs import JobTables, kept_result, no_job, tables_of
from daskcnn.launch.training import Result
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.log import events_in
from daskcnn.runs.summary import checked_summary
from daskcnn.trained.trained_model import TrainedModel


class JobFailed(UserError):
    """A job of a queue has failed, or was cancelled. Its exit code is the job's."""


@dataclass(frozen=True)
class SubmittedJob:
    """A job in a queue. Several processes may have a handle of one job.

    Attributes
    ----------
    id : the job's number. run : its folder, on the machine of the service.
    """

    id: int
    run: Path
    _client: Client | None = None
    _scheduler: Mapping[str, Any] | None = None

    @contextmanager
    def _asking(self) -> Iterator[Ask]:
        if self._client is not None:
            yield at_client(self._client)
            return
        with at_scheduler(self._scheduler or {}) as ask:
            yield ask

    def _ask(self, name: str, **values: Any) -> Any:
        with self._asking() as ask:
            return ask(name, number=self.id, **values)

    def status(self) -> dict[str, Any]:
        """Return what is known of the job, as `daskcnn jobs --json` prints it: its state, and why it waits."""
        found: dict[str, Any] = self._ask("job")
        return found

    def cancel(self) -> None:
        """End the job. What it has trained is saved."""
        self._ask("cancel")

    def hold(self) -> None:
        """Keep the job from starting until it is released."""
        self._ask("hold")

    def release(self) -> None:
        """Let the job start that was held, has failed or was cancelled."""
        self._ask("release")

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the job has ended, and return its state: "done", "failed" or "cancelled".

        The service may be started again meanwhile. Raises TimeoutError after `timeout` seconds, and ClusterError where
        no service has answered for that long; without `timeout` for five minutes.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._asking() as ask:
            asked = patient(ask, deadline)
            while (state := str(asked("job", number=self.id)["state"])) not in ENDED:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"job {self.id} is {state} after {timeout:g} s")
                time.sleep(LOOK)
        return state

    def events(self) -> Iterator[Event]:
        """Yield the events of the job's run (`daskcnn.events`) as they are written, until it has ended.

        Raises ClusterError where no service has answered for five minutes.
        """
        offset, number = 0, 1
        with self._asking() as ask:
            asked = patient(ask)
            while True:
                found = asked("events", number=self.id, offset=offset)
                offset = found["offset"]
                yield from events_in(BytesIO(found["text"].encode()), self.run, number)
                number += found["text"].count("\n")
                if not found["more"]:
                    return
                if not found["text"]:
                    time.sleep(LOOK)

    def logs(self) -> str:
        """Return what the job's driver has printed so far."""
        with self._asking() as ask:
            return "".join(printed(ask, self.id, follow=False))

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the job, and return its history and model, as `daskcnn.train` does.

        Raises JobFailed if it has failed or was cancelled, DataError where its run cannot be seen from here, and
        TimeoutError after `timeout` seconds.
        """
        if self.wait(timeout) != "done":
            job = self.status()
            error = JobFailed(f"job {self.id}", f"{job['state']} ({job['why']})", f"`daskcnn logs {self.id}` says more")
            error.exit_code = job["exit_code"] or 1
            raise error
        try:
            run = RunDirectory.open(self.run)
        except DataError as error:
            reason = "its run cannot be seen from here"
            raise DataError(f"job {self.id}: {self.run}", reason, "read it on the service's machine") from error
        summary = run.summary()
        if summary is None:
            raise DataError(run.path, "it has no summary", "it may be kept in another place: `daskcnn logs` names it")
        return kept_result(run, checked_summary(summary, run.path / "summary.json"))

    @property
    def model(self) -> TrainedModel:
        """The trained network. Waits for the job; raises as `result`."""
        return self.result().model


def submit(
    client: Client | None = None,
    job: JobTables | None = None,
    *,
    priority: int = 0,
    after: Sequence[int | SubmittedJob] = (),
    hold: bool = False,
) -> SubmittedJob:
    """Queue a job with the service (`daskcnn serve`) of a Dask cluster, and return a handle of it.

    Parameters
    ----------
    client : None stands for the default one. Where there is none, the job's `cluster.scheduler` is asked.
    job : tables, a `Job`, or the path of a job file. What is submitted counts, whatever becomes of the file.
    priority : of your own waiting jobs, one with a higher number goes first.
    after : jobs that have to be done first, by number or handle.
    hold : it does not start until it is released.

    Raises
    ------
    daskcnn.errors.UserError : the job is wrong, or there is no service.

    Examples
    --------
    >>> job = daskcnn.submit(client, {"train": {"epochs": 1}})  # doctest: +SKIP
    >>> job.wait()  # doctest: +SKIP
    'done'
    """
    client, raw = given_or_default(no_job(client)), tables_of(job)
    cluster = resolve(raw).cluster
    names = {key: value for key in ("scheduler", "scheduler_file") if (value := getattr(cluster, key))}
    if client is None and not names:
        raise ClusterError("submit", "no client is given, and the job names no scheduler", "give a client of Dask")
    others = [each.id if isinstance(each, SubmittedJob) else int(each) for each in after]
    message = message_of(raw, priority=priority, after=others, hold=hold)
    if client is not None:
        answer = send(at_client(client), [message])
    else:
        with at_scheduler(names) as ask:
            answer = send(ask, [message])
    return SubmittedJob(answer["ids"][0], Path(answer["runs"][0]), client, names)
