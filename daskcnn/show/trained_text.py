"""What a trained network was found to do, for people: evaluations and predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from daskcnn.show.text import aligned, clean, count, percent, plain

MOST_ROWS, MOST_COLUMNS = 200, 20
"""Classes up to which their figures are printed, and the confusion matrix."""


def readable_evaluation(result: Mapping[str, Any]) -> str:
    """The figures in two lines, a table by class, and the confusion matrix. A network without classes has its loss."""
    on = f"on {result['samples']:,} test samples of {result['data']}"
    if result["labels"] == "image":
        return plain(f"loss {result['loss']:.4g} {on}\ncheckpoint {result['checkpoint']}")
    top = "" if result["top5"] is None else f", top-5 {100 * result['top5']:.2f} %"
    accuracy = "accuracy by label" if result["labels"] == "several" else "accuracy"
    lines = [
        f"{accuracy} {100 * result['accuracy']:.2f} %{top}, loss {result['loss']:.4f}, AUC {_area(result['auc'])} {on}",
        f"checkpoint {result['checkpoint']}",
        "",
        *_by_class(result),
        *_confusion(result),
    ]
    return plain("\n".join(lines))


def _area(auc: float | None) -> str:
    return "-" if auc is None else f"{auc:.4f}"


def _by_class(result: Mapping[str, Any]) -> list[str]:
    if len(result["classes"]) > MOST_ROWS:
        return [f"{len(result['classes']):,} classes: --csv FILE has the figures of each"]
    head = "label" if result["labels"] == "several" else "class"
    rows = [
        (clean(c["class"]), count(c["samples"]), percent(c["precision"]), percent(c["recall"]), _area(c["auc"]))
        for c in result["classes"]
    ]
    some = [f"AUC of {result['auc_samples']:,} of the samples"] if result["auc_samples"] < result["samples"] else []
    return aligned([(head, "samples", "precision", "recall", "AUC"), *rows]) + some


def _confusion(result: Mapping[str, Any]) -> Iterator[str]:
    """The matrix with a number for each class, where it is not too wide to be read."""
    confusion, names = result["confusion"], [clean(c["class"]) for c in result["classes"]]
    if confusion is None:
        return
    yield ""
    if len(names) > MOST_COLUMNS:
        yield f"{len(names)} classes: --csv FILE or --picture FILE shows which of them are taken for which"
        return
    yield "samples of each class (rows) by the network's answer (columns)"
    numbers = [str(i) for i in range(len(names))]
    rows = [(i, name, *map(str, row)) for i, name, row in zip(numbers, names, confusion, strict=True)]
    yield from aligned([("", "", *numbers), *rows], left=2)


def readable_predictions(results: Sequence[Mapping[str, Any]]) -> str:
    """A line an image, its classes by probability. "; " separates them, for a class's name may have commas.

    A network that reconstructs images has a loss for each.
    """
    return "\n".join(f"{clean(r['image'])}: {_told(r)}" for r in results)


def _told(result: Mapping[str, Any]) -> str:
    if "loss" in result:
        return f"loss {result['loss']:.4g}"
    return "; ".join(f"{clean(c['class'])} {100 * c['probability']:.1f} %" for c in result["classes"])


def readable_table(done: Mapping[str, Any]) -> str:
    """Where the predictions of how many samples are."""
    rate = done["samples"] / max(done["seconds"], 1e-9)
    missing = f", {done['unreadable']:,} of them unreadable" if done["unreadable"] else ""
    return plain(
        f"{clean(done['out'])}: {done['samples']:,} samples of {clean(done['data'])}{missing}, "
        f"{done['seconds']:.1f} s, {rate:,.0f} a second"
    )
