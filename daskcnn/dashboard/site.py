"""The scheduler's side of the page `/daskcnn`: it hears the events that drivers send, and is added to the dashboard."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from tornado.ioloop import IOLoop

from daskcnn.dashboard.live_run import Message, Runs
from daskcnn.errors import installing

NAME = "daskcnn"  # the page's path, its name in the navigation bar, and the scheduler's extension
HANDLER = "daskcnn_events"  # the scheduler's operation that takes a message


class Site:
    """The runs that the scheduler has heard of. It is an extension of the scheduler; drivers call `hear`."""

    def __init__(self) -> None:
        self.runs = Runs()

    def hear(self, key: str, feed: str, first: int, records: Sequence[Any], layers: Sequence[Any]) -> None:
        """Take in a message of a driver."""
        self.runs.hear(Message(key, feed, first, records, layers), time.time())


def _not_closed_early(record: logging.LogRecord) -> bool:
    """Drop the error of Bokeh for a reader who leaves before the page has come: it is nobody's fault."""
    kind = record.exc_info[0] if record.exc_info else None
    return not (kind is AssertionError and f"/{NAME}/ws" in record.getMessage())


def add_page(dask_scheduler: Any) -> str:
    """Add the page, once, to the dashboard of this scheduler, in its process; return why there is none, or ""."""
    if NAME in dask_scheduler.extensions:
        return ""
    try:
        from bokeh.server.tornado import BokehTornado
        from distributed.dashboard.core import BokehApplication
        from distributed.dashboard.scheduler import template_variables

        from daskcnn.dashboard.page import show_runs
    except ImportError as error:
        return f"{error} in the scheduler's environment ({installing('dashboard')} there)"
    web = dask_scheduler.http_application
    own = next((each for each in web.applications if isinstance(each, BokehTornado)), None)
    if own is None:
        return "the scheduler was started without its dashboard"
    logging.getLogger("tornado.application").addFilter(_not_closed_early)
    site, variables = Site(), template_variables(dask_scheduler)
    pages = {f"/{NAME}": partial(show_runs, site.runs)}
    application = BokehApplication(pages, dask_scheduler, prefix=own.prefix, template_variables=variables)
    web.add_application(application)
    application.initialize(IOLoop.current())
    application.start()
    variables["pages"].append(NAME)  # the list that every page of the dashboard makes its navigation bar of
    dask_scheduler.extensions[NAME] = site
    dask_scheduler.handlers[HANDLER] = site.hear
    return ""
