"""A simulation in aligned text: its cluster, its report, and what the papers' formulas say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from daskcnn.sharded.stages import eq2_elements
from daskcnn.show.renderers.run_text import format_report
from daskcnn.show.report_tables import RunReport
from daskcnn.show.text import aligned, count, duration, number, percent, size
from daskcnn.sim.cluster import SimulatedCluster
from daskcnn.sim.papers_costs import Constants, Sharding, ceiling, costs

Formulas = Constants | Sharding
"""The papers' formulas: of a data-parallel job their constants, of sharded kernels the step."""


def simulation_dict(cluster: SimulatedCluster, report: RunReport, formulas: Formulas) -> dict[str, Any]:
    """Return the report, the costs or the step's parts, and the cluster, for JSON."""
    found: dict[str, Any] = {"report": report.to_dict(), "cluster": cluster.model_dump()}
    if isinstance(formulas, Constants):
        table = [asdict(cost) for cost in costs(formulas)]
        return {**found, "costs": {"constants": asdict(formulas), "saturation": formulas.saturation, "table": table}}
    step = {
        **asdict(formulas.step()),
        "serial": formulas.serial,
        "ceiling": ceiling(formulas.serial),
        "speedup": formulas.speedup(),
        "eq2_elements": eq2_elements(formulas.specs),
    }
    return {**found, "step": step}


def format_simulation(source: str, cluster: SimulatedCluster, report: RunReport, formulas: Formulas) -> str:
    """Return the cluster and its source, the report of the run, and the formulas' figures, as text."""
    more = _step_lines(formulas) if isinstance(formulas, Sharding) else _cost_lines(formulas)
    if all(look.validation_loss is None for look in report.looks):  # nothing was learnt
        report = replace(report, looks=())
    return "\n\n".join([_cluster_lines(source, cluster), format_report(report), more])


def _cluster_lines(source: str, cluster: SimulatedCluster) -> str:
    members = cluster.members()
    server, latencies = cluster.server, [member.latency for member in members]
    kinds = ", ".join(f"{sum(m.kind == kind for m in members)} {kind}" for kind in sorted({m.kind for m in members}))
    low, high = (choose(m.images_per_second for m in members) for choose in (min, max))
    speeds = count(low) if low == high else f"{count(low)} to {count(high)}"
    lines = [
        ("cluster", f"{source}: {kinds} of {speeds} images/s"),
        ("links", f"{_bandwidths([m.bandwidth for m in members])}, {1000 * min(latencies):.3g} ms and more a message"),
        ("server", f"{_bandwidths([server.bandwidth])} each way, merges {_bandwidths([server.merge_rate])}"),
        ("overheads", f"{_ms(cluster.costs.dispatch)} a round, {_ms(cluster.costs.exchange)} an exchange"),
    ]
    return "\n".join(f"{label:<12}{text}" for label, text in lines)


def _ms(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _bandwidths(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "without limit"
    low, high = min(known), max(known)
    return f"{size(low)}/s" if low == high else f"{size(low)}/s to {size(high)}/s"


def _cost_lines(c: Constants) -> str:
    rows = [("rule", "cost", "grows as", "here")]
    rows += [(x.rule, x.what, x.formula, size(x.value) if x.unit == "B" else _ms(x.value)) for x in costs(c)]
    saturation = "not known: the server has no limit" if c.saturation is None else f"{c.saturation:.1f} workers"
    head = [
        "costs by Hegde & Usmani",
        f"  k = {c.k}, p = {count(c.p)}, N = {count(c.D / c.k)}, q = {c.q}, T = {_ms(c.T)}, tau = {_ms(c.tau)}, "
        f"theta = {count(c.theta)}, eps = {c.epsilon:g}",
    ]
    lines = [f"  {line}" for line in aligned(rows, left=3)]
    return "\n".join([*head, *lines, f"  Downpour is saturated by T/tau: {saturation}"])


def _step_lines(sharding: Sharding) -> str:
    step, batch = sharding.step(), sharding.batch
    moved = sum(step.up) + sum(step.down)
    parts = f"communication {_ms(step.comm)}, convolutions {_ms(step.conv)}, the rest {_ms(step.comp)}"
    most = f"at most {number(ceiling(sharding.serial))}, as {percent(sharding.serial)} of its step is serial"
    numbers = eq2_elements(sharding.specs)
    by_eq2 = f"by eq. 2 {size(sharding.itemsize * numbers)}, which counts {number(numbers)} numbers"
    lines = [
        f"a step    {_ms(step.seconds)}: {parts}",
        f"speed-up  {sharding.speedup():.2f} against {sharding.workers[sharding.home].name} alone; {most}",
        f"bytes     {size(moved)} a step of {batch}; {by_eq2}",
    ]
    return "\n".join(["a step of sharded layers", *(f"  {line}" for line in lines)])
