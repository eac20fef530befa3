"""Jobs in simulated time: `daskcnn simulate`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.arrays import Device, cpu_count, single_threaded_blas
from daskcnn.conv import ConvSpec
from daskcnn.datasets.job_dataset import find_dataset, is_missing, no_data_set
from daskcnn.errors import ClusterError, DataError, JobError, Lost
from daskcnn.events import CalibratedWorker, Event, RunStarted
from daskcnn.job.dataset import on_data, opened
from daskcnn.job.network import convolutions, layout_of, network_of
from daskcnn.job.resolve import apply_settings, changed, read_job_file, resolve, turned
from daskcnn.job.tables import LAYER, Job
from daskcnn.ps.downpour import Downpour
from daskcnn.ps.wire import numbers_of
from daskcnn.runs.directory import RunDirectory, kept_job, near
from daskcnn.runs.log import read_events
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.stages import Stage
from daskcnn.show.report_tables import RunReport, tables
from daskcnn.sim.cluster import ClusterFileError, SimulatedCluster, Worker, read_cluster, to_toml
from daskcnn.sim.learners import Learner, TimingOnly, Training
from daskcnn.sim.measured import measured_cluster, sharded_cluster, step_seconds
from daskcnn.sim.papers_costs import Constants, Sharding, sharded_events
from daskcnn.sim.sharded_run import ShardedSimulation
from daskcnn.sim.sharded_step import Direct
from daskcnn.sim.simulation import Simulation
from daskcnn.sim.workload import Workload
from daskcnn.store import DATASETS, Dataset, Described
from daskcnn.store.image_facts import Facts
from daskcnn.trained.fine_tuning import names_network, network_to_start_from, start_of, with_network
from daskcnn.training.replica import Replica
from daskcnn.training.sharded_prices import ShardedPrices

_ANOTHER = "choose another folder with --keep"
_WITH_DEFAULTS = ("strategy", "partition", "epochs", "lr", "momentum")
"""Keys of `[train]` on which defaults of others depend."""


@dataclass(frozen=True)
class Scenario:
    """A job and a simulated cluster. source: of the cluster; samples: trained on; numbers: in the network's vector."""

    job: Job
    cluster: SimulatedCluster
    source: str
    images: Described
    samples: int
    numbers: int

    @property
    def sharded(self) -> bool:
        """True for strategy `layer`."""
        return self.job.train.strategy == LAYER

    @property
    def workload(self) -> Workload:
        """Its workload, if it is data-parallel."""
        return Workload.of_job(self.job, samples=self.samples, numbers=self.numbers)

    @property
    def formulas(self) -> Constants | Sharding:
        """The papers' formulas for it: the constants of a data-parallel job, or the step of sharded kernels."""
        return self.sharding(self.cluster) if self.sharded else constants_of(self)

    @property
    def about(self) -> dict[str, Any]:
        """Data set and model for the first event."""
        data, model = self.job.data, self.job.model
        return {"dataset": data.name, "model": model.name or f"{len(model.layers or ())} layers"}

    def sharding(self, cluster: SimulatedCluster) -> Direct:
        """The job's kernels over this cluster, as this package shards them."""
        job = self.job
        network = network_of(job, self.images)
        # float64 travels as it is unless a narrower wire is asked for
        dtypes = [job.model.dtype, *([job.cluster.maps] if job.cluster.maps != "float32" else [])]
        return Direct(
            **self._convolutions(cluster, stages_of(network)),
            itemsize=min(np.dtype(each).itemsize for each in dtypes),
            model=network,
            shape=self.images.shape,
            sub_batches=job.train.sub_batches,
            per_task=cluster.costs.task,
            first_conv=job.train.first_conv,
            kernel_shares=job.train.kernel_shares,
        )

    def sharded_prices(self) -> ShardedPrices | None:
        """Return the prices of the job's sharded steps; None if its kernels cannot be sharded.

        Where the cluster has no seconds for a task, those of other clusters are taken.
        """
        costs, prices = self.cluster.costs, ShardedPrices.of(self.job, self.images)
        if prices is None or not costs.task:
            return prices and replace(prices, dispatch=costs.dispatch)
        return replace(prices, task=costs.task, handover=0.0, dispatch=costs.dispatch, measured=True)

    def staged_rows(self) -> dict[str, CalibratedWorker]:
        """Return the workers' calibrations, with their seconds a sample of each stage."""
        sharding, rows = self.sharding(self.cluster), dict[str, CalibratedWorker]()
        for own in sharding.workers:
            named = zip(sharding.names, sharding.conv_seconds(own), strict=True)
            known = bool(own.conv_seconds) and own.rest_seconds is None  # of convolutions, without what is spread
            rows[own.name] = CalibratedWorker(
                name=own.name,
                step_fixed=own.step_fixed,
                conv_seconds={name: seconds / sharding.batch for name, seconds in named},
                conv_fixed=(own.conv_seconds and own.conv_fixed) or {},
                rest_seconds=None if known else sharding.rest_seconds(own) / sharding.batch,
            )
        return rows

    def group_step(self, members: Sequence[Worker]) -> float:
        """Return the seconds of a step of these workers as a group, whose home is the first."""
        group = self.sharding(self.cluster.model_copy(update={"worker": list(members)}))
        return replace(group, at=members[0].name).step().seconds

    def star(self, cluster: SimulatedCluster) -> Sharding:
        """The job's kernels as the papers shard them: home takes part in every layer."""
        return Sharding(**self._convolutions(cluster))

    def _convolutions(self, cluster: SimulatedCluster, stages: Sequence[Stage] | None = None) -> dict[str, Any]:
        """The fields of `Sharding`. stages: of the sharded network; other convolutions are part of home's rest."""
        named = conv_layers(self.job, self.images)
        if stages is not None:
            staged = {stage.name for stage in stages}
            named = [(name, spec) for name, spec in named if name in staged]
        names, specs = zip(*named, strict=True) if named else ((), ())
        workers = tuple(cluster.members())
        if not all(w.conv_seconds and w.conv_seconds.keys() >= set(names) for w in workers):
            workers = tuple(w.model_copy(update={"conv_seconds": None}) for w in workers)
        return {
            "specs": specs,
            "names": names,
            "workers": workers,
            "bandwidth": cluster.server.bandwidth or np.inf,
            "overhead": cluster.costs.dispatch,
        }


@dataclass(frozen=True)
class Simulated:
    """The events of a simulated run, and the report on them."""

    scenario: Scenario
    events: list[Event]
    report: RunReport


def scenario(job: str, cluster: str | None, settings: Sequence[str]) -> Scenario:
    """Return the scenario of a job file or a run, on a cluster file or on the cluster that a run has measured.

    cluster: None for the run's own. settings: keys of the job, "section.key=value". Raises UserError.
    """
    path = Path(job)
    what = f"a job file or a run{near(path)}"
    raw = _of_run(path, settings) if path.is_dir() else read_job_file(path, what=what)
    apply_settings(raw, settings)
    if cluster is None and not path.is_dir():
        raise JobError([f"{job}: a job file says nothing of the cluster; give --cluster with a cluster file or a run"])
    resolved = resolve(raw)
    if (size := resolved.train.replica_size) > 1 and cluster is None:
        reason = "a run's log says nothing of its workers one by one"
        raise JobError([f"train.replica_size = {size}: {reason}; give --cluster with a cluster file"])
    source = cluster or job
    return scenario_of(resolved, _cluster(source), source)


def _of_run(path: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Return the job's tables of a run, without the defaults that do not go with these settings."""
    given = dict[str, Any]()
    apply_settings(given, settings)
    train = {key: value for key, value in given.get("train", {}).items() if key in _WITH_DEFAULTS}
    return changed(kept_job(RunDirectory.open(path)), **train)


def scenario_of(job: Job, cluster: SimulatedCluster, source: str) -> Scenario:
    """Return the scenario of a resolved job. Raises UserError."""
    job, images, train = on_own_images(job)
    samples = train - job.data.validation
    if samples < max(1, job.train.increments or 1):
        validation = f"data.validation = {job.data.validation}"
        raise JobError([f"{validation}: leaves {samples} of {train} training samples; lower it"])
    try:
        return Scenario(job, cluster, source, images, samples, layout_of(job, images).size)
    except ValueError as error:
        raise JobError([f"model: {error}"]) from error


def on_own_images(job: Job) -> tuple[Job, Described, int]:
    """Return the job with its network and every default, its images, and how many are for training. Raises UserError.

    A data set of a known name need not exist here.
    """
    images, train, name = _images(job)
    job = on_data(job, name, images.shape, len(images.classes), train)
    if not names_network(job) and (trained := network_to_start_from(job)) is not None:
        job = with_network(job, trained, images)
    return job, images, train


def _images(job: Job) -> tuple[Described, int, str]:
    """The job's images, the number of training samples, the name."""
    if not is_missing(job.data):
        dataset = opened(job.data)
        return dataset, len(dataset.train), dataset.name
    if job.data.name is None or job.data.name not in DATASETS:
        raise no_data_set(job.data)
    known = DATASETS[job.data.name]
    plain = np.zeros(known.shape[-1]), np.ones(known.shape[-1])
    images = Facts(tuple(map(str, range(known.classes))), known.shape, *plain)
    return images, min(known.training_samples, job.data.limit or known.training_samples), job.data.name


def _cluster(source: str) -> SimulatedCluster:
    path = Path(source)
    if not path.is_dir():
        return read_cluster(path)
    run = RunDirectory.open(path)
    events, job = read_events(path / "events.jsonl"), resolve(run.job())
    if job.train.strategy == LAYER:
        cluster, measured = sharded_cluster(events), step_seconds(events)
        chosen = scenario_of(job, cluster, source)
        # links and tasks account for the time of a measured step beyond its convolutions and its rest
        beyond = 0.0 if measured is None else max(0.0, measured - chosen.sharding(cluster).step().seconds)
        return cluster.model_copy(update={"costs": cluster.costs.model_copy(update={"dispatch": beyond})})
    start = next((event for event in events if isinstance(event, RunStarted)), RunStarted())
    # the log has the vector's length, so that the network need not be made
    numbers = numbers_of(job.cluster.wire, start.vector_bytes or 0) or start.parameters or 1
    return measured_cluster(events, Workload.of_job(job, samples=start.samples or 1, numbers=numbers))


def conv_layers(job: Job, images: Described) -> list[tuple[str, ConvSpec]]:
    """Every convolution of the job's network by name, at its batch size. Raises JobError if there is none."""
    found = convolutions(network_of(job, images), images.shape, job.train.batch_size, job.model.dtype)
    if not found:
        raise JobError(["train.strategy = 'layer': the network has no convolution to shard; choose another strategy"])
    return found


def simulate(chosen: Scenario, *, seed: int = 0, train: bool = False) -> Simulated:
    """Run it in simulated time. train: with the real arithmetic too, on the job's data, in this process."""
    events: list[Event] = []
    if chosen.sharded:
        if train:
            raise JobError(["--train: strategy 'layer' computes the same numbers on any cluster; train it without"])
        job = chosen.job
        about = {**chosen.about, "parameters": chosen.numbers, "validation_samples": job.data.validation}
        if chosen.cluster.changes or chosen.cluster.varies:
            _run_sharded(chosen, seed, about, events)
        else:
            events = sharded_events(chosen.sharding(chosen.cluster), chosen.samples, job.train.epochs, about)
    else:
        with single_threaded_blas():
            _run(chosen, seed, train, events)
    return Simulated(chosen, events, tables(events))


def _run_sharded(chosen: Scenario, seed: int, about: dict[str, Any], events: list[Event]) -> None:
    """Run a job of strategy `layer` on a cluster that changes during the run. Raises JobError where none is left."""
    nbytes = chosen.numbers * np.dtype(chosen.job.model.dtype).itemsize
    of_job = chosen.job, chosen.samples, nbytes
    sharding = chosen.sharding(chosen.cluster)
    try:
        ShardedSimulation(sharding, chosen.cluster, *of_job, seed=seed, emit=events.append, about=about).run()
    except (ClusterError, Lost) as error:
        raise JobError([str(error)]) from error


def _run(chosen: Scenario, seed: int, train: bool, events: list[Event]) -> None:
    """Run a data-parallel job. Raises JobError for a cluster that it cannot run on."""
    workload = replace(chosen.workload, least={})  # no other worker would come for which a run pauses
    if workload.chooses_workers and not train:
        workload = replace(workload, sharded=chosen.sharded_prices())
    there = [member for member in chosen.cluster.members() if not member.arrives]
    learner: Callable[[], Learner] = TimingOnly
    if train and (size := workload.replica_size) > 1:
        raise JobError([f"--train: a group computes as one worker does; set train.replica_size = {size} to 1"])
    if train:
        dataset = find_dataset(chosen.job, progress=lambda *_: None, warn=lambda _: None)
        learner = learner_of(chosen.job, dataset, workload)
    try:
        simulation = Simulation(
            workload,
            chosen.cluster,
            seed=seed,
            learner=learner,
            emit=events.append,
            about={**chosen.about, **workload.pace(len(there), chosen.job.train.lr)},
            group_step=chosen.group_step,
            staged=None if workload.sharded is None else chosen.staged_rows(),
        )
    except ValueError as error:
        raise JobError([str(error)]) from error
    try:
        simulation.run()
    except (ClusterError, Lost) as error:
        raise JobError([str(error)]) from error
    if simulation.end is not None and (turn := simulation.end.turn) is not None:
        other = replace(chosen, job=turned(chosen.job, turn.strategy, turn.size))
        events += simulate(other, seed=seed).events


def learner_of(job: Job, dataset: Dataset, workload: Workload) -> Any:
    """Return a maker of replicas that compute in earnest, all on this process's processor."""
    device = Device.of("cpu", threads=job.train.threads or cpu_count(), exact=job.train.exact)
    trained = network_to_start_from(job)
    start = None if trained is None else start_of(job, trained, dataset)

    def made() -> Learner:
        replica = Replica(job, dataset, device, clock=lambda: 0.0)
        if start is not None:
            replica.adopt(start.weights)
        return Training(replica, workload.rule)

    return made


def check_is_free(folder: str) -> None:
    """Raise DataError if something is there already, where a simulated run is to be kept."""
    if os.path.lexists(folder):
        raise DataError(folder, "exists already", f"{_ANOTHER}, or remove it")


def keep(result: Simulated, folder: str) -> Path:
    """Write it as a run directory. Raises DataError if it exists already, or cannot be written."""
    check_is_free(folder)
    path, job = Path(folder), result.scenario.job
    try:
        made = RunDirectory.create(path.parent, path.name, strategy=job.train.strategy, now=datetime.now(UTC))
    except DataError as error:
        raise DataError(path, error.reason, _ANOTHER) from error
    with made as run:
        run.write_job(job.model_dump(mode="json"))
        for event in result.events:
            run.log(event.model_copy(update={"run": str(path)}) if isinstance(event, RunStarted) else event)
    return path


def write_cluster(chosen: Scenario, file: str) -> None:
    """Write the cluster as a cluster file. Raises DataError if it cannot be written, or would replace another file."""
    path = Path(file)
    try:
        if path.is_file() and path.stat().st_size:
            read_cluster(path)
        path.write_text(to_toml(chosen.cluster), encoding="utf-8")
    except ClusterFileError as error:
        raise DataError(file, "exists already, and is no cluster file", "give another name, or remove it") from error
    except OSError as error:
        raise DataError(file, error.strerror or error, "give a file that may be written") from error


def constants_of(chosen: Scenario) -> Constants:
    """Hegde and Usmani's constants of this job and cluster, for the worker of median speed."""
    workload, cluster = chosen.workload, chosen.cluster
    members = sorted(cluster.members(), key=lambda member: member.step(workload.batch_size))
    middle, server = members[len(members) // 2], cluster.server.split(workload.shards)
    bandwidth = min(b for b in (middle.bandwidth, server.bandwidth, np.inf) if b is not None)
    between = workload.rule.n_push if isinstance(workload.rule, Downpour) else 1
    receive = workload.nbytes / server.bandwidth if server.bandwidth else 0.0
    merge = workload.nbytes / server.merge_rate if server.merge_rate else 0.0
    H, W, C = chosen.images.shape
    return Constants(
        k=len(members),
        p=workload.numbers,
        D=workload.samples,
        q=middle.threads,
        theta=-(-workload.samples * workload.epochs // (workload.batch_size * between)),
        T=between * middle.step(workload.batch_size),
        tau=max(receive, merge),
        add=merge / workload.numbers,
        B=float(bandwidth),
        L=middle.latency + cluster.costs.exchange,
        itemsize=workload.nbytes / workload.numbers,
        sample_bytes=H * W * C,
    )
