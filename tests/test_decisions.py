"""Decisions of the method are made in one place: `cluster/` and `sim/` choose nothing by rule, partition or patience.

They ask a rule or a machine of `daskcnn.training` instead. Numbers of the job that decide something may be handed over
(as an argument, in a dictionary, in a message), but not calculated with, compared or kept.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import daskcnn
from daskcnn.partition import PARTITIONERS
from daskcnn.ps import RULES

ROOT = Path(daskcnn.__file__).parent
ROOMS = ("cluster", "sim")
NAMES = {*RULES, *PARTITIONERS, "layer", "allreduce", "asa", "asa16", "measured", "speeds"}
"""Values of train.strategy, train.partition, rule.exchange and train.kernel_shares."""
CLASSES = {
    each.__name__
    for chosen in (*RULES.values(), *PARTITIONERS.values())
    for each in chosen.__mro__
    if each.__module__.startswith(("daskcnn.ps", "daskcnn.partition"))
}
"""Rules and partitioners, with their bases."""
NUMBERS = {"stall_timeout", "patience", "early_stopping", "checkpoint_every", "fewest", "barrier", "due"}
PROPERTIES = {"fewest", "barrier", "due"}
"""Properties of a rule that only decisions need."""

LIMIT = "how long one call or transfer may take; what follows is the coordinator's"
ALLOWED = {
    ("cluster/shell/layer_sharded.py", "self.settings.stall_timeout"): "the silent are named; the coordinator asked",
    ("cluster/layers/transfers.py", "context.session.replica.job.cluster.stall_timeout"): LIMIT,
    ("cluster/run/server_hosts.py", "context.job.cluster.stall_timeout"): LIMIT,
    ("sim/measured.py", "workload.rule.barrier"): "reads logs: where a gap comes from, nothing follows from it",
}
"""What is left, and why. This list only gets shorter."""


def choices(tree: ast.AST) -> Iterator[str]:
    """Every choice in the code, as it is written there."""
    handed_over = set(_handed_over(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]):
                if _names(kind) & CLASSES:
                    yield ast.unparse(node)
            case ast.Compare():
                if any(isinstance(each, ast.Constant) and each.value in NAMES for each in ast.walk(node)):
                    yield ast.unparse(node)
            case ast.MatchValue(value=ast.Constant(value=value)) if value in NAMES:
                yield f"case {value!r}"
            case ast.MatchClass(cls=kind) if _names(kind) & CLASSES:
                yield f"case {ast.unparse(kind)}"
            case ast.Attribute(attr=name, ctx=ast.Load()) if name in NUMBERS:
                if name in PROPERTIES or node not in handed_over:
                    yield ast.unparse(node)


def _handed_over(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(args=args, keywords=keywords):
                yield from (*args, *(keyword.value for keyword in keywords))
            case ast.Dict(values=values):
                yield from values
            case ast.FormattedValue(value=value):
                yield value


def _names(kind: ast.expr) -> set[str]:
    return {each.id for each in ast.walk(kind) if isinstance(each, ast.Name)} | {
        each.attr for each in ast.walk(kind) if isinstance(each, ast.Attribute)
    }


def found() -> set[tuple[str, str]]:
    """File and choice."""
    return {
        (path.relative_to(ROOT).as_posix(), choice)
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for choice in choices(ast.parse(path.read_text(encoding="utf-8")))
    }


def test_cluster_and_simulator_choose_nothing() -> None:
    new = found() - ALLOWED.keys()
    assert not new, f"{sorted(new)}: ask the rule or the machine that decides"


def test_what_is_allowed_is_still_there() -> None:
    gone = ALLOWED.keys() - found()
    assert not gone, f"{sorted(gone)}: no longer there; take them off the list"


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(rule, BSP)",
        "isinstance(rule, ps.ADMM | AccuracyWeighted)",
        "strategy == 'layer'",
        "job.train.partition in ('idpa', 'udpa')",
        "now - heard > job.cluster.stall_timeout",
        "limit = 2 * settings.stall_timeout",
        "worse >= self.patience",
        "every = run.checkpoint_every",
        "few(rule.fewest)",
        "if rule.due(step, round_end=last): meet()",
        "wait() if rule.barrier else None",
        "match rule:\n case BSP(): pass",
        "match strategy:\n case 'sgwu': pass",
    ],
)
def test_what_is_a_choice(code: str) -> None:
    assert list(choices(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "gather(futures, within=job.cluster.stall_timeout)",
        "Settings(patience=train.early_stopping)",
        "{'limit': cluster.stall_timeout}",
        "f'nothing for {cluster.stall_timeout:g} s'",
        "isinstance(order, StartRound)",
        "kind == 'gpu'",
        "RULES['sgwu']",
    ],
)
def test_what_is_none(code: str) -> None:
    assert not list(choices(ast.parse(code)))
