"""From tables and flags to a job that says everything, its data set, and what it will do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from daskcnn.arrays import Device, Pool, cpu_count
from daskcnn.conv import ConvPlan, ConvSpec, plan
from daskcnn.errors import DataError, JobError
from daskcnn.job.network import convolutions, initial_weights, network_of, training_samples
from daskcnn.job.tables import Data, Job, Train, parse_job
from daskcnn.nn import Layout, describe, model_problem, sequential_from_spec
from daskcnn.nn.layers import BatchNorm
from daskcnn.partition import PARTITIONERS
from daskcnn.ps import RULES, UpdateRule
from daskcnn.ps.admm import ADMM
from daskcnn.ps.bsp import BSP
from daskcnn.runs.directory import RunDirectory
from daskcnn.sharded import samples_first, stages_of
from daskcnn.store import DATASETS, Dataset, open_dataset, prepare, verify

STRATEGIES = (*RULES, "layer")
Progress = Callable[[str, int, int], None]
Warn = Callable[[str], None]


def resolve(raw: Mapping[str, Any]) -> Job:
    """The job with every default filled in. Raises JobError with all problems found."""
    job = parse_job(
        raw,
        rules=RULES,
        choices={"train.strategy": STRATEGIES, "train.partition": PARTITIONERS, "data.name": DATASETS},
        further=_further_problems,
    )
    model = job.model if job.model.name or job.model.layers else job.model.model_copy(update={"name": "quick"})
    data, train = _resolved_data(job.data), _resolved_train(job)
    return job.model_copy(update={"data": data, "model": model, "train": train})


def kept_job(run: RunDirectory) -> Job:
    """The job of an earlier run. Raises DataError or JobError where its file is damaged or of another version."""
    try:
        job = resolve(run.job())
    except JobError as error:
        raise JobError([f"{run.path / 'job.json'}: {problem}" for problem in error.problems]) from error
    if Path(job.data.path or "").exists():  # the archive has done its work
        return job.model_copy(update={"data": job.data.model_copy(update={"archive": None})})
    return job


def _further_problems(job: Job) -> Iterator[str]:
    """What the registries know to be wrong before any data are looked at."""
    data, model = job.data, job.model
    if data.archive and data.name in DATASETS and not DATASETS[data.name].takes_archive:
        yield f"data.archive = {data.archive!r}: {data.name} is built in; remove it"
    if model.name is not None and (problem := model_problem(model.name)):
        yield f"model.name: {problem}"
    if model.layers is not None:
        try:
            sequential_from_spec(model.layers)
        except ValueError as error:
            yield f"model.{error}"
    if (rule := _rule(job)) is not None:
        yield from rule.problems(job.train.epochs)
        yield from _unfit_for(rule, job)


def _rule(job: Job) -> UpdateRule | None:
    """The job's update rule, where it has one and its parameters are right by themselves."""
    try:
        return RULES[job.train.strategy].model_validate(job.rule)
    except (KeyError, ValidationError):
        return None


def _unfit_for(rule: UpdateRule, job: Job) -> Iterator[str]:
    """What the rest of the job asks of the rule that it cannot do."""
    strategy, given, train = job.train.strategy, sum(job.cluster.workers.given.values()), job.train
    yield from _unfit_for_groups(rule, job)
    if 0 < given < rule.fewest:
        yield (
            f"cluster.workers = {given}: strategy {strategy!r} joins replicas, so it needs at least {rule.fewest}; "
            "raise cpu or gpu, or use another strategy such as sgwu"
        )
    if isinstance(rule, BSP) and rule.exchange != "allreduce" and job.cluster.ps_shards > 1:
        yield (
            f"cluster.ps_shards = {job.cluster.ps_shards}: rule.exchange = {rule.exchange!r} has no server to split; "
            "remove it, or use allreduce"
        )
    most = max(1, 2 * train.epochs // rule.passes(train.epochs) - 1)  # so that the last one's round is whole
    if most < (train.increments or 1) <= 2 * train.epochs - 1:
        yield (
            f"train.increments = {train.increments}: the rounds of {strategy!r} end before the last one is given; "
            f"use at most {most}, or more rounds"
        )


def _unfit_for_groups(rule: UpdateRule, job: Job) -> Iterator[str]:
    """What groups of workers cannot do."""
    strategy, given, size = job.train.strategy, sum(job.cluster.workers.given.values()), job.train.replica_size
    if size == 1:
        return
    if 0 < given < size:
        yield f"train.replica_size = {size}: more than the workers, cluster.workers = {given}; lower it, or raise cpu"
    elif rule.fewest <= given < size * rule.fewest:
        yield (
            f"train.replica_size = {size}: strategy {strategy!r} joins replicas, so it needs {rule.fewest} groups, and "
            f"{given} workers make {given // size}; lower it, or raise cpu"
        )
    if isinstance(rule, BSP) and rule.exchange != "allreduce":
        yield (
            f"rule.exchange = {rule.exchange!r}: groups of workers (train.replica_size = {size}) meet through the "
            "server; use allreduce, or a replica_size of 1"
        )
    if isinstance(rule, ADMM) and rule.rho > 0:
        yield (
            f"rule.rho = {rule.rho:g}: its term in every step is not built for groups of workers (train.replica_size = "
            f"{size}); use 0, another strategy, or a replica_size of 1"
        )


def _resolved_data(data: Data) -> Data:
    path = data.path or f"data/{data.name}.zarr"
    return data.model_copy(
        update={
            "path": path if "://" in path else str(Path(path).absolute()),
            "archive": data.archive and str(Path(data.archive).absolute()),
            "augment": data.augment or DATASETS[data.name].augment,
        }
    )


def _resolved_train(job: Job) -> Train:
    train, rule = job.train, _rule(job)
    update: dict[str, Any] = {"nesterov": train.nesterov and train.momentum > 0}  # nothing to look ahead with
    if rule is not None:
        partition = train.partition or "idpa"
        at_once = partition == "udpa" or rule.swaps  # increments would be rounds of their own
        usual = 1 if at_once else min(4, 2 * train.epochs - 1)
        update |= {"partition": partition, "increments": train.increments or usual}
    return train.model_copy(update=update)


@dataclass(frozen=True)
class Prepared:
    """A job whose data set is there, checked, and fits the network."""

    job: Job
    dataset: Dataset
    layout: Layout

    @property
    def samples(self) -> int:
        """Samples that are trained on."""
        return training_samples(self.job, self.dataset)


def prepare_job(job: Job, *, progress: Progress, warn: Warn) -> Prepared:
    """Make the data set if it is not there yet, check all of it, and that the network fits.

    Raises DataError or JobError naming what is wrong.
    """
    return checked_job(job, find_dataset(job, progress=progress, warn=warn), progress=progress)


def checked_job(
    job: Job, dataset: Dataset, *, progress: Progress, between: Callable[[], None] = lambda: None
) -> Prepared:
    """Check all of the data set, calling `between` between its chunks, and that the network fits."""
    progress("check", 0, 0)
    verify(dataset, between)
    return fitted(job, dataset)


def find_dataset(job: Job, *, progress: Progress, warn: Warn) -> Dataset:
    """The job's data set, made if it is not there yet. Raises DataError where it is another one, or cannot be made."""
    data = job.data
    assert data.path is not None, "resolved"
    missing = "://" not in data.path and not Path(data.path).exists()
    if missing and not _may_be_made(data):
        raise DataError(
            data.path,
            "no data set here",
            f"correct data.path (--data), or make it there with `daskcnn data prepare {data.name} --out {data.path}`",
        )
    if data.archive or missing:
        prepare(data.name, archive=data.archive, out=data.path, order=data.order, progress=progress, warn=warn)
    dataset = open_dataset(data.path, limit=data.limit)
    if dataset.name != data.name:
        raise DataError(
            reason=f"{data.path} holds {dataset.name}, the job wants {data.name}", remedy="set data.name or data.path"
        )
    if dataset.order != data.order:
        raise DataError(
            reason=f"{data.path} is stored in order {dataset.order!r}, the job wants {data.order!r}",
            remedy=f"set data.order, or prepare it anew with --order {data.order} --out another path",
        )
    return dataset


def _may_be_made(data: Data) -> bool:
    """Whether a job may make its missing data set: not at a path that may be a slip of the pen, by a download."""
    made_without_download = data.archive or not DATASETS[data.name].takes_archive
    return bool(made_without_download) or data.path == _resolved_data(Data(name=data.name)).path


def fitted(job: Job, dataset: Dataset) -> Prepared:
    """Check the job's numbers and network against the data set. Raises JobError with all problems."""
    problems = []
    samples = training_samples(job, dataset)
    if samples < 1:
        problems.append(
            f"data.validation = {job.data.validation}: leaves nothing of {len(dataset.train)} training samples; "
            "lower it"
        )
    elif (job.train.increments or 1) > samples:
        problems.append(f"train.increments = {job.train.increments}: more than {samples} training samples; lower it")
    try:
        layout, weights = initial_weights(job, dataset)
        if (most := weights.size) < job.cluster.ps_shards:
            problems.append(f"cluster.ps_shards = {job.cluster.ps_shards}: the network has {most} numbers; lower it")
        problems += _uncuttable(job, dataset)
        _check_workspace(job, dataset)
    except ValueError as error:
        problems.append(f"model: {error}")
    except MemoryError as error:
        problems.append(f"model: {error}, more than this machine has; choose a smaller network")
    if problems:
        raise JobError(problems)
    return Prepared(job, dataset, layout)


def _uncuttable(job: Job, dataset: Dataset) -> Iterator[str]:
    """Layers that look at a whole minibatch, where it is cut."""
    layers = network_of(job, dataset).layers if job.train.sub_batches > 1 else ()
    if names := [name for name, layer in layers if isinstance(layer, BatchNorm)]:
        yield (
            f"train.sub_batches = {job.train.sub_batches}: {', '.join(names)} takes the mean of a whole minibatch; "
            "use 1, or a network without batch normalising"
        )
    if job.train.first_conv == "samples":
        try:
            samples_first(stages_of(network_of(job, dataset)))
        except ValueError as reason:
            yield f"train.first_conv = 'samples': {reason}; use 'kernels'"


def _check_workspace(job: Job, dataset: Dataset) -> None:
    """Plan every convolution, so that one that cannot fit is refused here. Raises ValueError."""
    for name, spec in conv_specs(job, dataset):
        try:
            plan(spec, _device(job))
        except ValueError as error:
            raise ValueError(f"layer {name}: {error} (train.workspace_mib, train.batch_size)") from error


def _device(job: Job) -> Device:
    """This machine's processor, to plan with as a worker does."""
    return Device(pool=Pool(job.train.threads or 1), workspace_limit=job.train.workspace_mib << 20)


def conv_specs(job: Job, dataset: Dataset) -> list[tuple[str, ConvSpec]]:
    """Every convolution of the network by name, as the problem it is at the job's batch size."""
    return convolutions(network_of(job, dataset), dataset.shape, job.train.batch_size, job.model.dtype)


def readable_plan(prepared: Prepared) -> str:
    """What the job will do, for people: data, network, convolutions, rounds or shards, memory. Nothing is started."""
    job, dataset = prepared.job, prepared.dataset
    lines = [
        f"data      {dataset.name} at {dataset.path}: {prepared.samples:,} to train on, {job.data.validation:,} for "
        f"validation, {len(dataset.test):,} to test; augment {job.data.augment}",
        f"workers   {_workers(job)}",
        f"strategy  {_strategy(prepared)}",
        f"memory    {_megabytes(prepared)} on each worker for weights, momentum, gradients and samples",
        "",
        describe(network_of(job, dataset), dataset.shape),
        "",
        *(f"{name}: {planned.explain()}" for name, planned in _plans(job, dataset)),
    ]
    return "\n".join(lines)


def _plans(job: Job, dataset: Dataset) -> list[tuple[str, ConvPlan]]:
    """What this machine would choose; the first layer's input needs no gradient."""
    specs, device = conv_specs(job, dataset), _device(job)
    return [(name, plan(spec, device, need_dx=i > 0)) for i, (name, spec) in enumerate(specs)]


def _workers(job: Job) -> str:
    cluster, given = job.cluster, job.cluster.workers.given
    counts = ", ".join(f"{n} {kind}" for kind, n in given.items())
    if where := cluster.scheduler or cluster.scheduler_file:
        return f"{counts or 'all there are'}, of the scheduler {where}"
    return f"{counts or f'{cpu_count()} cpu'}, and 1 for the parameter server, as processes on this machine"


def _strategy(prepared: Prepared) -> str:
    train = prepared.job.train
    batches = -(-prepared.samples // train.batch_size)
    if train.strategy == "layer":
        return f"layer: kernels of every convolution sharded by measured speed, {batches * train.epochs:,} steps"
    groups = f", groups of {train.replica_size} workers that shard kernels" if train.replica_size > 1 else ""
    return (
        f"{train.strategy} with {train.partition}{groups}: samples given out by measured speed, "
        f"{train.increments} increments, {prepared.samples * train.epochs:,} presentations"
    )


def _megabytes(prepared: Prepared) -> str:
    dataset, layout = prepared.dataset, prepared.layout
    H, W, C = dataset.shape
    return f"about {(6 * layout.nbytes + len(dataset.train) * H * W * C) / 2**20:,.0f} MiB"
