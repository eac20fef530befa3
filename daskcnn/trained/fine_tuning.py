"""Runs that start from trained weights: `[model] from`.

The driver reads the weights once, before anything starts. They become the state that the run goes on from, as those of
a checkpoint do when a run is resumed, so every strategy hands them out in the same way. The run keeps them as its first
checkpoint, of step 0: resuming it does not read the other run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.arrays import Array
from daskcnn.errors import DataError, JobError
from daskcnn.export.model_file import read_model
from daskcnn.job.network import initial_weights, network_of, reconstructs, whitened
from daskcnn.job.tables import Job, Model
from daskcnn.nn import build_model, leaves, walk
from daskcnn.runs.checkpoint import Arrays, load
from daskcnn.runs.directory import RunDirectory, kept_job
from daskcnn.runs.state import check_of, facts_of
from daskcnn.store import Dataset, Described
from daskcnn.store.image_facts import Facts
from daskcnn.trained.trained_run import load_trained

_GIVE = (
    "give the folder of a run, one of its checkpoints (RUN/checkpoints/step-…), "
    "or a file of `daskcnn export --to safetensors`"
)


@dataclass(frozen=True)
class Pretrained:
    """A trained network: where its weights are from, its description, the images it saw, its arrays by name.

    reconstructs: whether it answers images with images.
    """

    source: str
    model: Model
    images: Facts
    arrays: Arrays
    reconstructs: bool = False


@dataclass(frozen=True)
class Start:
    """The weights that a run starts from: a flat host vector (parameters, then state).

    loaded : layers that have trained weights.
    new : layers that have initial weights, with the reason.
    """

    source: str
    weights: Array
    loaded: tuple[str, ...]
    new: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        new = "".join(f"; {name} is new: {reason}" for name, reason in self.new.items())
        return f"{', '.join(self.loaded)} from {self.source}{new}"


def read_trained(place: str) -> Pretrained:
    """The best checkpoint of a run, this checkpoint of it, or an exported model.

    Raises DataError or JobError where there is none.
    """
    path = Path(place)
    if path.is_file() and path.name in ("arrays.safetensors", "state.json"):
        path = path.parent
    if path.is_file() and path.suffix == ".safetensors":
        return _exported(path)
    if (path / "job.json").is_file():
        job, checkpoint = load_trained(str(path), "best", _silent)
    elif (path / "state.json").is_file() and (path.parent.parent / "job.json").is_file():
        job = kept_job(RunDirectory.open(path.parent.parent))
        checkpoint = load(path, check=check_of(job))
    else:
        raise DataError(path, "no trained network there (model.from)", _GIVE)
    return Pretrained(str(checkpoint.path), job.model, facts_of(checkpoint), checkpoint.arrays, reconstructs(job))


def _exported(path: Path) -> Pretrained:
    found = read_model(path)
    arrays = {name: view for tree in found.layout.views(found.weights) for name, view in leaves(tree)}
    return Pretrained(str(path), found.job.model, found.facts, arrays, found.reconstructs)


def _silent(_: str) -> None:
    return None


def names_network(job: Job) -> bool:
    """Whether the job says which network it trains. One that starts from trained weights need not."""
    return job.model.name is not None or job.model.layers is not None


def with_network(job: Job, trained: Pretrained, images: Described) -> Job:
    """The job with the trained network where it names none. Its last layer gets as many outputs as there are classes.

    Raises JobError where no layer can be given them.
    """
    if names_network(job):
        return job
    if trained.reconstructs != reconstructs(job):
        answers = "images" if trained.reconstructs else "classes"
        raise JobError([f"model.from: {trained.source} answers with {answers}, train.loss with others; give model"])
    given = trained.model
    update: dict[str, Any] = {"name": given.name, "relu": given.relu, "layers": given.layers}
    if given.layers is not None and not trained.reconstructs and len(trained.images.classes) != len(images.classes):
        update["layers"] = _with_outputs(given.layers, trained, len(images.classes))
    return job.model_copy(update={"model": job.model.model_copy(update=update)})


def _with_outputs(layers: list[dict[str, Any]], trained: Pretrained, classes: int) -> list[dict[str, Any]]:
    """The list of layers whose last one with weights has this number of outputs."""
    network = build_model(None, layers, trained.images.shape, len(trained.images.classes))
    weighted = [i for i, (_, each, shape) in enumerate(network.children(trained.images.shape)) if each.numbers(shape)]
    key = next((key for key in ("units", "kernels") if weighted and key in layers[weighted[-1]]), None)
    if key is None:
        raise JobError([f"model.from: {trained.source} ends in no layer whose outputs can be {classes}; give model"])
    changed = list(layers)
    changed[weighted[-1]] = {**layers[weighted[-1]], key: classes}
    return changed


def start_of(job: Job, trained: Pretrained, images: Described) -> Start:
    """The trained weights in the job's network, layer by layer of the same name; initial ones where there are none.

    The last layer with weights starts anew where the classes differ, or one of the two reconstructs images. Raises
    JobError naming each layer whose shapes differ, and where no layer is left; DataError for weights that are not
    finite.
    """
    layout, weights = initial_weights(job, images)
    ours: dict[str, dict[str, Array]] = {}
    for tree in layout.views(weights):
        for name, view in leaves(tree):
            ours.setdefault(name.rpartition("/")[0], {})[name] = view
    paths = [path for path, _, _ in walk(network_of(job, images), images.shape) if path in ours]
    new, problems = dict[str, str](), list[str]()
    differs = _difference(trained, images, of_images=reconstructs(job))
    for layer, views in ours.items():
        if layer == paths[-1] and differs:
            new[layer] = differs
        elif not any(name in trained.arrays for name in views):
            new[layer] = "there is none of this name"
        elif misfits := list(_misfits(views, trained.arrays)):
            problems.append(_refusal(layer, misfits, trained, images))
        else:
            _copy(views, trained)
    if problems:
        raise JobError(problems)
    loaded = tuple(path for path in paths if path not in new)
    if not loaded:
        raise JobError([f"model.from: no layer of {trained.source} has the name of a layer of the job's network"])
    return Start(trained.source, weights, loaded, new)


def first_weights(job: Job, dataset: Dataset, start: Start | None) -> Array | None:
    """The weights that a run starts from, a flat host vector; None for the initial ones that every process can make.

    A first convolution that whitens is made of the images, unless it has trained weights.
    """
    if start is None:
        return whitened(job, dataset)
    made = whitened(job, dataset, start.weights) if network_of(job, dataset).layers[0][0] in start.new else None
    return start.weights if made is None else made


def _difference(trained: Pretrained, own: Described, *, of_images: bool) -> str:
    """Why outputs for one of them mean nothing for the other; empty where they do. of_images: what ours are."""
    theirs = trained.images
    if of_images or trained.reconstructs:
        return "" if of_images == trained.reconstructs else "one of the two reconstructs images"
    if len(theirs.classes) != len(own.classes):
        return f"{len(own.classes)} classes instead of {len(theirs.classes)}"
    if theirs.labels != own.labels:
        return "its labels are of another kind, one class or several labels a sample"
    return "" if theirs.classes == own.classes else "the classes have other names"


def _misfits(views: dict[str, Array], arrays: Arrays) -> Iterator[str]:
    for name, view in views.items():
        found = arrays.get(name)
        if found is None:
            yield f"{name} is missing"
        elif found.shape != view.shape:
            yield f"{name} is {found.shape}, the job's network wants {view.shape}"


def _refusal(layer: str, misfits: list[str], trained: Pretrained, images: Described) -> str:
    seen, here = ("x".join(map(str, each.shape)) for each in (trained.images, images))
    saw = f" (it was trained on images of {seen}, these are {here})" if seen != here else ""
    remedy = "give images and layers of its shapes, or name another network with other layers"
    return f"model.from: layer {layer} of {trained.source} does not fit: {'; '.join(misfits)}{saw}; {remedy}"


@np.errstate(over="ignore")
def _copy(views: dict[str, Array], trained: Pretrained) -> None:
    for name, view in views.items():
        view[...] = trained.arrays[name]
        if not np.isfinite(view).all():
            raise DataError(trained.source, f"{name} holds NaN or infinity", "take another checkpoint of the run")
