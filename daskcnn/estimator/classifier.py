"""A convolutional network as an estimator of scikit-learn: `daskcnn.CNNClassifier`.

The functions above the class turn a user's arrays into images and labels that a data set can hold.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from dask.base import is_dask_collection
from distributed import Client

from daskcnn.cluster.link.client import checked_client
from daskcnn.cluster.link.own_process import SHARED, apart_from_tasks
from daskcnn.datasets.array_sources import array_of
from daskcnn.datasets.own_data import OwnData, new_path, stored
from daskcnn.errors import JobError, UserError, installing
from daskcnn.job.network import reconstructs
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import LAYER, Job
from daskcnn.launch.recorder import OnEvent
from daskcnn.launch.training import Result, train_job
from daskcnn.trained.trained_model import TrainedModel
from daskcnn.training.trained_network import Classifier

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data
except ModuleNotFoundError as error:
    raise UserError("package scikit-learn", "it is not installed", installing("sklearn")) from error

ImageShape = tuple[int, int, int]

_STORED = ("uint8", "uint16", "int16", "float16", "float32", "float64")


def stored_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return the number type that a data set keeps such images in: the type itself, or the smallest that holds it.

    Integers of 32 and 64 bits become float64. Raises ValueError for a type that is not of real numbers.
    """
    found = np.dtype(dtype)
    if found.kind not in "buif":
        raise ValueError(f"X has dtype {found}: images are real numbers; convert them")
    if found.newbyteorder("=").name in _STORED:
        return found.newbyteorder("=")
    return next((np.dtype(name) for name in _STORED if np.can_cast(found, name, "safe")), np.dtype("float64"))


def image_shape_of(shape: Sequence[int], wanted: Sequence[int] | None) -> ImageShape:
    """Return (H, W, C) of the images in an array (N, features), (N, H, W) or (N, H, W, C).

    Two dimensions are 1 × features × 1 where no shape, (H, W, C) or (H, W), is wanted. Raises ValueError where the
    array does not have images of the wanted shape.
    """
    asked: ImageShape | None = None
    if wanted is not None:
        H, W, *C = (int(size) for size in wanted)
        asked = (H, W, C[0] if C else 1)
        if len(C) > 1 or min(asked) < 1:
            raise ValueError(f"image_shape={tuple(wanted)}: give (height, width) or (height, width, channels)")
    if len(shape) == 2:
        found = asked or (1, int(shape[1]), 1)
        if prod(found) != shape[1]:
            raise ValueError(f"X has {shape[1]} features, image_shape={found} has {prod(found)}; correct image_shape")
        return found
    if len(shape) not in (3, 4):
        raise ValueError(f"Expected 2D array, or images of 3 or 4 dimensions, got X of shape {tuple(shape)}")
    found = (int(shape[1]), int(shape[2]), int(shape[3]) if len(shape) == 4 else 1)
    if asked is not None and asked != found:
        raise ValueError(f"X has images of shape {found}, image_shape={asked}; leave image_shape out")
    return found


def as_images(X: Any, shape: ImageShape) -> Any:
    """Return the array as (N, H, W, C), in a number type that a data set keeps; a Dask array stays one."""
    images = X if X.shape[1:] == shape else X.reshape((X.shape[0], *shape))
    return images.astype(stored_dtype(X.dtype), copy=False)


def encode_labels(y: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Return the sorted classes, and each label's place among them. Raises ValueError for one class only."""
    classes, labels = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        only = classes[:1].tolist()[0]
        raise ValueError(f"y has 1 class ({only!r}): a classifier needs samples of 2 classes or more")
    return classes, labels.reshape(-1)


def class_names(classes: npt.NDArray[Any]) -> tuple[str, ...]:
    """Return the classes' names in the data set: as they print, or numbered where two print alike."""
    names = tuple(str(each) for each in classes.tolist())
    return names if len(set(names)) == len(names) else tuple(f"{i}: {name}" for i, name in enumerate(names))


def checked_weights(weights: Any, samples: int) -> npt.NDArray[np.float32] | None:
    """Return one weight a sample, (N,); None where all samples count alike.

    Raises ValueError unless there is one for each sample, all are finite, none is negative and one is above zero.
    """
    if weights is None:
        return None
    found = np.asarray(weights.compute() if is_dask_collection(weights) else weights)
    if found.ndim == 0:
        found = np.full(samples, found)
    if found.ndim != 1:
        raise ValueError(f"sample_weight has shape {found.shape}: Sample weights must be 1D array or scalar")
    if len(found) != samples:
        raise ValueError(f"sample_weight has shape {found.shape}, X has {samples} samples; give one for each sample")
    found = found.astype(np.float64)
    if not (np.isfinite(found).all() and (found >= 0).all()):
        raise ValueError("sample_weight: weights are finite numbers of 0 or more; correct those that are not")
    if not found.any():
        raise ValueError("sample_weight: every weight is zero; give one sample at least a weight above 0")
    return None if (found == found[0]).all() else found.astype(np.float32)


def held_out(samples: int, fraction: float) -> int:
    """Return the size of the validation part: this fraction of the samples, at least one; one is left to train on.

    Raises ValueError unless the fraction lies between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"validation_fraction={fraction}: give a number between 0 and 1")
    return min(max(1, round(samples * fraction)), samples - 1)


def checked_array(estimator: Any, X: Any, *, reset: bool) -> npt.NDArray[Any]:
    """Return X as a finite array of numbers: two-dimensional, or images. reset: whether it sets `n_features_in_`."""
    shape = np.shape(X) if isinstance(X, list | tuple) else getattr(X, "shape", ())
    if len(shape) > 2:
        return check_array(X, ensure_2d=False, allow_nd=True, input_name="X", estimator=estimator)
    return validate_data(estimator, X, reset=reset)


def checked_labels(estimator: Any, y: Any) -> npt.NDArray[Any]:
    """Return the labels as a one-dimensional array. Raises ValueError for what is no label of a class."""
    if y is None:
        raise ValueError(f"This {type(estimator).__name__} estimator requires y to be passed, but the target y is None")
    found = column_or_1d(y, warn=True)
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise ValueError("Input y contains NaN or infinity")
    check_classification_targets(found)
    return found


_TRAINING = ("strategy", "epochs", "batch_size", "lr", "optimizer")
"""Parameters that are always shown."""
_NEVER = 1e9
"""Epochs between two checkpoints of a fit, which is more than it has: it keeps one, at its end."""


class CNNClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """A convolutional network that is trained by daskcnn, as an estimator of scikit-learn.

    Parameters
    ----------
    model : name of a network, such as "quick", or a list of layers; a last dense layer without `units` has one for each
        class. None: "quick", or one convolution where images are smaller than 8×8.
    strategy : how the workers train together, as `train.strategy` of a job.
    epochs, lr, optimizer : as the keys of `[train]`. "sgd" wants another learning rate, such as 0.005.
    batch_size : samples in a minibatch. "auto": 32, but 16 for up to 1,000 samples to train on, and 8 for up to 200.
    image_shape : (H, W) or (H, W, C) of the images in a two-dimensional X. None: 1 × features × 1.
    client : a client of the cluster to train on. None: one worker in this process, which all fits share.
    warm_start : whether a fit starts from the weights of the fit before.
    validation_fraction : part of the samples that is not trained on; the network is judged on it after every epoch.
    random_state : seed of weights and order: a number, a NumPy generator, or None for a new seed each time.
    job : tables of a job that are laid over those that the other parameters make, such as
        ``{"train": {"clip": 1.0}}``.
    data_dir : folder or URL that every worker sees, for the data set of a fit while it lasts. None: a folder for
        temporary files of this machine.
    run_dir : folder where the runs of the fits are kept. None: they are not kept.
    on_event : a function that is told every event of a fit, as for `daskcnn.train`.

    Attributes
    ----------
    classes_ : the classes, sorted.
    batch_size_ : samples in a minibatch of the last fit.
    n_features_in_ : features of a sample: for images height × width × channels.
    image_shape_ : (H, W, C) of the images.
    model_ : the trained network, a `daskcnn.TrainedModel`.
    history_ : the event of every epoch, as dicts.
    summary_ : how the last fit went, as `summary.json` has it.
    run_ : the run directory of the last fit; None where it was not kept.

    Examples
    --------
    >>> import numpy as np
    >>> from daskcnn import CNNClassifier
    >>> rng = np.random.default_rng(0)
    >>> y = np.repeat(["dark", "light"], 20)
    >>> X = rng.normal(np.where(y == "dark", 0, 2)[:, None, None], 1, (40, 8, 8))
    >>> classifier = CNNClassifier(model=[{"layer": "dense"}], epochs=20, lr=0.01).fit(X, y)
    >>> classifier
    CNNClassifier(model=[{'layer': 'dense'}], strategy='sgwu', epochs=20, batch_size='auto', lr=0.01, optimizer='adamw')
    >>> classifier.predict(X[[0, -1]])
    array(['dark', 'light'], dtype='<U5')
    """

    def __init__(
        self,
        model: str | Sequence[Mapping[str, Any]] | None = None,
        strategy: str = "sgwu",
        epochs: int = 10,
        batch_size: int | Literal["auto"] = "auto",
        lr: float = 0.003,
        *,
        optimizer: str | Mapping[str, Any] = "adamw",
        image_shape: Sequence[int] | None = None,
        client: Client | None = None,
        warm_start: bool = False,
        validation_fraction: float = 0.1,
        random_state: Any = 0,
        job: Mapping[str, Any] | None = None,
        data_dir: str | Path | None = None,
        run_dir: str | Path | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.model = model
        self.strategy = strategy
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.optimizer = optimizer
        self.image_shape = image_shape
        self.client = client
        self.warm_start = warm_start
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.job = job
        self.data_dir = data_dir
        self.run_dir = run_dir
        self.on_event = on_event

    # --- fitting ---

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train the network.

        Parameters
        ----------
        X : (N, features), or images (N, H, W) or (N, H, W, C): NumPy, Dask or Zarr. A Dask or Zarr array is never
            whole in memory.
        y : (N,) labels of any sortable type. They fit in memory.
        sample_weight : (N,) what each sample's loss counts for; None: all alike.
        """
        samples = self._samples(X, y, sample_weight)
        result = self._trained(samples) if self.client is not None else apart_from_tasks(lambda: self._trained(samples))
        self.model_: TrainedModel = result.model
        self.batch_size_ = result.model.job.train.batch_size
        self.history_ = result.history
        self.summary_ = result.summary
        self.run_ = None if self.run_dir is None else result.run
        return self

    def _samples(self, X: Any, y: Any, sample_weight: Any) -> OwnData:
        """Return the checked samples. Sets the attributes that describe them."""
        X = array_of(X)
        if not is_dask_collection(X):
            X = checked_array(self, X, reset=True)
        y = checked_labels(self, y.compute() if is_dask_collection(y) else y)
        if X.shape[0] != len(y):
            raise ValueError(f"Found input variables with inconsistent numbers of samples: {[int(X.shape[0]), len(y)]}")
        if len(y) < 2:
            raise ValueError(f"Found array with {len(y)} sample(s), n_samples = {len(y)}: a minimum of 2 is required")
        self.image_shape_ = image_shape_of(X.shape, self.image_shape)
        self.n_features_in_ = int(np.prod(self.image_shape_))
        weights = checked_weights(sample_weight, len(y))
        self.classes_, labels = encode_labels(y)
        images = as_images(X, self.image_shape_)
        validation = held_out(len(y), self.validation_fraction)
        return OwnData(images, labels, class_names(self.classes_), weights, validation)

    def _trained(self, samples: OwnData) -> Result:
        shared = SHARED.client() if self.client is None else nullcontext(checked_client(self.client))
        with shared as client, TemporaryDirectory(prefix="daskcnn-") as folder:
            path = new_path(str(self.data_dir or folder))
            job = self._job(samples, path, Path(folder))  # before samples are written: it may be wrong
            with stored(samples, path, seed=job.train.seed, client=client):
                return train_job(job, client=client, on_event=self.on_event)

    def _job(self, samples: OwnData, path: str, folder: Path) -> Job:
        """Return the job of a fit on the data set at this path. Raises JobError."""
        places = {"data": {"path": path}, "run": {"dir": str(self.run_dir or folder / "runs")}}
        tables = merged(self._tables(samples, _seed(self.random_state)), places)
        if self.warm_start and hasattr(self, "model_"):
            tables["model"]["from"] = str(self.model_.kept_in(folder / "before"))
        job = resolve(merged(tables, self.job or {}))
        if reconstructs(job):
            raise JobError([f"train.loss = {job.train.loss!r}: a classifier has classes; use daskcnn.train"])
        return job

    def _tables(self, samples: OwnData, seed: int) -> dict[str, dict[str, Any]]:
        """Return the tables of the fit's job without its places."""
        numbers = {"epochs": self.epochs, "lr": self.lr}
        numbers |= {} if self.batch_size == "auto" else {"batch_size": self.batch_size}
        # a search over np.arange sets numbers of NumPy
        train = {key: value.item() if isinstance(value, np.generic) else value for key, value in numbers.items()}
        optimizer = self.optimizer if isinstance(self.optimizer, str) else dict(self.optimizer)
        train |= {"strategy": self.strategy, "optimizer": optimizer}
        if self.client is None and self.strategy != LAYER:
            train["partition"] = "udpa"  # one worker has all samples
        return {
            "data": {"validation": samples.validation, "augment": "none"},
            "model": self._network(len(samples.classes)),
            "train": {**train, "seed": seed},
            "cluster": {"settle": 0.0},
            # a fit that was cut short is never resumed
            "run": {} if self.run_dir is not None else {"checkpoint_every": _NEVER, "keep": 1},
        }

    def _network(self, classes: int) -> dict[str, Any]:
        if isinstance(self.model, str):
            return {"name": self.model}
        if self.model is None:
            return {}
        given = [dict(layer) for layer in self.model]
        if given and given[-1].get("layer") == "dense":
            given[-1].setdefault("units", classes)
        return {"layers": given}

    # --- predicting ---

    def predict_proba(self, X: Any) -> Any:
        """Return probabilities (N, classes), in the order of `classes_`; of a Dask array a lazy Dask array."""
        check_is_fitted(self, "model_")
        X = array_of(X)
        lazy = is_dask_collection(X)
        if not lazy:
            X = checked_array(self, X, reset=False)
        shape = image_shape_of(X.shape, self.image_shape_ if X.ndim == 2 else None)
        if shape != self.image_shape_:
            raise ValueError(f"X has images of shape {shape}, {type(self).__name__} was fitted on {self.image_shape_}")
        model, own, dtype = self.model_, self.model_.classifier, stored_dtype(X.dtype)
        if own.facts.dtype != dtype:  # the images may be of another number type than those of the fit
            model = TrainedModel(Classifier(own.job, replace(own.facts, dtype=dtype), own.weights))
        return model.predict(as_images(X, shape))

    def predict(self, X: Any) -> Any:
        """Return the likeliest class of each sample, (N,); of a Dask array a lazy Dask array."""
        proba = self.predict_proba(X)
        if not is_dask_collection(proba):
            return _likeliest(proba, self.classes_)
        return proba.map_blocks(_likeliest, self.classes_, drop_axis=1, dtype=self.classes_.dtype)

    # --- parameters and copies ---

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        """Return the parameters of the training, and those of the others that are not their defaults."""
        defaults, own = inspect.signature(type(self)).parameters, self.get_params(deep=False)
        shown = [name for name in defaults if name in _TRAINING or own[name] is not defaults[name].default]
        text = ", ".join(f"{name}={own[name]!r}" for name in shown)
        return f"{type(self).__name__}({text})"[:N_CHAR_MAX]

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name. ``job__train__clip=1.0`` sets one key of `job`, so that a search can vary it."""
        keys = {name: params.pop(name) for name in list(params) if name.startswith("job__")}
        super().set_params(**params)
        for name, value in keys.items():
            tables = value
            for part in reversed(name.split("__")[1:]):
                tables = {part: tables}
            self.job = merged(self.job or {}, tables)
        return self

    def __sklearn_clone__(self) -> Self:
        """Return an unfitted estimator with the same client and copies of the other parameters."""
        own = {name: value for name, value in self.get_params(deep=False).items() if name != "client"}
        found = type(self)(**copy.deepcopy(own), client=self.client)
        for name in ("_metadata_request", "_sklearn_output_config"):
            if hasattr(self, name):
                setattr(found, name, copy.deepcopy(getattr(self, name)))
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the client: a pickled estimator predicts anywhere, and fits in its own process."""
        return {**super().__getstate__(), "client": None}


def _likeliest(proba: npt.NDArray[Any], classes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if wrong := int(np.isnan(proba).any(axis=1).sum()):
        raise ValueError(f"Input X contains NaN or infinity in {wrong} of {len(proba)} samples: these have no class")
    return classes[proba.argmax(axis=1)]


def _seed(random_state: Any) -> int:
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    if random_state is None or isinstance(random_state, np.random.Generator):
        return int(np.random.default_rng(random_state).integers(2**31))
    return int(random_state.randint(2**31 - 1))


def merged(tables: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables with those keys laid over them, table by table."""
    found = dict(tables)
    for key, value in over.items():
        below = found.get(key)
        found[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return found
