"""A convolutional network as an estimator of scikit-learn: `daskcnn.CNNClassifier`."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from dask.base import is_dask_collection
from distributed import Client

from daskcnn.cluster.link.client import checked_client
from daskcnn.cluster.link.connect import connect
from daskcnn.cluster.link.own_process import SHARED, apart_from_tasks
from daskcnn.datasets.array_sources import channels_elsewhere
from daskcnn.datasets.given_arrays import array_of, labels_of, meant, with_coordinates
from daskcnn.datasets.own_data import OwnData, new_path, stored
from daskcnn.errors import JobError, NotInstalled, installing
from daskcnn.estimator.fit_job import FIXED, PARAMETERS, fit_job, merged, network_tables, seed_of, weights_by_name
from daskcnn.estimator.going_on import Momentum, all_classes, places_among, run_to_go_on_with, tables_of
from daskcnn.estimator.samples import (
    FitSamples,
    as_images,
    checked_weights,
    class_names,
    encode_labels,
    held_out,
    image_shape_of,
    stored_dtype,
)
from daskcnn.job.tables import Job
from daskcnn.launch.jobs import plain_numbers
from daskcnn.launch.recorder import OnEvent
from daskcnn.launch.training import Result, train_job
from daskcnn.store.masks import filled, own_nodata
from daskcnn.temporary import OwnFolder
from daskcnn.trained.trained_model import TrainedModel
from daskcnn.training.trained_network import Classifier

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data
except ModuleNotFoundError as error:
    raise NotInstalled("package scikit-learn", "it is not installed", installing("sklearn")) from error


def checked_array(estimator: Any, X: Any, *, reset: bool, nodata: float | None, own: bool = False) -> npt.NDArray[Any]:
    """Return X as an array of numbers without infinities: two-dimensional, or images. What is masked is no data.

    Parameters
    ----------
    reset : whether it sets `n_features_in_`.
    nodata, own : as for `filled`. Where something stands for no data, NaN does too.

    Raises
    ------
    ValueError : X is no such array.
    DataError : integers are masked, and nothing stands for no data.
    """
    if isinstance(X, np.ma.MaskedArray):
        X = filled(X.astype(stored_dtype(X.dtype)), nodata, own=own)
    shape = np.shape(X) if isinstance(X, list | tuple) else getattr(X, "shape", ())
    if len(shape) > 2:
        how = {"ensure_2d": False, "allow_nd": True, "input_name": "X", "estimator": estimator}
        found = check_array(X, ensure_all_finite="allow-nan", **how)
    else:
        found = validate_data(estimator, X, reset=reset, ensure_all_finite="allow-nan")
    if nodata is None and found.dtype.kind == "f" and (wrong := np.isnan(found.reshape(len(found), -1)).any(1)).any():
        told = f"Input X contains NaN in sample {wrong.argmax()}"
        raise ValueError(f"{told}: fit with nodata=-9999 or any other number, and NaN stands for no data too")
    return found


def checked_labels(estimator: Any, y: Any) -> npt.NDArray[Any]:
    """Return the labels as a one-dimensional array. Raises ValueError for what is no label of a class."""
    if y is None:
        raise ValueError(f"This {type(estimator).__name__} estimator requires y to be passed, but the target y is None")
    if len(shape := np.shape(y)) == 2 and shape[1] > 1:
        remedy = "give the class of each sample; of rows with one 1 each it is y.argmax(axis=1)"
        raise ValueError(f"y should be a 1d array, got an array of shape {shape} instead: {remedy}")
    found = column_or_1d(y, warn=True)
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise ValueError("Input y contains NaN or infinity")
    check_classification_targets(found)
    return found


_BEFORE = "before"  # folder of the network that a warm start goes on from
_TRAINING = ("strategy", "epochs", "batch_size", "lr", "optimizer")
"""Parameters that are always shown."""


class CNNClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """A convolutional network that is trained by daskcnn, as an estimator of scikit-learn.

    Parameters
    ----------
    model : name of a network, such as "quick", or a list of layers; a last dense layer without `units` has one for each
        class. None: "quick", or one convolution where images are smaller than 8×8.
    strategy : how the workers train together, as `train.strategy` of a job.
    epochs, lr, optimizer : as the keys of `[train]`. "sgd" wants another learning rate, such as 0.005.
    batch_size : samples of a step of the weights. None: 32, but 16 for up to 1,000 samples to train on, and 8 for up to
        200. "auto": steps begin with these, and grow with the gradient noise scale, as `train.batch_size` of a job.
    image_shape : (H, W) or (H, W, C) of the images in a two-dimensional X. None: 1 × features × 1.
    client : a client of the cluster to train on. None: the scheduler that `job` names in ``{"cluster": {"scheduler":
        ADDRESS}}``, or one worker in this process, which all fits share.
    warm_start : whether a fit starts from the weights of the fit before.
    validation_fraction : part of the samples that is not trained on; the network is judged on it after every epoch.
    nodata : value of pixels without data. With any number NaN stands for no data, too. Such pixels count as the mean of
        their channel. None: the fill value of a masked array; elsewhere NaN is refused.
    random_state : seed of weights and order: a number, a NumPy generator, or None for a new seed each time.
    job : tables of a job that are laid over those that the other parameters make, such as
        ``{"train": {"clip": 1.0}}``. What a fit gives is refused there: its samples, and parameters that were set.
    data_dir : folder or URL that every worker sees, for the data set of a fit while it lasts. None: a folder for
        temporary files of this machine.
    run_dir : folder where the runs of the fits are kept. None: they are not kept.
    on_event : a function that is told every event of a fit, as for `daskcnn.train`.

    Attributes
    ----------
    classes_ : the classes, sorted.
    batch_size_ : samples of a step that the last fit began with.
    n_features_in_ : features of a sample: for images height × width × channels.
    image_shape_ : (H, W, C) of the images.
    model_ : the trained network, a `daskcnn.TrainedModel`.
    history_ : the event of every evaluation, as dicts.
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
    CNNClassifier(model=[{'layer': 'dense'}], strategy='auto', epochs=20, batch_size=None, lr=0.01, optimizer='adamw')
    >>> classifier.predict(X[[0, -1]])
    array(['dark', 'light'], dtype='<U5')
    """

    def __init__(
        self,
        model: str | Sequence[Mapping[str, Any]] | None = None,
        strategy: str = "auto",
        epochs: int = 10,
        batch_size: int | Literal["auto"] | None = None,
        lr: float = 0.003,
        *,
        optimizer: str | Mapping[str, Any] = "adamw",
        image_shape: Sequence[int] | None = None,
        client: Client | None = None,
        warm_start: bool = False,
        validation_fraction: float = 0.1,
        nodata: float | None = None,
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
        self.nodata = nodata
        self.random_state = random_state
        self.job = job
        self.data_dir = data_dir
        self.run_dir = run_dir
        self.on_event = on_event

    _momentum: Momentum | None = None  # of the last call of partial_fit

    # --- fitting ---

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train the network.

        Parameters
        ----------
        X : (N, features), or images (N, H, W) or (N, H, W, C): NumPy, Dask, Zarr or xarray. A Dask or Zarr array is
            never whole in memory. What is masked is no data.
        y : (N,) labels: texts, integers, whole floats, booleans or dates. They fit in memory. Where X and y have
            coordinates of the samples, y is taken in the order of X.
        sample_weight : (N,) what each sample's loss counts for; None: all alike.
        """
        return self._fitted(self._samples(X, y, sample_weight))

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train for one epoch, from the weights and the momentum of the call before.

        As searches and wrappers want it that hand in the samples chunk by chunk. The learning rate stays as it is. The
        first call decides what images are normalised by. After `fit` it goes on from the weights.

        Parameters
        ----------
        X, y, sample_weight : samples of two classes or more, as for `fit`.
        classes : all classes that y will ever have. The first call needs them.
        """
        every = all_classes(classes, getattr(self, "classes_", None))
        return self._fitted(self._samples(X, y, sample_weight, every), one_epoch=True)

    def _fitted(self, samples: FitSamples, *, one_epoch: bool = False) -> Self:
        """Train on the samples. An attribute changes only once that is done: a fit that fails leaves the one before."""

        def train() -> Result:
            return self._trained(samples, one_epoch)

        result = train() if self.client is not None else apart_from_tasks(train)
        self.model_: TrainedModel = result.model
        self.classes_, self.image_shape_ = samples.classes, samples.shape
        self.n_features_in_ = int(np.prod(samples.shape))
        self.__dict__.pop("feature_names_in_", None)
        if samples.names is not None:
            self.feature_names_in_ = samples.names
        self.batch_size_ = result.model.job.train.batch_size
        self.history_ = result.history
        self.summary_ = result.summary
        self.run_ = None if self.run_dir is None else result.run
        return self

    def _samples(self, X: Any, y: Any, sample_weight: Any, classes: npt.NDArray[Any] | None = None) -> FitSamples:
        """Return the checked samples, and what describes them. classes: None for those of y."""
        goes_on = classes is not None and hasattr(self, "model_")
        checked = self if goes_on else copy.copy(self)  # scikit-learn's checks set attributes
        if not goes_on:
            checked.__dict__.pop("feature_names_in_", None)
        given, X = X, array_of(X, self.nodata)
        if suspected := channels_elsewhere(given, "NHWC", "numpy.moveaxis(X, 1, -1)"):
            warnings.warn(suspected, stacklevel=3)
        nodata = self.model_.classifier.facts.nodata if goes_on and self.nodata is None else meant(given, self.nodata)
        if not is_dask_collection(X):
            if nodata is None and isinstance(X, np.ma.MaskedArray):
                nodata = own_nodata(X, stored_dtype(X.dtype))
            X = checked_array(checked, X, reset=not goes_on, nodata=nodata, own=self.nodata is None)
        y = checked_labels(self, _in_order(y, "y", given))
        if X.shape[0] != len(y):
            raise ValueError(f"Found input variables with inconsistent numbers of samples: {[int(X.shape[0]), len(y)]}")
        if len(y) < 2:
            raise ValueError(f"Found array with {len(y)} sample(s), n_samples = {len(y)}: a minimum of 2 is required")
        shape = image_shape_of(X.shape, self.image_shape)
        if goes_on and shape != self.image_shape_:
            raise ValueError(f"X has images of shape {shape}, those of the calls before had {self.image_shape_}")
        weights = checked_weights(_in_order(sample_weight, "sample_weight", given), len(y))
        found, labels = encode_labels(y) if classes is None else (classes, places_among(classes, y))
        validation = held_out(len(y), self.validation_fraction)
        data = OwnData(as_images(X, shape), labels, class_names(found), weights, validation, nodata)
        return FitSamples(data, found, shape, getattr(checked, "feature_names_in_", None))

    def _trained(self, samples: FitSamples, one_epoch: bool) -> Result:
        client = None if self.client is None else checked_client(self.client)
        with OwnFolder() as folder, _told_as("the fit before (warm_start)", Path(folder) / _BEFORE):
            path = new_path(str(self.data_dir or folder))
            job = self._job(samples, path, Path(folder), one_epoch)  # before samples are written: it may be wrong
            with (
                _connected(client, job) as there,
                stored(samples.data, path, seed=job.train.seed, client=there, place="data_dir"),
            ):
                goes_on = one_epoch and hasattr(self, "model_")
                before = run_to_go_on_with(self.model_, self._momentum, job) if goes_on else None
                how: Any = {"on_event": self.on_event, "kept": self.run_dir is not None}
                result = train_job(job, client=there, resume=before, **how)
            self._momentum = Momentum.at_end_of(result.run, result.model.job) if one_epoch else None
            return result

    def _job(self, samples: FitSamples, path: str, folder: Path, one_epoch: bool) -> Job:
        """Return the job of a fit on the data set at this path. Raises JobError."""
        places = {"data": {"path": path}, "run": {"dir": str(self.run_dir or folder / "runs")}}
        given = merged(self._tables(samples.data), places)
        defaults, own = inspect.signature(type(self)).parameters, self.get_params(deep=False)
        chosen = {name for name in PARAMETERS.values() if own[name] != defaults[name].default}
        fixed = FIXED | {
            key: f"the estimator's {name} is given too; keep one" for key, name in PARAMETERS.items() if name in chosen
        }
        if one_epoch:
            once = "partial_fit trains one epoch by one rate"
            fixed |= {"train.epochs": f"{once}; remove it", "train.schedule": f"{once}; give lr"}
            given["train"] |= {"epochs": 1, "schedule": "constant"}
        if one_epoch and hasattr(self, "model_"):
            own_tables = tables_of(self.model_)
            given["model"], given["data"] = own_tables["model"], given["data"] | own_tables["data"]
        elif self.warm_start and hasattr(self, "model_"):
            given["model"]["from"] = str(self.model_.kept_in(folder / _BEFORE))
            fixed["model.from"] = "with warm_start this fit goes on from the weights of the one before; keep one"
        names = dict(zip(samples.classes.tolist(), samples.data.classes, strict=True))
        over = weights_by_name(dict(self.job or {}), names)
        how = {"client": self.client is not None, "kept": self.run_dir is not None}
        return fit_job(plain_numbers(given), plain_numbers(over), fixed, **how)

    def _tables(self, samples: OwnData) -> dict[str, dict[str, Any]]:
        """Return the tables that the estimator's parameters stand for."""
        train: dict[str, Any] = {"strategy": self.strategy, "epochs": self.epochs, "lr": self.lr}
        train |= {} if self.batch_size is None else {"batch_size": self.batch_size}
        train["optimizer"] = self.optimizer if isinstance(self.optimizer, str) else dict(self.optimizer)
        train["seed"] = seed_of(self.random_state)
        network = network_tables(self.model, len(samples.classes))
        return {"data": {"validation": samples.validation}, "model": network, "train": train}

    # --- predicting ---

    def predict_proba(self, X: Any) -> Any:
        """Return probabilities (N, classes), in the order of `classes_`; of a Dask array a lazy Dask array.

        A DataArray of xarray gives a DataArray with the coordinates of its samples.
        """
        check_is_fitted(self, "model_")
        return with_coordinates(X, self._probabilities(X), self.classes_)

    def _probabilities(self, given: Any) -> Any:
        model, own = self.model_, self.model_.classifier
        X = array_of(given, own.facts.nodata, decoded=True)
        if not is_dask_collection(X):
            X = checked_array(self, X, reset=False, nodata=own.facts.nodata)
        shape = image_shape_of(X.shape, self.image_shape_ if X.ndim == 2 else None)
        if shape != self.image_shape_:
            raise ValueError(f"X has images of shape {shape}, {type(self).__name__} was fitted on {self.image_shape_}")
        if own.facts.dtype != (dtype := stored_dtype(X.dtype)):  # another number type than that of the fit
            model = TrainedModel(Classifier(own.job, replace(own.facts, dtype=dtype), own.weights))
        return model.predict(as_images(X, shape))

    def predict(self, X: Any) -> Any:
        """Return the likeliest class of each sample, (N,); of a Dask array or a DataArray as `predict_proba`."""
        check_is_fitted(self, "model_")
        proba = self._probabilities(X)
        if is_dask_collection(proba):
            found = proba.map_blocks(_likeliest, self.classes_, drop_axis=1, dtype=self.classes_.dtype)
        else:
            found = _likeliest(proba, self.classes_)
        return with_coordinates(X, found, self.classes_)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy on samples; y and weights are taken in the order of X where all have coordinates."""
        return float(super().score(X, _in_order(y, "y", X), _in_order(sample_weight, "sample_weight", X)))

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
        """Return an unfitted estimator with the same client and on_event, and copies of the other parameters."""
        own = self.get_params(deep=False)
        same = {name: own.pop(name) for name in ("client", "on_event")}  # a copy of a method's object hears no event
        found = type(self)(**copy.deepcopy(own), **same)
        for name in ("_metadata_request", "_sklearn_output_config"):
            if hasattr(self, name):
                setattr(found, name, copy.deepcopy(getattr(self, name)))
        return found

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags: NaN is taken where something stands for no data."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.nodata is not None
        return tags

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the client: a pickled estimator predicts anywhere, and fits in its own process."""
        return {**super().__getstate__(), "client": None}


@contextmanager
def _told_as(words: str, folder: Path) -> Iterator[None]:
    """Have the problems of a job call a path in this folder, which will be gone, by these words."""
    try:
        yield
    except JobError as error:
        raise JobError([re.sub(rf"{re.escape(str(folder))}[^\s:]*", words, text) for text in error.problems]) from None


@contextmanager
def _connected(client: Client | None, job: Job) -> Iterator[Client]:
    """Give the client of a fit: the estimator's, one of the scheduler that the job names, or that of this process."""
    if client is not None:
        yield client
        return
    named = job.cluster.scheduler or job.cluster.scheduler_file
    with connect(job.cluster) if named else SHARED.client() as own:
        yield own


def _in_order(labels: Any, what: str, X: Any) -> Any:
    return None if labels is None else labels_of(labels, what, X)


def _likeliest(proba: npt.NDArray[Any], classes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if wrong := int(np.isnan(proba).any(axis=1).sum()):
        raise ValueError(f"Input X contains NaN or infinity in {wrong} of {len(proba)} samples: these have no class")
    return classes[proba.argmax(axis=1)]
