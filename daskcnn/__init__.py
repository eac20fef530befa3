"""Distributed training of convolutional networks on clusters of unequal machines, on Dask.

The names for use from Python. Each is imported when it is first used:

CNNClassifier   a network as an estimator of scikit-learn's kind; listed where scikit-learn is installed
train           train a job on a cluster
submit          queue a job with the service of a cluster
dry_run         say what a job would do
prepare         write images and labels as a data set
prepare_folder  write a folder of image files as a data set
load            load a trained network
TrainedModel    a trained network: predictions, layers, weights
Result          what `train` returns
Job             a job's tables
Stop            raised by a function that is told a run's events, to end the run
errors, events  modules: what a user can mend; the events of a run
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from warnings import warn

if TYPE_CHECKING:
    from daskcnn import errors, events
    from daskcnn.batch.handle import submit
    from daskcnn.datasets.prepare_arrays import prepare
    from daskcnn.datasets.prepare_folder import prepare_folder
    from daskcnn.errors import Stop
    from daskcnn.estimator.classifier import CNNClassifier
    from daskcnn.job.tables import Job
    from daskcnn.launch.jobs import dry_run, train
    from daskcnn.launch.training import Result
    from daskcnn.trained.trained_model import TrainedModel, load

__version__ = "0.1.0"
__all__ = [
    "CNNClassifier",
    "Job",
    "Result",
    "Stop",
    "TrainedModel",
    "dry_run",
    "errors",
    "events",
    "load",
    "prepare",
    "prepare_folder",
    "submit",
    "train",
]
if find_spec("sklearn") is None:  # what walks over the names, as completion and `help` do, would end there
    del __all__[__all__.index("CNNClassifier")]  # not `remove`, which a type checker takes for certain

_HOMES = {
    "CNNClassifier": "daskcnn.estimator.classifier",
    "Job": "daskcnn.job.tables",
    "Result": "daskcnn.launch.training",
    "Stop": "daskcnn.errors",
    "TrainedModel": "daskcnn.trained.trained_model",
    "dry_run": "daskcnn.launch.jobs",
    "load": "daskcnn.trained.trained_model",
    "prepare": "daskcnn.datasets.prepare_arrays",
    "prepare_folder": "daskcnn.datasets.prepare_folder",
    "submit": "daskcnn.batch.handle",
    "train": "daskcnn.launch.jobs",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the layers below `launch` need no Dask."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "plan":  # what the command calls a dry run; `daskcnn plan` is something else
        warn("daskcnn.plan has another name: use daskcnn.dry_run", DeprecationWarning, stacklevel=2)
        return __getattr__("dry_run")
    if name in __all__:
        return import_module(f"daskcnn.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
