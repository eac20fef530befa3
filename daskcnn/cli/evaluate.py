"""`daskcnn evaluate`."""

from __future__ import annotations

from typing import Any

import click

from daskcnn.cli.command import Command, as_json, checkpoint_option, tell, verbose, views_option
from daskcnn.nn.views import Views
from daskcnn.runs.files import dumps
from daskcnn.show.stderr import say
from daskcnn.show.trained_text import readable_evaluation
from daskcnn.trained import evaluate as evaluating
from daskcnn.trained.trained_run import Which


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
@verbose
def evaluate(
    run: str,
    checkpoint: Which,
    path: str | None,
    csv_file: str | None,
    picture: str | None,
    keep: bool,
    views: Views | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Print accuracy, loss and AUC of RUN's network on the test samples, and precision and recall of each class."""
    if csv_file == "-" and as_json:
        raise click.UsageError("--json and --csv -: each prints a form of its own; give one of them")
    result = evaluating.evaluate(run, which=checkpoint, path=path, say=say, picture=picture, keep=keep, views=views)
    if csv_file == "-":
        tell(evaluating.evaluation_csv(result), nl=False)
        return
    if csv_file:
        evaluating.write_evaluation(result, csv_file)
    tell(dumps(result, indent=2) if as_json else readable_evaluation(result))
