"""Event files of TensorBoard in a run's directory, written without TensorFlow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any

from daskcnn.events import Event, RunEnded, RunResumed
from daskcnn.followers.tool import Curves, FollowedRun, Tool, parameters

FOLDER = "tensorboard"  # folder of the event files in the run directory
_METRICS = ("validation/accuracy", "validation/loss", "test/accuracy", "test/loss")
_FAILED = ("diverged", "lost", "failed")


class TensorBoardFiles(Tool):
    """Curves, hyper-parameters and the job's text as an event file. A run that is resumed writes another one.

    tensorboardX's own writer loses the errors of its thread, and would wait for ever where the disk is full.
    """

    key, extra, package = "tensorboard", "tensorboard", "tensorboardX"

    def __init__(self, run: FollowedRun) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.summary import hparams, text

        folder = run.directory() / FOLDER
        folder.mkdir(exist_ok=True)
        self._curves = Curves()
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}.{time.monotonic_ns()}")
        tables = run.job.model_dump(mode="json", by_alias=True)
        self._add(text("job", f"```json\n{json.dumps(tables, indent=2)}\n```"))
        experiment, begins, _ = hparams(parameters(run.job), dict.fromkeys(_METRICS, 0.0))
        self._add(experiment)
        self._add(begins)
        self._writer.flush()

    def write(self, events: Sequence[Event]) -> None:
        """Write the points of the events, and flush once."""
        from tensorboardX.proto.event_pb2 import Event as Record
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        for event in events:
            if isinstance(event, RunResumed):
                log = SessionLog(status=SessionLog.START)  # TensorBoard drops what an earlier life wrote from there on
                self._writer.write_event(Record(session_log=log, step=event.step + 1, wall_time=time.time()))
            for point in self._curves.points(event):
                value = Summary(value=[Summary.Value(tag=point.curve, simple_value=point.value)])
                self._add(value, point.step, point.at)
            if isinstance(event, RunEnded):
                self._end(event.status)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, summary: Any, step: int = 0, at: float | None = None) -> None:
        from tensorboardX.proto.event_pb2 import Event as Record

        self._writer.write_event(Record(summary=summary, step=step, wall_time=time.time() if at is None else at))

    def _end(self, status: str) -> None:
        from tensorboardX.proto.api_pb2 import Status
        from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData, SessionEndInfo
        from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata

        code = Status.Value("STATUS_FAILURE" if status in _FAILED else "STATUS_SUCCESS")
        info = SessionEndInfo(status=code, end_time_secs=time.time())
        content = HParamsPluginData(session_end_info=info).SerializeToString()
        plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content)
        tag, metadata = "_hparams_/session_end_info", SummaryMetadata(plugin_data=plugin)
        self._add(Summary(value=[Summary.Value(tag=tag, metadata=metadata)]))
