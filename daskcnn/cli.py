"""The command line: `daskcnn …`, and the same as `dask cnn …`."""

from __future__ import annotations

import json
import re
from typing import Any

import click
from dask.utils import parse_bytes

from daskcnn import __version__
from daskcnn.arrays import Device, DeviceKind, cpu_count
from daskcnn.doctor.examine import asked_for, examine
from daskcnn.doctor.findings import readable_findings, would_start
from daskcnn.launch import draw as pictures
from daskcnn.launch import plan as planning
from daskcnn.launch import report as reporting
from daskcnn.launch import say, tools
from daskcnn.launch import simulate as simulating
from daskcnn.launch import simulation_text as simulated
from daskcnn.run import Command
from daskcnn.run import main as run_command
from daskcnn.runs.files import dumps
from daskcnn.show.comparison import format_comparison
from daskcnn.show.report_text import format_report

verbose = click.option("--verbose", is_flag=True, help="Show tracebacks.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("cnn", context_settings={"help_option_names": ["-h", "--help"]})  # the name Dask shows it by
@click.version_option(__version__, prog_name="daskcnn")
def main() -> None:
    """Distributed training of convolutional networks on clusters of unequal machines."""


main.add_command(run_command, "run")


@main.group()
def data() -> None:
    """Prepare and check data sets."""


@data.command(cls=Command)
@click.argument("name")
@click.option("--archive", metavar="FILE", help="The data set's own archive or folder.  [default: download it]")
@click.option("--out", metavar="PATH", help="Path of the zarr store to write.  [default: data/NAME.zarr]")
@click.option("--order", type=click.Choice(["shuffled", "stored"]), default="shuffled", show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the shuffle.")
@verbose
def prepare(name: str, archive: str | None, out: str | None, order: str, seed: int, **_: Any) -> None:
    """Prepare data set NAME (cifar10, mnist, synthetic): write it in chunks that workers can read."""
    click.echo(tools.prepare(name, archive=archive, out=out, order=order, seed=seed, say=say))


@data.command(cls=Command)
@click.argument("path")
@verbose
def verify(path: str, **_: Any) -> None:
    """Read every chunk of a prepared data set and check it."""
    click.echo(tools.verify(path))


@main.command(cls=Command)
@click.argument("run")
@click.option("--checkpoint", type=click.Choice(["last", "best"]), default="last", show_default=True)
@click.option("--data", "path", metavar="PATH", help="Another data set of the same shape and classes.")
@as_json
@verbose
def evaluate(run: str, checkpoint: tools.Which, path: str | None, as_json: bool, **_: Any) -> None:
    """Print accuracy, loss and AUC of RUN's network on the test samples."""
    result = tools.evaluate(run, which=checkpoint, path=path, say=say)
    click.echo(json.dumps(result, indent=2) if as_json else tools.readable_evaluation(result))


@main.command(cls=Command)
@click.argument("run")
@click.argument("images", nargs=-1, required=True)
@click.option("--checkpoint", type=click.Choice(["last", "best"]), default="last", show_default=True)
@click.option("--top", type=click.IntRange(1), default=3, show_default=True, help="Number of classes to print.")
@as_json
@verbose
def predict(run: str, images: tuple[str, ...], checkpoint: tools.Which, top: int, as_json: bool, **_: Any) -> None:
    """Print the likeliest classes of IMAGES by RUN's network."""
    result = tools.predict(run, images, which=checkpoint, top=top, say=say)
    click.echo(json.dumps(result, indent=2) if as_json else tools.readable_predictions(result))


def _bytes(ctx: click.Context, parameter: click.Parameter, text: str) -> int:
    try:
        size = int(parse_bytes(text))
    except ValueError:
        size = 0
    if size < 1:
        raise click.BadParameter(f"{text!r}: write a size such as 1GiB or 512MiB", ctx, parameter)
    return size


@main.command(cls=Command)
@click.argument("model")
@click.option("--batch", type=click.IntRange(1), default=128, show_default=True, help="Samples in a minibatch.")
@click.option(
    "--dataset",
    metavar="NAME|HxWxC",
    default="cifar10",
    show_default=True,
    help="A data set, or the size of its images.",
)
@click.option("--threads", type=click.IntRange(1), help="Threads of a worker.  [default: all cores]")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
@click.option("--workspace-limit", metavar="SIZE", default="1GiB", show_default=True, callback=_bytes)
@click.option(
    "--measure/--no-measure", default=False, show_default=True, help="Run the candidates first and remember the times."
)
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
    **_: Any,
) -> None:
    """Print how each convolution of network MODEL (quick, lenet5, C1:C2) would be computed here, and why."""
    means = Device.of(device, threads=threads or cpu_count(), workspace_limit=workspace_limit)
    result = tools.plan_conv(model, batch=batch, images=dataset, dtype=dtype, device=means, measure=measure)
    click.echo(json.dumps(result, indent=2) if as_json else tools.readable_conv_plans(result))


@main.command(cls=Command)
@click.argument("run")
@click.option("--rounds", is_flag=True, help="Print every round of every worker; shorten no table.")
@click.option(
    "--csv", "csv_file", metavar="FILE", help="Write every round of every worker to FILE instead (-: stdout)."
)
@as_json
@verbose
def report(run: str, rounds: bool, csv_file: str | None, as_json: bool, **_: Any) -> None:
    """Print the tables of RUN: workers, balance, waiting, traffic, accuracy. RUN may still be going on."""
    if csv_file and as_json:
        raise click.UsageError("--json and --csv: each is a form of its own; give one of them")
    found = reporting.report(run)
    if csv_file == "-":
        click.echo(reporting.rounds_csv(found), nl=False)
    elif csv_file:
        reporting.write_rounds(found, csv_file)
    else:
        click.echo(dumps(found.to_dict(), indent=2) if as_json else format_report(found, full=rounds))


@main.command(cls=Command)
@click.argument("runs", nargs=-1, required=True)
@click.option(
    "--out",
    metavar="FILE",
    default="breakdown.svg",
    show_default=True,
    help="File to write; its ending says SVG or PNG.",
)
@verbose
def plot(runs: tuple[str, ...], out: str, **_: Any) -> None:
    """Draw what a step of layer-sharded RUNS is made of: communication, convolutions, the rest."""
    click.echo(f"figure {pictures.draw_breakdown(runs, out)}")


def _accuracies(ctx: click.Context, parameter: click.Parameter, text: str) -> tuple[float, ...]:
    try:
        targets = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        targets = (0.0,)
    if not all(0 < target <= 1 for target in targets):
        raise click.BadParameter(f"{text!r}: write accuracies above 0 and up to 1, such as 0.5,0.6", ctx, parameter)
    return targets


@main.command(cls=Command)
@click.argument("runs", nargs=-1, required=True)
@click.option(
    "--targets",
    metavar="A,B,…",
    default="0.5,0.6,0.7",
    show_default=True,
    callback=_accuracies,
    help="Print time, epochs and rounds until each of these validation accuracies.",
)
@as_json
@verbose
def compare(runs: tuple[str, ...], targets: tuple[float, ...], as_json: bool, **_: Any) -> None:
    """Print RUNS side by side; the best value of each line is marked."""
    result = reporting.compare(runs, targets)
    click.echo(dumps(result.to_dict(), indent=2) if as_json else format_comparison(result))


def _scenario_options(function: Any) -> Any:
    """The options that say what is simulated."""
    for option in (
        click.option(
            "--cluster",
            metavar="FILE|RUN",
            help="A cluster file, or a run; a run gives the cluster that it measured.  [default: the run's own]",
        ),
        click.option("--set", "settings", metavar="SECTION.KEY=VALUE", multiple=True, help="Set any key of the job."),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of varying speeds."),
    )[::-1]:
        function = option(function)
    return function


@main.command(cls=Command)
@click.argument("job", metavar="JOB.toml|RUN")
@_scenario_options
@click.option(
    "--train", is_flag=True, help="Train for real too, on the job's data, in this process: the result has accuracies."
)
@click.option("--figures", metavar="FOLDER", help="Draw the papers' figures for this job in FOLDER.")
@click.option("--format", "suffix", type=click.Choice(["svg", "png"]), default="svg", show_default=True)
@click.option("--keep", metavar="FOLDER", help="Write the simulated run to FOLDER, for report and compare.")
@click.option("--write-cluster", metavar="FILE", help="Write the cluster to FILE as a cluster file.")
@as_json
@verbose
def simulate(
    job: str,
    cluster: str | None,
    settings: tuple[str, ...],
    seed: int,
    train: bool,
    figures: str | None,
    suffix: str,
    keep: str | None,
    write_cluster: str | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Run JOB in simulated time, on a cluster from a file or as measured by a run."""
    if figures:
        pictures.need_matplotlib()
    chosen = simulating.scenario(job, cluster, settings)
    if write_cluster:
        simulating.write_cluster(chosen, write_cluster)
    result = simulating.simulate(chosen, seed=seed, train=train)
    if keep:
        say(f"kept in {simulating.keep(result, keep)}")
    click.echo(dumps(simulated.to_dict(result), indent=2) if as_json else simulated.readable(result))
    if figures:
        for path in pictures.draw_all(chosen, figures, suffix=suffix, seed=seed):
            say(f"figure {path}")


def _additions(ctx: click.Context, parameter: click.Parameter, text: str) -> dict[str, int]:
    if not re.fullmatch(r"(\w+=\d+)(,\w+=\d+)*", text):
        raise click.BadParameter(f"{text!r}: write kinds and how many, such as gpu=1,cpu=4", ctx, parameter)
    return {kind: int(number) for kind, _, number in (part.partition("=") for part in text.split(","))}


@main.command(cls=Command)
@click.argument("job", metavar="JOB.toml|RUN")
@_scenario_options
@click.option("--add", required=True, metavar="gpu=N,cpu=N", callback=_additions, help="Workers to add, one at a time.")
@as_json
@verbose
def plan(
    job: str, cluster: str | None, settings: tuple[str, ...], seed: int, add: dict[str, int], as_json: bool, **_: Any
) -> None:
    """Print what more workers would bring JOB: time per epoch, traffic, balance, and when another stops paying."""
    found = planning.plan(simulating.scenario(job, cluster, settings), add, seed=seed)
    click.echo(dumps(found.to_dict(), indent=2) if as_json else planning.readable_plan(found))


@main.command(cls=Command)
@click.option("--scheduler", metavar="ADDRESS", help="Check this cluster too.")
@click.option("--scheduler-file", metavar="FILE", help="The file to which the scheduler wrote its address.")
@click.option("--workers", metavar="cpu=N,gpu=N", help="Workers that a job would ask for.  [default: one of any kind]")
@click.option("--data", metavar="PATH", help="A data set that all workers must see under the same path.")
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=10.0,
    show_default=True,
    help="Seconds to wait for scheduler and workers.",
)
@as_json
@verbose
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    scheduler: str | None,
    scheduler_file: str | None,
    workers: str | None,
    data: str | None,
    wait: float,
    as_json: bool,
    **_: Any,
) -> None:
    """Check this machine and a cluster for what a job needs; every finding has a remedy.

    ok: fine. !: a job would start, but see the remedy. NO: a job would not start; the exit code is 3.
    """
    if workers and not (scheduler or scheduler_file):
        raise click.UsageError("--workers: they are a cluster's; give --scheduler or --scheduler-file too")
    findings = examine(scheduler, scheduler_file, wait, asked_for(workers, data))
    click.echo(dumps([f.to_dict() for f in findings], indent=2) if as_json else readable_findings(findings))
    ctx.exit(0 if would_start(findings) else 3)
