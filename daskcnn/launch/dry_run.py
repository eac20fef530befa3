"""A dry run: a job in words. Nothing is started, downloaded or written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from daskcnn.arrays import cpu_count
from daskcnn.cluster.link.connect import check_scheduler
from daskcnn.cluster.link.scaled import check_scalable
from daskcnn.conv import plan
from daskcnn.datasets.job_dataset import expected, to_be_made
from daskcnn.job.network import network_of
from daskcnn.job.prepared import Prepared, conv_specs, planning_device
from daskcnn.job.tables import LAYER, Job
from daskcnn.launch.prepared_job import fitted, may_need_server, prepare_job
from daskcnn.launch.recorder import start_event
from daskcnn.launch.resume import begins, job_to_run
from daskcnn.nn import describe, walk
from daskcnn.partition.proportions import kernel_shards
from daskcnn.sharded.balance import explained
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.step_plan import StepPlan
from daskcnn.show.lines import step_text
from daskcnn.show.renderers.terminal import say, shown, warn
from daskcnn.show.text import plural
from daskcnn.store.augmentation import described
from daskcnn.store.manifest import Progress


def dry_run(raw: dict[str, Any], *, resume: str | None) -> tuple[dict[str, Any], str]:
    """Return the resolved job, and what it would do in words. Nothing is written."""
    job, earlier = job_to_run(raw, resume)
    check_scheduler(job.cluster)
    check_scalable(job.cluster, None)
    prepared, told = planned(job, progress=shown(say), begins=begins(earlier))
    return prepared.job.model_dump(mode="json"), readable_plan(prepared, told)


def planned(job: Job, *, progress: Progress, begins: bool = True) -> tuple[Prepared, tuple[str, ...]]:
    """Return the job on its data set, and lines on what comes before it. A data set that is not there is not made.

    begins: as for `prepare_job`. Raises UserError as a run would.
    """
    if not to_be_made(job.data):
        return prepare_job(job, progress=progress, warn=warn, begins=begins), ()
    dataset, how = expected(job.data)
    return fitted(job, dataset, begins=begins), (f"prepare   {how}",)


def readable_plan(prepared: Prepared, before: Sequence[str] = ()) -> str:
    """Describe the job for people: data, network, convolutions, rounds or shards, memory. Nothing is started.

    before : lines on what comes first.
    """
    job, dataset, (H, W, C) = prepared.job, prepared.dataset, prepared.dataset.shape
    specs, device = conv_specs(job, dataset), planning_device(job)
    nbytes = 6 * prepared.layout.nbytes + len(dataset.train) * H * W * C
    lines = [*before]
    if job.data.in_place and dataset.index is None:
        images = dataset.manifest.train.samples + dataset.manifest.test.samples
        lines += [f"index     {images:,} images will be read once by the workers, for checksums and statistics"]
    lines += [
        f"data      {dataset.name} at {dataset.path}: {prepared.samples:,} to train on, {job.data.validation:,} for "
        f"validation, {len(dataset.test):,} to test; augment {described(job.data.augment or 'none')}",
        f"workers   {_workers(job)}",
        f"strategy  {_strategy(prepared)}",
        f"training  {_training(prepared)}",
        *(f"warning   {doubt}" for doubt in prepared.doubts),
        *_weights(prepared),
        *_sums(prepared),
        f"memory    about {nbytes / 2**20:,.0f} MiB on each worker for weights, optimizer, gradients and samples",
        "",
        describe(network_of(job, dataset), dataset.shape),
        "",
        # the first layer's input needs no gradient
        *(f"{name}: {plan(spec, device, need_dx=i > 0).explain()}" for i, (name, spec) in enumerate(specs)),
    ]
    return "\n".join(lines)


def _workers(job: Job) -> str:
    cluster, workers = job.cluster, job.cluster.workers
    counts = ", ".join(f"{number} {kind}" for kind, number in workers.named.items())
    if cluster.adapt:
        counts += ", those that shorten the run"
    if where := cluster.scheduler or cluster.scheduler_file:
        return f"{counts or 'all there are'}, of the scheduler {where}"
    server = ", and 1 for the parameter server" if may_need_server(job) else ""
    return f"{counts or f'{cpu_count()} cpu'}{server}, as processes on this machine"


def _worker_count(job: Job) -> int | None:
    """Return the number of workers that the job begins with; None if it takes all that a scheduler has."""
    if given := sum(job.cluster.workers.given.values()):
        return given
    return None if job.cluster.scheduler or job.cluster.scheduler_file else cpu_count()


def _strategy(prepared: Prepared) -> str:
    train = prepared.job.train
    batches = -(-prepared.samples // train.batch_size)
    if train.strategy == LAYER:
        return f"layer: kernels of every convolution sharded by measured speed, {batches * train.epochs:,} steps"
    groups = f", groups of {train.replica_size} workers that shard kernels" if train.replica_size > 1 else ""
    return (
        f"{train.strategy} with {train.partition}{groups}: samples given out by measured speed, "
        f"{train.increments} increments, {prepared.samples * train.epochs:,} presentations"
    )


def _training(prepared: Prepared) -> str:
    train, schedule = prepared.job.train, prepared.job.train.schedule
    workers = _worker_count(prepared.job)
    start = start_event(prepared, workers or train.replica_size)
    warmup = f" behind a warm-up of {plural(f'{schedule.warmup:g}', 'epoch')}" if schedule.warmup else ""
    rule = prepared.job.rule
    grows = bool(start.replicas and not workers and rule and not rule.shares_steps)
    more = " (more with more replicas: all workers of the scheduler are used)" if grows else ""
    return f"{train.optimizer.name}, {step_text(start)}{more}, schedule {schedule.name}{warmup}"


def _weights(prepared: Prepared) -> Iterator[str]:
    """The start of the weights, and those that are not trained."""
    network, layout = network_of(prepared.job, prepared.dataset), prepared.layout
    if prepared.start is not None:
        yield f"weights   {prepared.start}"
    if network.frozen:
        names = [path for path, _, _ in walk(network, prepared.dataset.shape) if path in network.frozen]
        still = sum(place.stop - place.start for place in layout.spans(network.frozen))
        yield f"frozen    {', '.join(names)}: {still:,} of {layout.size:,} weights and statistics"


def _sums(prepared: Prepared) -> Iterator[str]:
    """The places of a sharded network's additions, on two workers of equal speed."""
    job, dataset = prepared.job, prepared.dataset
    if job.train.strategy != LAYER and job.train.replica_size < 2:
        return
    stages = stages_of(network_of(job, dataset))
    halves = (kernel_shards(stage.conv.kernels, [1.0, 1.0]) if stage.conv else [0, 0] for stage in stages)
    kernels = [{worker: n for worker, n in zip(("a", "b"), own, strict=True) if n} for own in halves]
    for text in explained(StepPlan.of(stages, dataset.shape, kernels, "a")):
        yield f"sharded   {text}"
