"""`daskcnn predict`."""

from __future__ import annotations

import json
from typing import Any

import click

from daskcnn.cli.command import Command, as_json, checkpoint_option, tell, verbose, views_option
from daskcnn.cli.run import cluster_options
from daskcnn.datasets.cluster_flags import cluster_of
from daskcnn.job.tables import Cluster
from daskcnn.nn.views import Views
from daskcnn.show.stderr import say
from daskcnn.show.trained_text import readable_predictions, readable_table
from daskcnn.trained import predict as predicting
from daskcnn.trained.predictions.sources import Which as Part
from daskcnn.trained.predictions.whole import predict_whole
from daskcnn.trained.trained_run import Which


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
@verbose
def predict(
    run: str,
    data: tuple[str, ...],
    checkpoint: Which,
    top: int | None,
    out: str | None,
    part: Part | None,
    skip_bad: bool,
    views: Views | None,
    as_json: bool,
    verbose: bool,
    **cluster: str | None,
) -> None:
    """Print the likeliest classes of image files by RUN's network, or predict all of DATA into a table.

    RUN is a run directory, one of its checkpoints, or a model that was exported to safetensors. DATA are image files;
    with --out also a prepared data set or a folder of images. The same command goes on with what an earlier one did.
    Without a scheduler a local cluster starts.
    """
    if out is not None:
        if top is not None:
            raise click.UsageError("--top: a table has the probabilities of all classes; leave it out")
        there = cluster_of(cluster) or Cluster()
        how: dict[str, Any] = {"which": checkpoint, "part": part, "skip_bad": skip_bad, "views": views}
        done = predict_whole(run, data, out, cluster=there, say=say, **how)
        tell(json.dumps(done, indent=2) if as_json else readable_table(done))
        return
    if part or skip_bad or any(cluster.values()):
        raise click.UsageError("--part, --skip-bad, --scheduler, --scheduler-file, --workers and --wait need --out")
    result = predicting.predict(run, data, which=checkpoint, top=top or 3, say=say, views=views)
    tell(json.dumps(result, indent=2) if as_json else readable_predictions(result))
