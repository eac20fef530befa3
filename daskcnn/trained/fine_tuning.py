"""Runs that start from trained weights: `[model] from`.

The driver reads the weights once, before anything starts. They become the state that the run goes on from, as those of
a checkpoint do when a run is resumed, so every strategy hands them out in the same way. The run keeps them as its first
checkpoint, of step 0: resuming it does not read the other run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.arrays import Array
from daskcnn.errors import DataError, JobError
from daskcnn.job.network import initial_weights, network_of, reconstructs, whitened
from daskcnn.job.prepared import Start
from daskcnn.job.tables import Job
from daskcnn.nn import Layout, Sequential, Shape, leaves, walk
from daskcnn.nn.layers import Auxiliary
from daskcnn.nn.spec import Spec
from daskcnn.store import Dataset, Described
from daskcnn.trained.place import FoundNetwork, find_network
from daskcnn.training.trained_network import Classifier


def names_network(job: Job) -> bool:
    """Return True if the job names its network. One that starts from trained weights need not."""
    return job.model.name is not None or job.model.layers is not None


def network_to_start_from(job: Job) -> FoundNetwork | None:
    """Find the trained network that the job starts from, if it names one. Raises as `find_network`."""
    return None if job.model.from_ is None else find_network(job.model.from_, job.model.from_checkpoint)


def with_network(job: Job, trained: FoundNetwork, images: Described) -> Job:
    """Return the job with the trained network where it names none, with an output for each class.

    Raises JobError where a last layer's outputs cannot be changed.
    """
    if names_network(job):
        return job
    network = trained.classifier
    if network.reconstructs != reconstructs(job):
        answers = "images" if network.reconstructs else "classes"
        raise JobError([f"model.from: {trained.source} answers with {answers}, train.loss with others; give model"])
    given = network.job.model
    update: dict[str, Any] = {"name": given.name, "relu": given.relu, "layers": given.layers}
    if given.layers is not None and not network.reconstructs and len(network.classes) != len(images.classes):
        layers = _with_outputs(given.layers, network.model, network.facts.shape, len(images.classes))
        if layers is None:
            reason = f"{trained.source} ends in no layer whose outputs can be {len(images.classes)}; give model"
            raise JobError([f"model.from: {reason}"])
        update["layers"] = layers
    return job.model_copy(update={"model": job.model.model_copy(update=update)})


def _with_outputs(layers: Spec, network: Sequential, in_shape: Shape, classes: int) -> Spec | None:
    """Return the network's layers with as many outputs, of second heads too; None where they cannot have them."""
    changed, last = [*layers], -1
    for i, (_, each, shape) in enumerate(network.children(in_shape)):
        if isinstance(each, Auxiliary):
            if (path := _with_outputs(layers[i]["path"], each.path, shape, classes)) is None:
                return None
            changed[i] = {**layers[i], "path": path}
        elif each.numbers(shape):
            last = i
    key = next((key for key in ("units", "kernels") if last >= 0 and key in layers[last]), None)
    if key is None:
        return None
    changed[last] = {**layers[last], key: classes}
    return changed


def _ends(network: Sequential, in_shape: Shape, paths: Iterable[str]) -> set[str]:
    """Return those of the layers with weights that make scores: the network's last one, and each second head's."""
    heads = [f"{path}/" for path, layer, _ in walk(network, in_shape, composite=True) if isinstance(layer, Auxiliary)]
    last = {max((head for head in heads if path.startswith(head)), key=len, default=""): path for path in paths}
    return {*last.values()}


def start_of(job: Job, trained: FoundNetwork, images: Described) -> Start:
    """Return the weights of the job's network: trained ones for layers of the same name, initial ones for others.

    The last layer with weights, and that of each second head, starts anew where the classes differ, or one of the two
    networks reconstructs images.

    Raises
    ------
    JobError : naming each layer whose shapes differ, and where no layer is left.
    DataError : weights that are not finite.
    """
    layout, weights = initial_weights(job, images)
    ours: dict[str, dict[str, Array]] = {}
    for name, view in _by_name(layout, weights).items():
        ours.setdefault(name.rpartition("/")[0], {})[name] = view
    theirs = _by_name(trained.classifier.layout, trained.classifier.weights)
    network = network_of(job, images)
    paths = [path for path, _, _ in walk(network, images.shape) if path in ours]
    ends = _ends(network, images.shape, paths)
    new, problems = dict[str, str](), list[str]()
    differs = _difference(trained.classifier, images, of_images=reconstructs(job))
    for layer, views in ours.items():
        if differs and layer in ends:
            new[layer] = differs
        elif not any(name in theirs for name in views):
            new[layer] = "there is none of this name"
        elif misfits := list(_misfits(views, theirs)):
            problems.append(_refusal(layer, misfits, trained, images))
        else:
            _copy(views, theirs, trained.source)
    if problems:
        raise JobError(problems)
    loaded = tuple(path for path in paths if path not in new)
    if not loaded and differs and len(ours) == 1:
        remedy = "its one layer with weights starts anew then, so leave it out"
        raise JobError([f"model.from: {trained.source}: {differs}; {remedy}"])
    if not loaded:
        raise JobError([f"model.from: no layer of {trained.source} has the name of a layer of the job's network"])
    return Start(trained.weights, weights, loaded, new)


def _by_name(layout: Layout, weights: Array) -> dict[str, Array]:
    """Return views of parameters and state by name, such as "conv1/w"."""
    return {name: view for tree in layout.views(weights) for name, view in leaves(tree)}


def first_weights(job: Job, dataset: Dataset, start: Start | None) -> Array | None:
    """Return the flat host vector that a run starts from; None for initial weights, which every process can make.

    A first convolution that whitens is made of the images, unless it has trained weights.
    """
    if start is None:
        return whitened(job, dataset)
    made = whitened(job, dataset, start.weights) if network_of(job, dataset).layers[0][0] in start.new else None
    return start.weights if made is None else made


def _difference(theirs: Classifier, own: Described, *, of_images: bool) -> str:
    """Return the reason why the trained outputs do not fit the job's, empty where they do.

    of_images : whether the job's network reconstructs images.
    """
    if of_images or theirs.reconstructs:
        return "" if of_images == theirs.reconstructs else "one of the two reconstructs images"
    if len(theirs.classes) != len(own.classes):
        return f"{len(own.classes)} classes instead of {len(theirs.classes)}"
    if theirs.facts.labels != own.labels:
        return "its labels are of another kind, one class or several labels a sample"
    return "" if theirs.classes == own.classes else "the classes have other names"


def _misfits(views: dict[str, Array], arrays: dict[str, Array]) -> Iterator[str]:
    for name, view in views.items():
        found = arrays.get(name)
        if found is None:
            yield f"{name} is missing"
        elif found.shape != view.shape:
            yield f"{name} is {found.shape}, the job's network wants {view.shape}"


def _refusal(layer: str, misfits: list[str], trained: FoundNetwork, images: Described) -> str:
    seen, here = ("x".join(map(str, each.shape)) for each in (trained.classifier.facts, images))
    saw = f" (it was trained on images of {seen}, these are {here})" if seen != here else ""
    remedy = "give images and layers of its shapes, or name another network with other layers"
    return f"model.from: layer {layer} of {trained.source} does not fit: {'; '.join(misfits)}{saw}; {remedy}"


@np.errstate(over="ignore")
def _copy(views: dict[str, Array], arrays: dict[str, Array], source: Path) -> None:
    for name, view in views.items():
        view[...] = arrays[name]
        if not np.isfinite(view).all():
            raise DataError(source, f"{name} holds NaN or infinity", "take another checkpoint of the run")
