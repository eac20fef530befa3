"""Checks of a job as a whole: names that are in no registry, and keys that contradict each other.

Checks that need the data set, the network's shapes or the cluster are made where these are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields

from daskcnn.errors import nearest
from daskcnn.job.data_table import BUILT_IN, Data
from daskcnn.job.elsewhere import meant_strategy
from daskcnn.job.options import Options
from daskcnn.job.reference import names_of
from daskcnn.job.tables import LAYER, Cluster, Job, Model, Train
from daskcnn.nn import LOSSES, OPTIMIZERS, SCHEDULES, SpecError, model_problem, sequential_from_spec
from daskcnn.nn.metrics import name_problems
from daskcnn.nn.spec import expand
from daskcnn.partition import PARTITIONERS
from daskcnn.ps import RULES, UpdateRule
from daskcnn.ps.wire import INT8, problems_with_int8
from daskcnn.store import DATASETS
from daskcnn.store.augmentation import order_problems


def contradictions(job: Job, wrong: Collection[tuple[int | str, ...]]) -> Iterator[str]:
    """Yield a line for each problem. wrong: keys that were refused, whose defaults say nothing of the job."""
    yield from _unknown_names(job)
    yield from _of_data(job.data)
    yield from _of_model(job.model)
    if job.cluster.scheduler and job.cluster.scheduler_file:
        yield "cluster.scheduler and cluster.scheduler_file: each names the scheduler; keep one"
    yield from _of_workers(job)
    yield from _of_names(job.cluster)
    yield from _of_training(job.train)
    yield from _of_growth(job)
    if job.train.strategy == LAYER:
        yield from _of_layer(job.cluster)
    if ("train", "epochs") not in wrong:
        yield from _too_few_epochs(job.train)
    if job.rule is not None and not any(key[0] == "rule" for key in wrong):
        yield from job.rule.problems(job.train.epochs)
        yield from _of_rule(job.rule, job)


def _of_layer(cluster: Cluster) -> Iterator[str]:
    """Keys of a server and of its pushes, which a network over all workers does not have."""
    if cluster.wire == INT8:
        yield (
            'cluster.wire = "int8": strategy "layer" sends maps and their gradients, new ones in every step, to whose '
            'next ones nothing of a loss could be added; use "float16"'
        )
    if cluster.ps_shards > 1:
        given = f"cluster.ps_shards = {cluster.ps_shards}"
        yield f"{given}: strategy {LAYER!r} has no server to split; remove it, or use another strategy"


def _of_names(cluster: Cluster) -> Iterator[str]:
    """Names of workers that are too few."""
    only, least = cluster.only, max(cluster.workers.given.values(), default=0)
    if only == []:
        yield "cluster.only = []: no worker may train; name some, or leave it out"
    elif only and least > len({*only}) and not any(character in name for name in only for character in "*?["):
        remedy = "name more, give a pattern such as desk-*, or ask for fewer"
        yield f"cluster.workers = {cluster.workers.text}: cluster.only names {len({*only})}; {remedy}"


def _of_workers(job: Job) -> Iterator[str]:
    workers = job.cluster.workers
    if workers.given and not any(workers.given.values()):
        value = workers.text if workers.ranged else 0
        yield f"cluster.workers = {value}: a run needs at least one; raise cpu or gpu"
    if job.cluster.adapt:
        yield from _of_adapting(job)
    if workers.ranged and job.train.reproducible:
        yield (
            f"cluster.workers = {workers.text}: train.reproducible promises the same numbers for the same workers, and "
            "a range lets these change; give numbers, or remove that"
        )


def _of_adapting(job: Job) -> Iterator[str]:
    workers, remedy = job.cluster.workers, "give the range alone, and scale the cluster yourself"
    if not workers.ranged or len(workers.named) > 1:
        given = f" = {workers.text}" if workers.named else ""
        yield f'cluster.adapt: cluster.workers{given} is no range of one kind; give one, such as {{cpu = "2..8"}}'
    if job.train.strategy == LAYER:
        yield f"cluster.adapt: with strategy {LAYER!r} the run does not tell what a worker brings; {remedy}"
    elif job.train.replica_size > 1:
        yield f"cluster.adapt: with train.replica_size = {job.train.replica_size} workers come in groups; {remedy}"


def _unknown_names(job: Job) -> Iterator[str]:
    train = job.train
    for key, name in (
        ("train.strategy", train.strategy),
        ("train.partition", train.partition),
        ("train.optimizer.name", train.optimizer.name),
    ):
        if name is not None and name not in (known := names_of(key)):
            hint = meant_strategy(name, known) if key == "train.strategy" else nearest(name, known)
            yield f"{key} = {name!r}: no such {key.split('.')[1]}{hint}"


_OF_ARRAYS = ("labels", "test", "test_images", "test_labels", "layout", "nodata", "labelling", "seed")
_OF_STORES = ("path", "archive", "order", "given")


def _of_arrays(data: Data) -> Iterator[str]:
    if not data.in_place:
        for key in _OF_ARRAYS:
            if _is_set(data, key):
                instead = f"give {key} to daskcnn.prepare" if key in ("nodata", "labelling") else "remove it"
                yield f"data.{key}: goes with data.images, arrays that are used in place; {instead} or set data.images"
        return
    # the job of a run, which is read again, has the end of the path that its images had
    if data.name and "/" not in data.name and data.name not in (data.images or ""):
        yield f"data.name = {data.name!r} and data.images: each names the samples; keep one"
    for key in _OF_STORES:
        if _is_set(data, key):
            yield f"data.{key}: a prepared data set has it, and data.images names an array in place; keep one"
    if data.labels is None:
        yield "data.labels: missing; data.images needs the array of its labels"
    if (data.test_images is None) != (data.test_labels is None):
        yield "data.test_images and data.test_labels: one without the other; set both or neither"
    if data.test_images is not None and data.test is not None:
        yield "data.test and data.test_images: each says which samples are for testing; keep one"


def _of_data(data: Data) -> Iterator[str]:
    yield from _of_arrays(data)
    yield from (f"data.augment.{problem}" for problem in order_problems(data.augment or "none"))
    if not data.archive or data.in_place:
        return
    name = data.name or (None if data.path else BUILT_IN)
    known = ", ".join(name for name, importer in DATASETS.items() if importer.takes_archive)
    if name is None:
        yield f"data.archive = {data.archive!r}: no data set is named; set data.name to the one it is of: {known}"
    elif name not in DATASETS:
        hint = nearest(name, DATASETS)
        yield f"data.archive = {data.archive!r}: archives are of {known}, not of data.name = {name!r}{hint}"
    elif not DATASETS[name].takes_archive:
        yield f"data.archive = {data.archive!r}: {name} is built in; remove it"


def _of_model(model: Model) -> Iterator[str]:
    if model.name and model.layers:
        yield "model.name and model.layers: each describes the network; keep one"
    if not model.relu and ":" not in (model.name or ""):
        yield "model.relu = false: only the models C1:C2 leave it out; remove it, or choose one such as 50:500"
    if model.name is not None and (problem := model_problem(model.name)):
        yield f"model.name: {problem}"
    if model.from_checkpoint is not None and model.from_ is None:
        yield f"model.from_checkpoint = {model.from_checkpoint!r}: goes with model.from; remove it, or set that"
    if model.layers is not None:
        layers, problems = expand(model.layers, model.blocks or {})
        yield from (f"model.{problem}" for problem in problems)
        if not problems:
            try:
                sequential_from_spec(layers)
            except SpecError as error:
                yield from (f"model.{problem}" for problem in error.problems)
    elif model.blocks:
        yield "model.blocks: they are for model.layers, which there are none of; remove them"


def _of_training(train: Train) -> Iterator[str]:
    schedule = train.schedule
    own = {"name", "warmup", *(field.name for field in fields(SCHEDULES[schedule.name]))}
    for key in type(schedule).model_fields:
        if key not in own and _is_set(schedule, key):
            yield f"train.schedule.{key}: {schedule.name!r} has no such key; remove it or name another schedule"
    yield from _of_sharding(train)
    yield from _of_reproducing(train)
    if train.class_weights is not None and train.loss is not None and LOSSES[train.loss].labels == "image":
        yield f"train.class_weights: the loss {train.loss!r} ignores the labels; remove it, or use another loss"
    if train.partition in PARTITIONERS and PARTITIONERS[train.partition].at_once and (train.increments or 1) > 1:
        yield (
            f"train.increments = {train.increments}: partition {train.partition!r} gives everything at once; "
            "remove it or use idpa"
        )
    yield from _of_optimizer(train)
    yield from name_problems(train.metrics or ())
    if train.metrics and train.loss is not None and LOSSES[train.loss].labels == "image":
        yield f"train.metrics: loss {train.loss!r} knows no classes, so there is nothing to measure; remove them"


_SHARED = ("momentum", "nesterov", "weight_decay")
"""Keys of `[train]` that belong to optimizers, as far as they have them."""


def _of_optimizer(train: Train) -> Iterator[str]:
    """Keys that the optimizer does not have, and what it cannot do where kernels are sharded."""
    options = train.optimizer
    if options.name not in OPTIMIZERS:
        return
    own = {"name", *(field.name for field in fields(OPTIMIZERS[options.name]))}  # type: ignore[arg-type] # every optimizer is a dataclass
    given = [(f"train.{key}", key, _is_set(train, key)) for key in _SHARED]
    given += [(f"train.optimizer.{key}", key, _is_set(options, key)) for key in type(options).model_fields]
    for place, key, is_set in given:
        if is_set and key not in own:
            yield f"{place}: {options.name!r} has no such key; remove it or name another optimizer"
    needs_momentum = "nesterov" in own and "nesterov" in train.model_fields_set
    if needs_momentum and train.nesterov and train.momentum == 0:
        yield "train.nesterov = true: needs a momentum above 0; set train.momentum or remove it"
    if train.strategy != LAYER and train.replica_size == 1:
        return
    where = f"strategy {LAYER!r}" if train.strategy == LAYER else f"train.replica_size = {train.replica_size}"
    reason = f"norms of whole arrays, of which each worker has a part with {where}"
    if options.name == "lars":
        yield f"train.optimizer = 'lars': needs {reason}; use another optimizer, or replicas of one worker"
    if train.clip is not None:
        yield f"train.clip = {train.clip:g}: needs {reason}; remove it, or use replicas of one worker"


_OF_GROUPS = {"sub_batches": "cut minibatches", "first_conv": "divide convolutions", "kernel_shares": "shard kernels"}


def _of_sharding(train: Train) -> Iterator[str]:
    if train.strategy == LAYER:
        for key in ("partition", "increments", "replica_size"):
            if _is_set(train, key):
                yield f"train.{key}: strategy {LAYER!r} is one replica that sees every sample; remove it"
    elif train.replica_size == 1:
        for key, do in _OF_GROUPS.items():
            if _is_set(train, key):
                only = f"only strategy 'layer' and groups {do}; remove it, or set train.replica_size"
                yield f"train.{key} = {getattr(train, key)!r}: {only}"
    if train.sub_batches > train.batch_size:
        yield (
            f"train.sub_batches = {train.sub_batches}: more than the {train.batch_size} samples of a minibatch; "
            "lower it or raise train.batch_size"
        )


def _of_reproducing(train: Train) -> Iterator[str]:
    """Strategies that follow clocks, where a run is to give the same numbers again."""
    if not train.reproducible:
        return
    known = ", ".join(name for name, rule in RULES.items() if rule.barrier)
    if train.strategy in RULES and not RULES[train.strategy].barrier:
        reason = f"strategy {train.strategy!r} merges what is pushed in the order in which it comes"
        yield f"train.reproducible = true: {reason}; remove it, or use one of {known}"
    if train.shards_kernels:
        who = f"strategy {LAYER!r}" if train.strategy == LAYER else "a group (train.replica_size)"
        reason = f"{who} shards kernels by measured speeds"
        yield f"train.reproducible = true: {reason}; remove it, or use replicas of one worker with one of {known}"


def _is_set(table: Options, key: str) -> bool:
    """Return True if a key differs from its default: a resolved job gives every key."""
    return bool(getattr(table, key) != type(table).model_fields[key].default)


def most_increments(epochs: int) -> int:
    """Return the most increments that a run of these epochs gives."""
    return 2 * epochs - 1


def _too_few_epochs(train: Train) -> Iterator[str]:
    """Increments and a warm-up that take longer than the run."""
    most, warmup = most_increments(train.epochs), train.schedule.warmup
    if train.increments is not None and train.increments > most:
        yield (
            f"train.increments = {train.increments}: {train.epochs} epochs end before the last increment is given; "
            f"use at most {most} or more epochs"
        )
    if warmup >= train.epochs:
        yield (
            f"train.schedule.warmup = {warmup:g}: the run ends after {train.epochs} epochs, before lr is reached; "
            "use fewer or raise train.epochs"
        )


def _of_rule(rule: UpdateRule, job: Job) -> Iterator[str]:
    """Demands of the rest of the job that the rule cannot meet."""
    strategy, given, train = job.train.strategy, sum(job.cluster.workers.given.values()), job.train
    yield from _of_groups(rule, job)
    yield from _of_averages(rule, job.train)
    if job.cluster.wire == INT8:
        yield from problems_with_int8(rule, strategy)
    if 0 < given < rule.fewest:
        yield (
            f"cluster.workers = {given}: strategy {strategy!r} joins replicas, so it needs at least {rule.fewest}; "
            "raise cpu or gpu, or use another strategy such as sgwu"
        )
    if job.cluster.ps_shards > 1:
        yield from rule.problems_with_split_server(job.cluster.ps_shards)
    most = max(1, 2 * train.epochs // rule.passes(train.epochs) - 1)  # so that the last one's round is whole
    if most < (train.increments or 1) <= 2 * train.epochs - 1:
        yield (
            f"train.increments = {train.increments}: the rounds of {strategy!r} end before the last one is given; "
            f"use at most {most}, or more rounds"
        )


def _of_growth(job: Job) -> Iterator[str]:
    """Demands of steps whose samples grow."""
    train, rule = job.train, job.rule
    if train.largest_batch is None:
        return
    given = (
        'train.batch_size = "auto"'
        if train.largest_batch == "memory"
        else f"train.largest_batch = {train.largest_batch}"
    )
    if train.shards_kernels:
        who = "groups" if train.replica_size > 1 else f"strategy {LAYER!r}"
        yield f"{given}: {who} cut each step by their shards, which stays as it is; give a number, or use 'bsp'"
    elif rule is not None and not (rule.merges_gradients and rule.shares_steps):
        reason = "grows by the gradients that a server merges at each step"
        yield f"{given}: it {reason}, and replicas make steps of their own here; give a number, or use 'bsp'"
    if train.reproducible:
        yield f"{given}: it goes by measured seconds, and train.reproducible by none; keep one of the two"
    if train.largest_batch != "memory" and train.largest_batch < train.batch_size:
        yield f"{given}: less than train.batch_size = {train.batch_size}; raise it or remove it"


def _of_averages(rule: UpdateRule, train: Train) -> Iterator[str]:
    """Vectors that follow weights, where merges change these."""
    strategy = train.strategy
    if train.ema is not None and rule.serverless:
        yield (
            f"train.ema = {train.ema:g}: the parameter server keeps the average, and replicas that meet peer to peer "
            "have none; remove it, or use rule.exchange = 'allreduce'"
        )
    # lookahead's way back is linear: the mean of the replicas' is that of the mean of their weights
    if train.lookahead is not None and rule.period is not None and not (rule.takes_means or rule.merges_gradients):
        yield (
            f"train.lookahead: strategy {strategy!r} merges within a round, which moves the weights away from where "
            "lookahead goes back to; remove it, or use bsp, or a rule that merges at the end of a round, such as sgwu"
        )
    if train.lookahead is not None and train.replica_size > 1:
        yield (
            f"train.lookahead: groups (train.replica_size = {train.replica_size}) keep where it goes back to with "
            "their shards, which merges do not reach; remove it, or use 1"
        )


def _of_groups(rule: UpdateRule, job: Job) -> Iterator[str]:
    """Demands that groups of workers cannot meet."""
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
    yield from rule.problems_with_groups(size)
