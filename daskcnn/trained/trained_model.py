"""The public face of a trained network: predictions of NumPy and Dask arrays, layers, weights by name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from dask.base import is_dask_collection, tokenize
from dask.delayed import delayed

from daskcnn.arrays import Array, compile_here
from daskcnn.cluster.link.sent import Sent, sent
from daskcnn.datasets.given_arrays import array_of, as_array, with_coordinates
from daskcnn.job.tables import CheckpointChoice, Job
from daskcnn.markup import as_table
from daskcnn.nn import Layer, leaves, summarise
from daskcnn.runs.checkpoint import save
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.state import TrainingState, to_checkpoint
from daskcnn.show.renderers.terminal import say
from daskcnn.store.masks import filled
from daskcnn.trained.place import find_network
from daskcnn.training.trained_network import Classifier


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained network. `daskcnn.load` gives one, and `daskcnn.train` as `result.model`.

    Examples
    --------
    >>> model = daskcnn.load(run)
    >>> model.predict(images).shape
    (2, 10)
    >>> model.weights["conv1"]["w"].shape
    (3, 3, 3, 4)
    """

    classifier: Classifier

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the probabilities."""
        return self.classifier.classes

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of an image."""
        return self.classifier.facts.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Number type of the images."""
        return self.classifier.facts.dtype

    @property
    def job(self) -> Job:
        """The job that it was trained by."""
        return self.classifier.job

    @property
    def layers(self) -> dict[str, Layer]:
        """The layers by name, in order."""
        return dict(self.classifier.model.layers)

    @property
    def vector(self) -> Array:
        """All weights as one flat vector: parameters, then running statistics."""
        return self.classifier.weights

    @cached_property
    def weights(self) -> Mapping[str, Mapping[str, Array]]:
        """Weights and running statistics by the names of layer and parameter, read-only.

        A layer inside another has a path for a name, such as "residual1/path/conv1", as a dry run and `model.freeze`
        have it.
        """
        found = dict[str, dict[str, Array]]()
        for tree in self.classifier.layout.views(self.vector):
            for path, array in leaves(tree):
                layer, _, name = path.rpartition("/")
                found.setdefault(layer, {})[name] = _read_only(array)
        return found

    def predict(self, images: Any) -> Any:
        """Return probabilities (N, classes); a network that reconstructs images gives images (N, H, W, C).

        Parameters
        ----------
        images : (N, H, W, C), of the shape and number type of the images that the network was trained on; (N, H, W) for
            one channel. Booleans stand for uint8, int8 for int16, float32 and float64 for each other. A Dask or Zarr
            array gives a Dask array of predictions, made chunk by chunk when it is computed. A DataArray of xarray
            gives a DataArray with the coordinates of its samples, lazy if it is. What is masked is no data.

        Raises
        ------
        daskcnn.errors.DataError : images of another shape or number type, or whose axes have names in another order.

        Warns
        -----
        UserWarning : images have NaN or infinities, and the network was trained without a value for no data. Their
            predictions are NaN.
        """
        found = array_of(images, self.classifier.facts.nodata, decoded=True)
        found = self._lazily(found) if is_dask_collection(found) else self._at_once(found)
        return with_coordinates(images, found, self.classes)

    def _at_once(self, images: Any) -> Array:
        compile_here(self.classifier.job.model.dtype, say)
        return _probabilities(as_array("images", images), self.classifier)

    def _lazily(self, images: Any) -> Any:
        self.classifier.check_images(images)
        images = images[..., None] if images.ndim == 3 else images
        whole = images.rechunk(dict.fromkeys((1, 2, 3), -1))
        dtype = self.classifier.predicted_dtype
        model = delayed(sent(self.classifier, self.job), name=f"classifier-{self.token}")
        axes: dict[str, Any] = {}
        if not self.classifier.reconstructs:
            axes = {"drop_axis": [1, 2, 3], "new_axis": [1], "chunks": (whole.chunks[0], (len(self.classes),))}
        meta = np.empty((0, 0) if axes else (0, 0, 0, 0), dtype)
        return whole.map_blocks(_probabilities, model, dtype=dtype, meta=meta, name=None, **axes)

    @cached_property
    def token(self) -> str:
        """A token for the names of Dask's tasks, equal for networks that predict the same."""
        facts, how = self.classifier.facts.to_dict(), (self.classifier.views, self.job.train.loss, self.job.train.exact)
        return str(tokenize(self.vector, facts, how, self.job.model_dump(mode="json")["model"]))

    def kept_in(self, folder: Path) -> Path:
        """Write the network into this folder as a run with one checkpoint. Return the run directory."""
        own = self.classifier
        state = TrainingState(0, 0.0, own.weights, {}, {})
        with RunDirectory.create(folder, None, strategy=self.job.train.strategy, now=datetime.now(UTC)) as run:
            run.write_job(self.job.model_dump(mode="json"))
            save(run.checkpoints, to_checkpoint(state, own.layout, own.facts, 0.0))
        return run.path

    def __repr__(self) -> str:
        H, W, C = self.shape
        count = f"{self.classifier.layout.size:,} weights"
        answers = "reconstructed" if self.classifier.reconstructs else f"{len(self.classes)} classes"
        return f"<TrainedModel: images {H}x{W}x{C}, {answers}, {count}>"

    def _repr_html_(self) -> str:
        rows = summarise(self.classifier.model, self.shape)
        cells = [(r.name, r.layer, "×".join(map(str, r.out_shape)), f"{r.parameters:,}") for r in rows]
        return as_table(repr(self).strip("<>"), cells, head=("layer", "", "output", "parameters"))


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


def _probabilities(images: Array, model: Classifier | Sent) -> Array:
    classifier: Classifier = model.value if isinstance(model, Sent) else model
    images = filled(classifier.taken(images), classifier.facts.nodata, option="nodata in training")
    found = classifier.predict(images)
    of_each = tuple(range(1, found.ndim))
    if images.dtype.kind == "f" and (unknown := int(np.isnan(found).any(axis=of_each).sum())):
        text = f"{unknown:,} of {len(found):,} images have NaN or infinities, and so have their predictions"
        warnings.warn(f"{text}; a network trained with nodata takes NaN", stacklevel=4)
    return found


def load(source: str | Path, *, checkpoint: CheckpointChoice | None = None) -> TrainedModel:
    """Load a trained network, in any process.

    Parameters
    ----------
    source : a run directory, one of its checkpoints or a file of one, or a model that `daskcnn export --to
        safetensors` wrote.
    checkpoint : which one of a run directory: "last", or "best" on its validation samples. None: the one that the run
        hands back, the best where its job has `train.early_stopping` or `train.restore_best`, else the last.

    Raises
    ------
    daskcnn.errors.DataError : there is no trained network, or it is damaged.

    Examples
    --------
    >>> import daskcnn
    >>> daskcnn.load(run)
    <TrainedModel: images 8x8x3, 10 classes, 298 weights>
    """
    return TrainedModel(find_network(source, checkpoint).classifier)
