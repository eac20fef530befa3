"""What a simulation shows: for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from daskcnn.launch.simulate import Scenario, Simulated
from daskcnn.ps.downpour import Downpour
from daskcnn.sharded import eq2_elements
from daskcnn.show.report_text import format_report
from daskcnn.show.text import aligned, count, duration, number, percent, size
from daskcnn.sim.costs import Constants, Cost, costs
from daskcnn.sim.papers_step import ceiling


def to_dict(result: Simulated) -> dict[str, Any]:
    """For programs: the report, the costs or the step's parts, and the cluster."""
    chosen = result.scenario
    found: dict[str, Any] = {"report": result.report.to_dict(), "cluster": chosen.cluster.model_dump()}
    if chosen.sharded:
        return {**found, "step": _step_dict(chosen)}
    constants = constants_of(chosen)
    return {
        **found,
        "costs": {"constants": asdict(constants), "saturation": constants.saturation, "table": _cost_dicts(constants)},
    }


def _cost_dicts(constants: Constants) -> list[dict[str, Any]]:
    return [asdict(cost) for cost in costs(constants)]


def _step_dict(chosen: Scenario) -> dict[str, Any]:
    sharding = chosen.sharding(chosen.cluster)
    return {
        **asdict(sharding.step()),
        "serial": sharding.serial,
        "ceiling": ceiling(sharding.serial),
        "speedup": sharding.speedup(),
        "eq2_elements": eq2_elements(sharding.specs),
    }


def readable(result: Simulated) -> str:
    """For people: the cluster, the report of the run, and the formulas' figures beside it."""
    chosen = result.scenario
    more = _step_lines(chosen) if chosen.sharded else _cost_lines(constants_of(chosen))
    report = result.report
    if all(look.validation_accuracy is None for look in report.looks):  # nothing was learnt
        report = replace(report, looks=())
    return "\n\n".join([_cluster_lines(chosen), format_report(report), more])


def _cluster_lines(chosen: Scenario) -> str:
    cluster, members = chosen.cluster, chosen.cluster.members()
    server, latencies = cluster.server, [member.latency for member in members]
    kinds = ", ".join(f"{sum(m.kind == kind for m in members)} {kind}" for kind in sorted({m.kind for m in members}))
    lines = [
        ("cluster", f"{chosen.source}: {kinds} of {_span([m.images_per_second for m in members])} images/s"),
        ("links", f"{_bandwidths([m.bandwidth for m in members])}, {1000 * min(latencies):.3g} ms and more a message"),
        ("server", f"{_bandwidths([server.bandwidth])} each way, merges {_bandwidths([server.merge_rate])}"),
        ("overheads", f"{_ms(cluster.costs.dispatch)} a round, {_ms(cluster.costs.exchange)} an exchange"),
    ]
    return "\n".join(f"{label:<12}{text}" for label, text in lines)


def _ms(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return count(low) if low == high else f"{count(low)} to {count(high)}"


def _bandwidths(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "without limit"
    low, high = min(known), max(known)
    return f"{size(low)}/s" if low == high else f"{size(low)}/s to {size(high)}/s"


def constants_of(chosen: Scenario) -> Constants:
    """Hegde and Usmani's letters for this job and cluster: of its workers the middle one, of the run its updates."""
    workload, cluster = chosen.workload, chosen.cluster
    members = sorted(cluster.members(), key=lambda member: member.seconds)
    middle, server = members[len(members) // 2], cluster.server.split(workload.shards)
    bandwidth = min(b for b in (middle.bandwidth, server.bandwidth, np.inf) if b is not None)
    between = workload.rule.n_push if isinstance(workload.rule, Downpour) else 1
    receive = workload.nbytes / server.bandwidth if server.bandwidth else 0.0
    merge = workload.nbytes / server.merge_rate if server.merge_rate else 0.0
    H, W, C = chosen.images.shape
    return Constants(
        k=len(members),
        p=workload.numbers,
        D=workload.samples,
        q=middle.threads,
        theta=-(-workload.samples * workload.epochs // (workload.batch_size * between)),
        T=between * workload.batch_size * middle.seconds,
        tau=max(receive, merge),
        add=merge / workload.numbers,
        B=float(bandwidth),
        L=middle.latency + cluster.costs.exchange,
        itemsize=np.dtype(workload.wire).itemsize,
        sample_bytes=H * W * C,
    )


def _cost_lines(c: Constants) -> str:
    rows = [("rule", "cost", "grows as", "here"), *((x.rule, x.what, x.formula, _value(x)) for x in costs(c))]
    saturation = "not known: the server has no limit" if c.saturation is None else f"{c.saturation:.1f} workers"
    head = [
        "costs by Hegde & Usmani",
        f"  k = {c.k}, p = {count(c.p)}, N = {count(c.D / c.k)}, q = {c.q}, T = {_ms(c.T)}, tau = {_ms(c.tau)}, "
        f"theta = {count(c.theta)}, eps = {c.epsilon:g}",
    ]
    lines = [f"  {line}" for line in aligned(rows, left=3)]
    return "\n".join([*head, *lines, f"  Downpour is saturated by T/tau: {saturation}"])


def _value(cost: Cost) -> str:
    return size(cost.value) if cost.unit == "B" else _ms(cost.value)


def _step_lines(chosen: Scenario) -> str:
    sharding = chosen.sharding(chosen.cluster)
    step, batch = sharding.step(), sharding.batch
    moved = sum(step.up) + sum(step.down)
    lines = [
        (
            "a step",
            f"{_ms(step.seconds)}: communication {_ms(step.comm)}, convolutions {_ms(step.conv)}, the rest "
            f"{_ms(step.comp)}",
        ),
        (
            "speed-up",
            f"{sharding.speedup():.2f} against {sharding.workers[sharding.home].name} alone; at most "
            f"{number(ceiling(sharding.serial))}, as {percent(sharding.serial)} of its step is serial",
        ),
        (
            "bytes",
            f"{size(moved)} a step of {batch}; by eq. 2 {size(sharding.itemsize * eq2_elements(sharding.specs))}, "
            f"which counts {number(eq2_elements(sharding.specs))} numbers",
        ),
    ]
    return "\n".join(["a step of sharded layers", *(f"  {label:<10}{text}" for label, text in lines)])
