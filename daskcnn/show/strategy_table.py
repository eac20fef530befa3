"""The choice of a strategy: what was compared, each worker's part, and what would change it, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from daskcnn.events import ALONE, SURE, SURER, PricedStep, StrategyChosen, WorkerGain, asked_of, step_time
from daskcnn.show.text import TextTable, aligned, clean, count, percent

_MOST = 12  # rows of the table
_NAMED = 4  # workers that a row names
_GUESSED = (
    f"about: an estimate, until stages, tasks and links of sharded kernels are used; taken where {SURE:g} times as fast"
)


def choice_text(found: StrategyChosen) -> str:
    """Return the lines as one text."""
    return "\n".join(choice_lines(found))


def choice_lines(found: StrategyChosen) -> list[str]:
    """Return the table, the reason in words, and a line for each worker and for each change that matters."""
    parts = [(clean(part.worker), _part(part)) for part in found.parts]
    return [*choice_table(found).lines(), *aligned(parts, left=2), *_changes(found)]


def choice_table(found: StrategyChosen) -> TextTable:
    """Return a row for each strategy that was compared, or for those that matter, and the reason in words.

    The note has a line for the choice, and one for each reading of the table that is not plain.
    """
    rows = _rows(found.candidates)
    of = f" (of {len(found.candidates)} that were compared)" if len(rows) < len(found.candidates) else ""
    chosen = found.candidates[0]
    note = [f"{_before(found)}chosen: {_named(chosen)}{_reason(found)}{of}", *_longer(chosen)]
    note += [_apart(each) for each in rows if each.needed != 1][:1]
    note += [_GUESSED] if any(each.estimated for each in rows) else []
    head = ("strategy", "workers", "computing", "exchange", "a step", "images/s")
    return TextTable(head, tuple(map(_cells, rows)), left=2, note=";\n".join(note))


def _rows(candidates: Sequence[PricedStep]) -> list[PricedStep]:
    """The soonest, the soonest of each strategy and of groups, and that of the most workers."""
    if len(candidates) <= _MOST:
        return list(candidates)
    first = {(each.strategy, each.group is None): each for each in reversed(candidates)}
    kept = [*first.values(), max(candidates, key=lambda each: len(each.samples)), *candidates[:_MOST]]
    return [each for each in candidates if any(each is one for one in kept)]


def _cells(each: PricedStep) -> tuple[str, ...]:
    step = each.compute + each.exchange
    texts = step_time(each.compute), step_time(each.exchange) if each.exchange else "-", step_time(step)
    about = ("about " if each.estimated else "") + count(round(1 / each.seconds))
    return (_kind(each), _workers(each), *texts, about)


def _kind(each: PricedStep) -> str:
    """The strategy, and when its workers meet or which of them share a step."""
    meets = "" if each.every is None else f", every {each.every}"
    return f"{each.strategy}{meets}{_in_groups(each)}"


def _in_groups(each: PricedStep) -> str:
    return "" if each.group is None else f", groups of {each.group}"


def _apart(each: PricedStep) -> str:
    """The reading of a strategy that does not make one machine's steps."""
    made = count(round(each.needed / each.seconds))
    needs = f"is expected to need {each.needed:.2f} times as many as one machine, which the table counts"
    asked = asked_of(each.needed, estimated=each.estimated)
    return f"{each.strategy} makes {made} images/s and {needs}: it is taken where it is {asked:g} times as fast"


def _longer(chosen: PricedStep) -> Iterator[str]:
    """Yield the remark that the same epochs do not bring the same accuracy."""
    if chosen.needed > 1:
        yield f"that is to the same accuracy, for which the job needs {chosen.needed:.2f} times its epochs"


def _workers(each: PricedStep) -> str:
    """The workers and, where they share a step, the samples of each."""
    names = [f"{clean(name)} {n}" if len(each.samples) > 1 else clean(name) for name, n in each.samples.items()]
    return ", ".join(names if len(names) <= _NAMED else [*names[: _NAMED - 1], f"and {len(names) - _NAMED + 1} more"])


def _named(each: PricedStep) -> str:
    names = [clean(name) for name in each.samples]
    shown = ", ".join(names) if len(names) <= _NAMED else f"{len(names)} workers"
    often = "step" if each.every == 1 else f"{each.every} steps"
    meets = "" if each.every is None else f" with a meeting after every {often}"
    return f"{shown} alone" if each.strategy == ALONE else f"{each.strategy}{_in_groups(each)}{meets} on {shown}"


def _before(found: StrategyChosen) -> str:
    """The change, and its figure against the choice."""
    if found.before is None:
        return ""
    longer = found.before.seconds / found.candidates[0].seconds
    times = f"one that was not used counts as {SURER:g} times as slow as measured"
    return f"changed from {_named(found.before)}, which now takes {longer:.2f} times as long ({times}); "


def _reason(found: StrategyChosen) -> str:
    """The figure against the soonest worker alone, or against the soonest strategy of several."""
    chosen, others = found.candidates[0], found.candidates[1:]
    alone = next((each for each in others if each.strategy == ALONE), None)
    if chosen.strategy != ALONE and alone is not None:
        return f", {alone.seconds / chosen.seconds:.2f} times as fast as {_named(alone)}"
    if shared := next((each for each in others if each.strategy != ALONE), None):
        return f": {_named(shared)} would take {shared.seconds / chosen.seconds:.2f} times as long"
    return ": there is one worker, which exchanges nothing"


def _part(part: WorkerGain) -> str:
    if part.used:
        longer = percent(part.without / part.with_it - 1) if part.with_it else ""
        return f"helps: without it {part.step} takes {longer} longer"
    return f"left out: {part.why_left_out}"


def _changes(found: StrategyChosen) -> Iterator[str]:
    """Yield what would change the choice."""
    chosen = found.candidates[0]

    def sooner(then: PricedStep) -> str:
        factor = chosen.seconds / then.seconds
        steps = "by the steps of one machine" if chosen.needed != 1 else "by what is measured"
        than = f"{factor:.2f} times as fast as now" if factor > 1 else steps
        return f"{_named(then)}, {than}"

    if found.faster_link is not None and found.linked is not None:
        yield f"with links {found.faster_link:.3g} times as fast: {sooner(found.linked)}"
    elif found.parts and not all(part.used for part in found.parts):
        yield "no faster link would change it"
    if found.more is not None:
        yield f"with another worker like the fastest: {sooner(found.more)}"
    else:
        yield "another worker like the fastest would bring nothing"
