"""Commands that predict: `daskcnn plan`, `plan-conv`, `simulate`. The simulator needs Dask, `plan-conv` does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import reduce
from typing import Any

import click
from dask.utils import parse_bytes

from daskcnn.arrays import Device, DeviceKind, cpu_count
from daskcnn.cli.command import Command, as_json, import_option, settings, tell, verbose
from daskcnn.documents import dumps
from daskcnn.planning import show_model as convolutions
from daskcnn.show.renderers.drawing import need_matplotlib
from daskcnn.show.renderers.network_text import readable_conv_plans
from daskcnn.show.renderers.simulation_text import format_simulation, simulation_dict
from daskcnn.show.renderers.terminal import say
from daskcnn.show.strategy_table import choice_text
from daskcnn.show.worker_plan import format_worker_plan


def scenario_options(function: Any) -> Any:
    """The options that say what is simulated."""
    for option in (
        click.option(
            "--cluster",
            metavar="FILE|RUN",
            help="A cluster file, or a run; a run gives the cluster that it measured.  [default: the run's own]",
        ),
        settings,
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of varying speeds."),
    )[::-1]:
        function = option(function)
    return function


_ADDED = 10_000
"""Workers to add at most: each takes memory, and a plan of its own."""


def _additions(ctx: click.Context, parameter: click.Parameter, text: str | None) -> dict[str, int]:
    if text is None:
        return {}
    if not re.fullmatch(r"[^=,]+(=\d+)?(,[^=,]+(=\d+)?)*", text):
        problem = f"{text!r}: write kinds or names of workers, and how many, such as gpu=1,cpu=4 or desk-1=2"
        raise click.BadParameter(problem, ctx, parameter)
    found = dict[str, int]()
    for name, _, number in (part.partition("=") for part in text.split(",")):
        found[name] = found.get(name, 0) + int(number or 1)
    if (many := sum(found.values())) > _ADDED:
        raise click.BadParameter(f"{text!r}: {many:,} workers; add {_ADDED:,} at most", ctx, parameter)
    return found


def _names(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name for text in given for name in text.split(","))
    if not all(names):
        raise click.BadParameter(f"{','.join(given)!r}: write names of workers, such as desk-4,desk-5", ctx, parameter)
    return names


@click.command(cls=Command)
@click.argument("job", metavar="JOB.toml|RUN")
@scenario_options
@click.option(
    "--without",
    metavar="NAME,…",
    multiple=True,
    callback=_names,
    help="Leave these workers out, all at once.  [default: without --add, one at a time]",
)
@click.option(
    "--add",
    metavar="KIND|NAME=N,…",
    callback=_additions,
    help="Workers to add, one at a time: like the first of a kind (gpu=1,cpu=4), or like a worker (desk-1=2).",
)
@click.option(
    "--strategies",
    is_flag=True,
    help="Compare strategies by the seconds that each needs: one worker, the best of several, all, sharded kernels.",
)
@as_json
@import_option
@verbose
def plan(
    job: str,
    cluster: str | None,
    settings: tuple[str, ...],
    seed: int,
    without: tuple[str, ...],
    add: dict[str, int],
    strategies: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """Print each worker's part in JOB, or what fewer and other workers would bring: time, traffic, balance."""
    from daskcnn.planning import plan_workers as planning
    from daskcnn.planning.simulate import scenario

    if strategies:
        from daskcnn.planning.compare_strategies import compare_strategies

        chosen = scenario(job, cluster, settings)
        event = compare_strategies(planning.changed(planning.all_measured(chosen), add, without)).event()
        tell(dumps(event.model_dump(mode="json", exclude={"at"}), indent=2) if as_json else choice_text(event))
        if cluster is not None and (chosen.cluster.changes or chosen.cluster.varies):
            say("warning: --strategies takes all workers as there, at nominal speeds; plan without it plays changes")
        return
    found = planning.plan(scenario(job, cluster, settings), add, without, seed=seed)
    tell(dumps(found.to_dict(), indent=2) if as_json else format_worker_plan(found))
    if cluster is None and not settings and (doubt := planning.doubt(job, found.rows[0].epoch)):
        say(f"warning: {doubt}")


def _bytes(ctx: click.Context, parameter: click.Parameter, text: str) -> int:
    try:
        size = int(parse_bytes(text))
    except ValueError:
        size = 0
    if size < 1:
        raise click.BadParameter(f"{text!r}: write a size such as 1GiB or 512MiB", ctx, parameter)
    return size


def _pair(ctx: click.Context, parameter: click.Parameter, text: str | None) -> int | list[int] | str | None:
    """3 or 3x1; what else --pad takes is the layer's to judge."""
    if text is None or text == "same":
        return text
    if not re.fullmatch(r"\d{1,9}(x\d{1,9})?", text):
        raise click.BadParameter(f"{text!r}: write a number such as 3, or two such as 3x1", ctx, parameter)
    numbers = [int(number) for number in text.split("x")]
    return numbers if len(numbers) == 2 else numbers[0]


LAYER_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "kernels": click.option("--kernels", type=click.IntRange(1), help="Number of kernels of conv."),
    "size": click.option("--size", metavar="N|RxS", callback=_pair, help="Rows and columns of a kernel of conv."),
    "stride": click.option("--stride", metavar="N|RxS", callback=_pair, help="Stride of conv.  [default: 1]"),
    "pad": click.option("--pad", metavar="N|RxS|same", callback=_pair, help="Zeros at either side.  [default: 0]"),
    "groups": click.option("--groups", type=click.IntRange(1), help="Groups of conv.  [default: 1]"),
    "dilation": click.option("--dilation", metavar="N|RxS", callback=_pair, help="Dilation of conv.  [default: 1]"),
}
"""The options of a single convolution, named as the layer's are."""


@click.command(cls=Command)
@click.argument("model")
@click.option("--batch", type=click.IntRange(1), default=128, show_default=True, help="Samples in a minibatch.")
@click.option(
    "--dataset",
    metavar="NAME|PATH|HxWxC",
    default="cifar10",
    show_default=True,
    help="A data set, or the size of its images.",
)
@click.option("--threads", type=click.IntRange(1, 4096), help="Threads of a worker.  [default: all cores]")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
@click.option("--workspace-limit", metavar="SIZE", default="1GiB", show_default=True, callback=_bytes)
@click.option(
    "--measure/--no-measure", default=False, show_default=True, help="Run the candidates first and remember the times."
)
@lambda command: reduce(lambda inner, option: option(inner), reversed(LAYER_OPTIONS.values()), command)
@as_json
@verbose
def plan_conv(
    model: str,
    batch: int,
    dataset: str,
    threads: int | None,
    device: DeviceKind,
    dtype: str,
    workspace_limit: int,
    measure: bool,
    as_json: bool,
    **others: Any,
) -> None:
    """Print how each convolution of network MODEL (quick, lenet5, C1:C2) would be computed here, and why.

    With conv as MODEL it is one convolution: --kernels and --size are needed, and --dataset is the size of its input.
    """
    layer = {name: others[name] for name in LAYER_OPTIONS if others[name] is not None}
    means = Device.of(device, threads=threads or cpu_count(), workspace_limit=workspace_limit)
    result = convolutions.plan_conv(
        model, batch=batch, images=dataset, dtype=dtype, device=means, measure=measure, layer=layer
    )
    tell(json.dumps(result, indent=2) if as_json else readable_conv_plans(result))


@click.command(cls=Command)
@click.argument("job", metavar="JOB.toml|RUN", required=False)
@scenario_options
@click.option(
    "--train", is_flag=True, help="Train for real too, on the job's data, in this process: the result has accuracies."
)
@click.option("--figures", metavar="FOLDER", help="Draw the papers' figures for this job in FOLDER.")
@click.option("--format", "suffix", type=click.Choice(["svg", "png"]), default="svg", show_default=True)
@click.option("--keep", metavar="FOLDER", help="Write the simulated run to FOLDER, for report and compare.")
@click.option("--queue", metavar="FILE", help="Play a queue of jobs, from a queue file, in place of a single JOB.")
@click.option("--write-cluster", metavar="FILE", help="Write the cluster to FILE as a cluster file.")
@as_json
@import_option
@verbose
def simulate(
    job: str | None,
    cluster: str | None,
    settings: tuple[str, ...],
    seed: int,
    train: bool,
    figures: str | None,
    suffix: str,
    keep: str | None,
    queue: str | None,
    write_cluster: str | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Run JOB in simulated time, on a cluster from a file or as measured by a run."""
    if queue is not None:
        of_a_job = {
            "JOB": job,
            "--train": train,
            "--figures": figures,
            "--keep": keep,
            "--write-cluster": write_cluster,
        }
        _simulate_queue(queue, cluster, settings, seed, as_json, [name for name, given in of_a_job.items() if given])
        return
    if job is None:
        raise click.UsageError("Missing argument 'JOB.toml|RUN', or --queue FILE")
    from daskcnn.planning import simulate as simulation
    from daskcnn.reports.plot import draw_paper_figures

    if figures:
        need_matplotlib()
    if keep:
        simulation.check_is_free(keep)
    chosen = simulation.scenario(job, cluster, settings)
    if write_cluster:
        simulation.write_cluster(chosen, write_cluster)
    result = simulation.simulate(chosen, seed=seed, train=train)
    if keep:
        say(f"kept in {simulation.keep(result, keep)}")
    shown = chosen.cluster, result.report, chosen.formulas
    tell(dumps(simulation_dict(*shown), indent=2) if as_json else format_simulation(chosen.source, *shown))
    if figures:
        for path in draw_paper_figures(chosen, figures, suffix=suffix, seed=seed):
            say(f"figure {path}")


def _simulate_queue(
    file: str, cluster: str | None, settings: tuple[str, ...], seed: int, as_json: bool, unfit: list[str]
) -> None:
    from daskcnn.batch.simulated_queue import format_queue, simulate_queue

    if unfit:
        raise click.UsageError(f"{' and '.join(unfit)}: not of a queue; leave out --queue, or {' and '.join(unfit)}")
    if cluster is None:
        raise click.UsageError("--queue: give --cluster with a cluster file or a run")
    found = simulate_queue(file, cluster, settings, seed=seed)
    tell(dumps(found.to_dict(), indent=2) if as_json else format_queue(found))
