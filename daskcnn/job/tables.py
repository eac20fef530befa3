"""The job's tables: frozen models of every key that a job file may hold, each with its meaning and unit."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from daskcnn.job.cluster_table import Cluster as Cluster  # every table may be imported from here
from daskcnn.job.cluster_table import Workers as Workers
from daskcnn.job.data_table import Data
from daskcnn.job.options import Location, Options, meaning_of
from daskcnn.job.shorthand import (
    duration,
    listed,
    module_names,
    named,
    named_schedule,
    weights_of_classes,
)
from daskcnn.markup import as_table
from daskcnn.ps import RULES, UpdateRule

LAYER = "layer"
"""The strategy without an update rule: one replica over all workers."""

CheckpointChoice = Literal["last", "best"]
"""The weights of a run: as it left them, or as they were best on the validation samples."""


class Block(Options):
    """`[model.blocks.NAME]`: layers in which `$name` stands for a parameter."""

    layers: list[dict[str, Any]] = Field(min_length=1)
    """Layers of the block, in order."""
    defaults: dict[str, Any] = Field({})
    """Values of the parameters that an entry does not give."""


class Model(Options):
    """`[model]`: the network, by name or as a list of layers."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: str | None = None
    """Name of the network, or C1:C2 with two numbers of kernels. Default: `quick`, without layers."""
    layers: list[dict[str, Any]] | None = Field(None, min_length=1)
    """Layers of the network, in order. Each table has a key `layer`, or a key `block`, and may have `repeat`."""
    blocks: dict[str, Block] | None = None
    """Blocks of layers by name, which entries of `layers` use: `{ block = NAME, repeat = 3 }` with the block's
    parameters. Default: none."""
    dtype: Literal["float32", "float64"] = "float32"
    """Number type of weights and activations."""
    relu: bool = True
    """C1:C2 has a ReLU behind each convolution. The papers list none."""
    from_: Location | None = Field(None, alias="from")
    """Run directory, checkpoint or exported safetensors file whose trained weights the run starts from. Its network is
    taken where the job names none. The last layer with weights, and that of each second head, is new where the classes
    differ."""
    from_checkpoint: CheckpointChoice | None = None
    """Weights of the run in `from`: the `last`, or the `best` on its validation samples. Default: those that it hands
    back (its `train.restore_best`)."""
    freeze: list[str] | None = None
    """Layers that are not trained, by patterns of their names such as `conv*`. Their batch normalising goes by the
    running mean and variance. Default: none."""


class Schedule(Options):
    """`[train.schedule]`: how the learning rate changes. A name alone, such as `schedule = "step"`, is allowed too."""

    name: Literal["constant", "step", "poly", "cosine", "onecycle"] = "poly"
    """Curve of the learning rate. `linear` stands for `poly` with power 1."""
    every: float = Field(10.0, gt=0)
    """Epochs between two changes (`step`)."""
    factor: float = Field(0.1, gt=0, le=1)
    """Factor on the learning rate at each change (`step`)."""
    power: float = Field(1.0, gt=0)
    """Exponent p of lr · (1 - progress)^p (`poly`)."""
    peak: float = Field(0.3, ge=0, le=1)
    """Part of the run after which the rate is lr (`onecycle`)."""
    first: float = Field(0.04, ge=0, le=1)
    """Share of lr that it starts with (`onecycle`)."""
    final: float = Field(0.0, ge=0, le=1)
    """Share of lr that it ends with (`cosine`, `onecycle`)."""
    warmup: float = Field(0.0, ge=0)
    """Epochs in which the rate rises from 0 to that of the curve."""


class OptimizerOptions(Options):
    """`[train.optimizer]`: what makes the steps. A name alone, such as `optimizer = "adamw"`, is allowed too."""

    name: str = "sgd"
    """Name of the optimizer. A table without it is of `sgd`."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Part of the mean gradient that is kept at a step (`adamw`)."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Part of the mean of squared gradients that is kept at a step (`adamw`)."""
    trust: float = Field(0.001, gt=0)
    """Trust coefficient: a step of a parameter array in parts of its norm (`lars`)."""
    epsilon: float = Field(1e-8, gt=0)
    """Number that divisors are raised by (`adamw`, `lars`)."""


class LookaheadOptions(Options):
    """`[train.lookahead]`: how often the weights go back, and how far."""

    steps: int = Field(5, ge=1)
    """Steps from one return to the next."""
    alpha: float = Field(0.5, gt=0, le=1)
    """Part of the way since the last return that is kept."""
    last: float | None = Field(None, gt=0, le=1)
    """The same at the end of the run: it goes there from `alpha` by the third power of the run's progress (airbench94,
    Jordan 2024). Default: `alpha` throughout."""


_ClassWeight: TypeAlias = Annotated[float, Field(ge=0)]
ClassWeights: TypeAlias = Literal["balanced"] | list[_ClassWeight] | dict[str, _ClassWeight]
FirstConv: TypeAlias = Literal["auto", "kernels", "samples"]
KernelShares: TypeAlias = Literal["measured", "speeds"]


class Train(Options):
    """`[train]`: the method."""

    strategy: str = "auto"
    """Update rule that joins the replicas, or `layer`: one replica with sharded kernels. `auto` takes what is soonest
    by the measured workers and links: one worker alone, `bsp` on those that help, `local-sgd`, or sharded kernels."""
    partition: str | None = None
    """Partitioner that gives each worker its samples. Default: `idpa`; none with `layer`."""
    increments: int | None = Field(None, ge=1)
    """Steps in which the samples are given out. Default: up to 4, as partition and rule allow."""
    epochs: int = Field(10, ge=1)
    """Presentations of every sample, on average."""
    batch_size: int = Field(64, ge=1, json_schema_extra={"because": 'or write "auto"', "or": "auto"})
    """Samples of one step of the weights. Under `bsp` and `layer`, and within groups, all workers share them by speed.
    With rules whose replicas make steps of their own they are of such a step. Default: 64 for a named network on the
    published images that it is for; otherwise 32, for up to 1,000 training samples 16, for up to 200 of them 8. The
    value `auto` begins with the default, and lets steps grow up to what the workers' memory has room for
    (`largest_batch`). Strategy `auto` alone lets no step grow."""
    largest_batch: int | Literal["memory"] | None = None
    """Samples that a step may grow to in the course of the run, as the gradient noise scale does: `batch_size` times a
    power of two, where larger steps bring the same progress sooner. The learning rate grows in proportion with `sgd`
    and `lars`, by the root with `adamw`. `memory`: as many as the smallest worker's memory has room for. With `bsp` and
    `auto`. Default: it stays as it is."""
    lr: float = Field(0.01, gt=0)
    """Learning rate at the start. Default: that of the optimizer, `adamw` 0.003, `lars` 2, `sgd` 0.005, and twice as
    much with `easgd`, less with `downpour` and `dc-asgd` (`rule.lower_lr`); with `sgd` for a named network on the
    published images that it is for that of the network, 0.01 to 0.08."""
    optimizer: Annotated[
        OptimizerOptions, BeforeValidator(partial(named, example='{name = "adamw", beta2 = 0.99}'))
    ] = OptimizerOptions()
    """Maker of the steps: a name or a table. Default: `sgd` for a named network on the published images that it is
    for, such as `quick` on CIFAR-10; `adamw` otherwise, unless `momentum` or `nesterov` is given."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of the optimizer (`sgd`, `lars`)."""
    nesterov: bool = True
    """The momentum is Nesterov's (`sgd`). Needs a momentum above 0."""
    weight_decay: float = Field(1e-3, ge=0)
    """Factor of the L2 penalty on the weights. With `adamw` weights shrink by lr times this at a step."""
    decay_all: bool = True
    """Biases decay too, and the factors and offsets of normalising layers. If not, `lars` does not scale their steps
    either."""
    clip: float | None = Field(None, gt=0)
    """Largest norm of the gradient of all parameters together; a longer one is scaled down. Not where kernels are
    sharded. Default: any."""
    rates: dict[str, Annotated[float, Field(gt=0, le=1e6)]] | None = None
    """Factors of the learning rate, by patterns of layers such as `{"conv1" = 0.1, "dense*" = 2}`. Of several that
    match, the last one counts. Default: 1 for all."""
    lookahead: LookaheadOptions | None = None
    """Every `steps` steps (default 5) the weights go back to `alpha` (default 0.5) of the way since the last time:
    `{steps = 5, alpha = 0.5}`. With `last`, alpha goes there in the course of the run, by the third power of its
    progress. Not with rules that merge within a round. Default: never."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Part that an exponential average of the weights keeps of itself, such as 0.999: with `layer` at a step, with the
    other strategies at a merge, of the center. The average is what is evaluated, exported and predicted with. Not with
    `rule.exchange` `asa` or `asa16`, which have no server. Default: no average."""
    schedule: Annotated[Schedule, BeforeValidator(named_schedule)] = Schedule()
    """Course of the learning rate: a name or a table. Default: `poly` for a named network on the published images
    that it is for; otherwise the same behind a warm-up of an epoch, of a quarter of the run at most."""
    loss: Literal["softmax", "squared", "sigmoid", "reconstruction", "sigmoid-reconstruction"] | None = None
    """Loss function: `softmax` and `squared` for one class a sample, `sigmoid` for several labels. `reconstruction`
    compares the network's output with the image that it was given, by the mean squared difference over pixels and
    channels (PyTorch's `MSELoss`); `sigmoid-reconstruction` by the cross-entropy of the output's sigmoid and pixels in
    [0, 1] (`BCEWithLogitsLoss`). Both ignore the labels and have no accuracy. Default: `softmax`, or `sigmoid` for
    several labels."""
    metrics: Annotated[list[str] | None, BeforeValidator(listed)] = None
    """Figures of the validation and test samples besides accuracy, loss and AUC: `top3`, `top5`, or functions of your
    own as MODULE:FUNCTION. A function takes probabilities (N, classes) and labels (N,), and returns a number for each
    sample or their mean. The module is imported as those of `run.imports`. Default: none."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Part of each label that all classes share in the training loss, where that is `softmax`. The losses on validation
    and test samples are not smoothed."""
    class_weights: Annotated[ClassWeights | None, BeforeValidator(weights_of_classes)] = None
    """Factor of each class in the training loss: `balanced` (samples ÷ classes ÷ samples of the class), a list of
    numbers in the order of the classes, or a table by name, where a class that is not named has 1. It multiplies the
    samples' own weights; their mean over the training samples is made 1. The losses on validation and test samples are
    not weighted. Not for several labels a sample. Default: all classes alike."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the weights, the order of samples and the augmentation."""
    threads: int | None = Field(None, ge=1, le=4096)
    """Threads of each worker. Default: the worker's own number."""
    workspace_mib: int = Field(1024, ge=1)
    """Scratch memory of a convolution on each worker, in MiB."""
    exact: bool = False
    """Convolutions leave out algorithms that round more than products of matrices do. Winograd's, of 4×4
    outputs, round by up to 0.00003 of the largest output in float32."""
    reproducible: bool = False
    """The same job gives the same numbers again, on as many workers with the same processors and threads, as long as
    none is lost or joins. Workers get equal shares, however fast they are, and convolutions go by the model's choice.
    With rules that wait for all workers, without groups. Default: shares and convolutions go by measured speeds."""
    replica_size: int = Field(1, ge=1)
    """Workers that share one replica by sharding its kernels."""
    sub_batches: int = Field(1, ge=1)
    """Parts of a minibatch that are sent on one by one, where kernels are sharded."""
    first_conv: FirstConv = "auto"
    """Parts that the workers have of the first convolution, where kernels are sharded: kernels or samples. `auto` takes
    the shorter step."""
    kernel_shares: KernelShares = "measured"
    """Measurements that decide each worker's number of kernels, where kernels are sharded. `measured`: speeds, links,
    the seconds of a shard of any size, and the scheduler's time for each task. `speeds`: measured speeds alone (Marques
    et al., eq. 1), at the start and where kernels move; no link is measured."""
    on_divergence: Literal["lower", "stop"] = "lower"
    """A loss that is not finite, or weights whose losses are far above those of guessing: `lower` goes back to the
    weights that were saved last, once, with a third of the learning rate. A loss that is not finite ends the run the
    second time. `stop` ends it the first time."""
    early_stopping: int | None = Field(None, ge=1)
    """Stop after this many evaluations without a better validation accuracy, or without a lower validation loss where
    the loss has no accuracy. The run hands back the best weights then, not the last. Default: never."""
    evaluation: Literal["sized", "all"] = "sized"
    """Validation samples that the weights are judged on after a round or an epoch. `sized`: as many as 4 % of the
    seconds of training allow, 100 at least. The merged weights are judged on all of them wherever these fit in, at the
    end, and with `early_stopping` or `restore_best`. Otherwise they, and each replica's own weights (Q of `sgwu` and
    `agwu`), are judged on a part, drawn anew for each round by `seed`. Which weights are the best is decided on all of
    them alone. `all`: always on all."""
    restore_best: bool | None = None
    """The run hands back the weights that were best on the validation samples, not the last: they are tested, loaded,
    evaluated, exported and predicted with. Default: with `early_stopping`."""

    @model_validator(mode="before")
    @classmethod
    def _growing(cls, table: Any) -> Any:
        """Let `batch_size = "auto"` stand for the default one with `largest_batch = "memory"`."""
        if not (isinstance(table, dict) and table.get("batch_size") == "auto"):
            return table
        return {"largest_batch": "memory"} | {key: value for key, value in table.items() if key != "batch_size"}

    @field_validator("largest_batch", mode="plain")
    @classmethod
    def _largest(cls, value: Any) -> int | Literal["memory"] | None:
        if value is None or value == "memory" or (type(value) is int and value >= 1):
            return value
        raise ValueError("input should be 'memory' or a whole number from 1")

    @property
    def shards_kernels(self) -> bool:
        """True if workers share a replica by sharding its kernels: all of them, or those of each group."""
        return self.strategy == LAYER or self.replica_size > 1

    @property
    def hands_back(self) -> CheckpointChoice:
        """Weights that the run's result has, and that a trained network has by default, wherever it is loaded."""
        best = self.early_stopping is not None if self.restore_best is None else self.restore_best
        return "best" if best else "last"

    @property
    def parts_ways(self) -> bool:
        """True if replicas may make steps of their own: nothing of a step has to be the same everywhere."""
        return self.lookahead is None and self.largest_batch is None


class Run(Options):
    """`[run]`: the results."""

    dir: Location = "runs"
    """Folder that holds the runs."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run's folder. Default: the time and the strategy."""
    checkpoint_every: float = Field(1.0, gt=0)
    """Epochs between two checkpoints."""
    snapshot_every: float = Field(60.0, gt=0)
    """Seconds after which the state is kept besides, so that no more than that is trained again after the loss of the
    server, or of a worker with `layer`. Behind a barrier it is kept between two rounds. `layer` keeps it in the
    driver's memory, and other strategies as a checkpoint."""
    report_every: int = Field(25, ge=1)
    """Steps between two reports of steps in the log (strategy `layer`)."""
    time_limit: Annotated[float | None, BeforeValidator(duration)] = Field(None, gt=0)
    """Time after which the run is saved and ends with exit code 143, early enough to be done by then: 2h, 90m, 1h30m,
    1:30:00, or a number of seconds. It counts anew when the run is resumed. Default: none."""
    keep: int = Field(3, ge=1)
    """Newest checkpoints that are kept; the best one is kept besides."""
    dashboard: bool = True
    """The scheduler's dashboard shows the run while it goes on, on its page /daskcnn."""
    tensorboard: bool = False
    """Event files for TensorBoard are written into the run directory (`tensorboard/`)."""
    mlflow: str | None = Field(None, min_length=1)
    """Tracking URI of MLflow, such as `http://host:5000` or `sqlite:///mlflow.db`, where the run is logged. Default:
    nowhere."""
    imports: Annotated[list[str] | None, BeforeValidator(listed), AfterValidator(module_names)] = None
    """Modules that add rules, layers or other members of your own, by name. They are imported before the job is read,
    on every process. One that is not installed is sent to the workers. Default: those that the job's members are of."""
    prometheus: bool = False
    """Scheduler and workers serve the run's figures to Prometheus, at `/metrics` of their ports for HTTP."""


class NoRule(Options):
    """`[rule]` of a strategy that has no update rule: no keys."""


class Job(Options):
    """One training job.

    Attributes
    ----------
    rule : the update rule itself, of the class that `RULES` has for `train.strategy`. It is read from, and dumped as,
        the table of the parameters that were given. None for strategy `layer`.
    """

    data: Data = Data()
    model: Model = Model()
    train: Train = Train()
    rule: UpdateRule | None = Field(None, validate_default=True)
    cluster: Cluster = Cluster()
    run: Run = Run()

    def _repr_html_(self) -> str:
        tables = self.model_dump(mode="json", exclude_defaults=True, by_alias=True)
        rows = [(f"{section}.{key}", value) for section, table in tables.items() for key, value in table.items()]
        return as_table("Job", rows or [("every key", "its default")], head=("key", "value"))

    @field_validator("rule", mode="plain")
    @classmethod
    def _of_the_strategy(cls, value: Any, info: ValidationInfo) -> UpdateRule | None:
        """The rule that `train.strategy` names, with these parameters. Without a right strategy nothing is checked."""
        strategy, table = getattr(info.data.get("train"), "strategy", ""), {} if value is None else value
        if strategy == LAYER:
            NoRule.model_validate(table)
        return RULES[strategy].model_validate(table) if strategy in RULES else None

    @field_serializer("rule")
    def _given_parameters(self, rule: UpdateRule | None) -> dict[str, Any]:
        return {} if rule is None else rule.model_dump(exclude_unset=True)


def keys_of(table: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a table as a job file has them. `from` is none that a field of Python can have."""
    return {field.alias or name: field for name, field in table.model_fields.items()}


def description_of(key: str) -> str:
    """Return the meaning of `section.key`, with its unit."""
    section, name = key.split(".")
    table: Any = Job.model_fields[section].annotation
    return meaning_of(table, name)
