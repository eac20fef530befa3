"""`daskcnn simulate`."""

from __future__ import annotations

from typing import Any

import click

from daskcnn.cli.command import Command, as_json, tell, verbose
from daskcnn.cli.scenario import scenario_options
from daskcnn.planning import simulate as simulation
from daskcnn.reports.plot import draw_paper_figures
from daskcnn.runs.files import dumps
from daskcnn.show.drawing import need_matplotlib
from daskcnn.show.simulation_text import format_simulation, simulation_dict
from daskcnn.show.stderr import say


@click.command(cls=Command)
@click.argument("job", metavar="JOB.toml|RUN")
@scenario_options
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
        need_matplotlib()
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
