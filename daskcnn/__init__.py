"""Distributed training of convolutional networks on clusters of unequal machines, on Dask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daskcnn.job.tables import Job
    from daskcnn.launch.jobs import train
    from daskcnn.launch.prepare_arrays import prepare
    from daskcnn.launch.training import Result

__version__ = "0.1.0"
__all__ = ["Job", "Result", "prepare", "train"]


def __getattr__(name: str) -> Any:
    """`train` and what it takes, imported when first used: the layers below need no Dask."""
    if name in ("train", "Result"):
        from daskcnn.launch import jobs

        return getattr(jobs, name)
    if name == "prepare":
        from daskcnn.launch.prepare_arrays import prepare

        return prepare
    if name == "Job":
        from daskcnn.job.tables import Job

        return Job
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
