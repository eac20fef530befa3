"""`[cluster]`: the machines of a job. Commands of a cluster need this table without the other ones."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from daskcnn.job.options import Location, Options
from daskcnn.job.shorthand import counted_workers, listed, number_or_range

CountOrRange: TypeAlias = Annotated[int | str | None, BeforeValidator(number_or_range)]


class Workers(Options):
    """`[cluster.workers]`: workers of each kind that the job waits for and uses. Default: all that there are."""

    cpu: CountOrRange = None
    """Workers that compute on a CPU: a number, or a range such as "2..8"."""
    gpu: CountOrRange = None
    """Workers that compute on a GPU: a number, or a range such as "2..8"."""

    @property
    def given(self) -> dict[str, int]:
        """Workers wanted of each kind that was named, of a range the least; empty where none was."""
        return {kind: int(str(count).partition("..")[0]) for kind, count in self.named.items()}

    @property
    def most(self) -> dict[str, int]:
        """Workers of each kind that was named that the job uses at most; empty where none was."""
        return {kind: int(str(count).rpartition("..")[2]) for kind, count in self.named.items()}

    @property
    def ranged(self) -> bool:
        """True if a range was given: the number of workers may change in mid-run."""
        return any(isinstance(count, str) for count in self.named.values())

    @property
    def text(self) -> str:
        """The numbers as the flag has them."""
        return ",".join(f"{kind}={count}" for kind, count in self.named.items())

    @property
    def named(self) -> dict[str, int | str]:
        """The number or range of each kind that was named."""
        return {kind: count for kind, count in (("cpu", self.cpu), ("gpu", self.gpu)) if count is not None}


class Cluster(Options):
    """`[cluster]`: the machines. Without a scheduler the job starts a local cluster."""

    scheduler: str | None = None
    """Address of the Dask scheduler, such as tcp://host:8786."""
    scheduler_file: Location | None = None
    """File that the scheduler wrote its address to."""
    workers: Annotated[Workers, BeforeValidator(counted_workers)] = Workers()
    """Workers to wait for and use: a table or cpu=N,gpu=N. More are not used, also where they come during the run. Of
    a range, cpu=2..8, the least are enough to begin. Those that come are taken, up to the most. With fewer than the
    least the job pauses, for `wait` seconds at most. Default: all that there are."""
    adapt: bool = False
    """Ask the cluster for workers of the range by what each would shorten the run, and let those go that bring too
    little. It is the job's own, or the one that a client given from Python has."""
    only: Annotated[list[Annotated[str, Field(min_length=1)]] | None, BeforeValidator(listed)] = None
    """Names of the workers that may train, or patterns of them such as lab-*, separated by commas. Default: any."""
    only_from: Location | None = None
    """File with names of the workers that may train, one a line, on the driver's machine. It is read again whenever
    it changes: a job that trains gives up workers that are no longer in it, as far as its least number allows, and
    takes those that came into it. `daskcnn serve` writes one for each of its jobs."""
    wait: float = Field(60.0, ge=0)
    """Seconds to wait for the scheduler and for workers that are free, and to pause while too few are left of a range
    of workers."""
    stall_timeout: float = Field(300.0, gt=0)
    """Seconds without a sign of life after which a worker counts as lost, on top of five times what its round should
    take."""
    settle: float = Field(2.0, ge=0)
    """Seconds without a new worker after which a job that takes all workers there are begins. A job with a local
    cluster begins at once."""
    chain: int = Field(250, ge=1)
    """Steps after which the chain of tasks, which the scheduler remembers, is cut. With `layer` also the
    most steps between two snapshots."""
    wire: Literal["float32", "float16", "int8"] = "float32"
    """Number type of vectors on the network. `float16`: gradients and gains of less than 6e-8 become 0, as some of
    `bsp`'s may be; a server with `adamw` is better given float32. `int8`: blocks of 256 numbers, with a scale each, of
    what has changed; a worker adds what a push has lost to its next one. Not with `easgd`, `layer`, nor peer to
    peer."""
    overlap: bool = True
    """Replicas train on while they push and pull within a round (`easgd`, `downpour`, `dc-asgd`, `local-sgd`, and
    `agwu` with `rule.every`)."""
    ps_shards: int = Field(1, ge=1)
    """Workers that the parameter server is split over, each with a range of the vector. Not with `layer`."""

    @property
    def maps(self) -> Literal["float32", "float16"]:
        """Number type of maps between workers that share a network: of these nothing that is lost could be added."""
        return "float16" if self.wire == "int8" else self.wire
