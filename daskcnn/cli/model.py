"""Commands on networks: `daskcnn model`, `models`, `evaluate`, `predict`, `export`.

The last three import what they need when they run: Dask is slow to import, and `model` and `models` do without it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from daskcnn.cli.command import Command, as_json, checkpoint_option, import_option, tell, verbose, views_option
from daskcnn.cli.flags import cluster_of, cluster_options
from daskcnn.documents import dumps
from daskcnn.export import FORMATS
from daskcnn.job.tables import CheckpointChoice, Cluster
from daskcnn.nn.network import Views
from daskcnn.planning.show_model import named_models, show_model
from daskcnn.show.renderers.network_text import (
    readable_evaluation,
    readable_model,
    readable_models,
    readable_predictions,
    readable_table,
)
from daskcnn.show.renderers.terminal import say

if TYPE_CHECKING:
    from daskcnn.trained.predictions.sources import PartChoice


@click.command(cls=Command)
@click.argument("model", metavar="MODEL|JOB.toml")
@click.option(
    "--dataset",
    metavar="NAME|PATH|HxWxC",
    help="A data set, or the size of its images.  [default: what the network was described for]",
)
@click.option("--classes", type=click.IntRange(1), help="Outputs.  [default: those the network was described for]")
@click.option("--batch", type=click.IntRange(1), help="Samples in a minibatch.  [default: the job's, or 128]")
@click.option("--picture", metavar="FILE", help="Draw the network into this file; its ending says SVG or PNG.")
@as_json
@import_option
@verbose
def model(
    model: str,
    dataset: str | None,
    classes: int | None,
    batch: int | None,
    picture: str | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Print the layers of a network, by its name or from a job file: outputs, parameters, operations, memory."""
    found = show_model(model, images=dataset, classes=classes, batch=batch, picture=picture)
    tell(json.dumps(found, indent=2) if as_json else readable_model(found))


@click.command(cls=Command)
@as_json
@verbose
def models(as_json: bool, **_: Any) -> None:
    """List the networks that have a name: images, parameters, operations, and where they are from."""
    found = named_models()
    tell(json.dumps(found, indent=2) if as_json else readable_models(found))


@click.command(cls=Command)
@click.argument("run")
@checkpoint_option
@click.option("--data", "path", metavar="PATH", help="Another data set of the same shape and classes.")
@click.option(
    "--csv", "csv_file", metavar="FILE", help="Write the figures of each class to FILE too (-: stdout alone)."
)
@click.option("--picture", metavar="FILE", help="Draw the confusion matrix into FILE; its ending says SVG or PNG.")
@click.option("--keep", is_flag=True, help="Keep the result in RUN, where report --html finds it.")
@views_option
@as_json
@import_option
@verbose
def evaluate(
    run: str,
    checkpoint: CheckpointChoice | None,
    path: str | None,
    csv_file: str | None,
    picture: str | None,
    keep: bool,
    views: Views | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Print accuracy, loss and AUC of RUN's network on the test samples, and precision and recall of each class.

    RUN is a run directory, one of its checkpoints, or a model that was exported to safetensors.
    An exported model needs --data.
    """
    from daskcnn.trained import evaluate as evaluating

    if csv_file == "-" and as_json:
        raise click.UsageError("--json and --csv -: each prints a form of its own; give one of them")
    how: dict[str, Any] = {"checkpoint": checkpoint, "path": path, "picture": picture, "keep": keep, "views": views}
    how["csv_file"] = None if csv_file == "-" else csv_file
    result = evaluating.evaluate(run, say=say, **how)
    if csv_file == "-":
        tell(evaluating.evaluation_csv(result), nl=False)
        return
    tell(dumps(result, indent=2) if as_json else readable_evaluation(result))
    if csv_file:
        evaluating.write_evaluation(result, csv_file)


@click.command(cls=Command)
@click.argument("run")
@click.argument("data", nargs=-1, required=True)
@checkpoint_option
@click.option("--top", type=click.IntRange(1), help="Number of classes to print.  [default: 3]")
@click.option("--out", metavar="FILE", help="Write all predictions to a .csv, .parquet or .zarr, over a cluster.")
@click.option("--part", type=click.Choice(["train", "test", "all"]), help="Of a data set.  [default: test]")
@cluster_options
@click.option("--skip-bad", is_flag=True, help="Pass over files that cannot be read; they have no prediction.")
@views_option
@as_json
@import_option
@verbose
def predict(
    run: str,
    data: tuple[str, ...],
    checkpoint: CheckpointChoice | None,
    top: int | None,
    out: str | None,
    part: PartChoice | None,
    skip_bad: bool,
    views: Views | None,
    as_json: bool,
    verbose: bool,
    **cluster: str | tuple[str, ...] | None,
) -> None:
    """Print the likeliest classes of image files by RUN's network, or predict all of DATA into a table.

    RUN is a run directory, one of its checkpoints, or a model that was exported to safetensors. DATA are image files;
    with --out also a prepared data set, a Zarr array or a folder of images. The same command goes on with what an
    earlier one did. Without a scheduler a local cluster starts.
    """
    from daskcnn.trained.predict import predict as predict_files
    from daskcnn.trained.predictions.whole import predict_whole

    if out is not None:
        if top is not None:
            raise click.UsageError("--top: a table has the probabilities of all classes; leave it out")
        there = cluster_of(cluster) or Cluster()
        how: dict[str, Any] = {"checkpoint": checkpoint, "part": part, "skip_bad": skip_bad, "views": views}
        done = predict_whole(run, data, out, cluster=there, say=say, **how)
        tell(json.dumps(done, indent=2) if as_json else readable_table(done))
        return
    if part or skip_bad or any(cluster.values()):
        raise click.UsageError(
            "--part, --skip-bad, --scheduler, --scheduler-file, --workers, --only and --wait need --out"
        )
    result = predict_files(run, data, checkpoint=checkpoint, top=top or 3, say=say, views=views)
    tell(json.dumps(result, indent=2) if as_json else readable_predictions(result))


@click.command(cls=Command)
@click.argument("run")
@click.option("--to", type=click.Choice(list(FORMATS)), required=True, help="Format of the file.")
@click.option("--out", metavar="FILE", help="File to write.  [default: model.onnx, .py or .safetensors in RUN]")
@checkpoint_option
@import_option
@verbose
def export(run: str, to: str, out: str | None, checkpoint: CheckpointChoice | None, **_: Any) -> None:
    """Write RUN's network for other programs.

    RUN is a run directory, one of its checkpoints, or a model that was exported to safetensors.
    """
    from daskcnn.trained.place import export as export_network

    for file in export_network(run, to, out=out, checkpoint=checkpoint, say=say):
        tell(file)
