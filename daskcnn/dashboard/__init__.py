"""The page of runs in Dask's dashboard, `/daskcnn`. A scheduler has it by `dask scheduler --preload daskcnn.dashboard`,
and from a job whose `run.dashboard` is true.

`feed` sends a run's events, `site` hears them in the scheduler's process, `live_run` folds them, and `page` shows them
with Bokeh. The scheduler's process does not import Numba or Zarr for it.
"""

from __future__ import annotations

import logging
from typing import Any


def dask_setup(scheduler: Any) -> None:
    """Called by Dask in a process that preloads this module. A scheduler without Bokeh logs why it has no page."""
    from daskcnn.dashboard.site import add_page

    if reason := add_page(scheduler):
        logging.getLogger("distributed.scheduler").warning("daskcnn: no page of runs: %s", reason)
