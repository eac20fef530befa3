"""What a trained network was found to do, for people: evaluations and predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from daskcnn.show.text import clean, count, percent, plain
from daskcnn.show.text_table import TextTable

MOST_ROWS, MOST_COLUMNS = 200, 20
"""Classes up to which their figures are printed, and the confusion matrix."""
_NAMES = 40
"""Letters of all names that stand above a confusion matrix."""
CONFUSION = "samples of each class (rows) by the network's answer (columns)"


def readable_evaluation(result: Mapping[str, Any]) -> str:
    """The figures in two lines, a table by class, and the confusion matrix. A network without classes has its loss."""
    seen = "" if result["views"] == "none" else f", scores averaged over views: {result['views']}"
    lines = [judged_line(result), f"checkpoint {result['checkpoint']}{seen}"]
    if result["classes"]:
        lines += ["", *_by_class(result), *_confusion(result)]
    return plain("\n".join(lines))


def judged_line(result: Mapping[str, Any]) -> str:
    """The figures of all samples together; of a network that reconstructs images, its loss."""
    samples = f"{result['samples']:,} test samples of {clean(result['data'])}"
    if result["labels"] == "image":
        return f"loss {_loss(result['loss'])} on {samples}"
    top = "" if result["top5"] is None else f", top-5 {100 * result['top5']:.2f} %"
    accuracy = "accuracy by label" if result["labels"] == "several" else "accuracy"
    figures = f"{accuracy} {100 * result['accuracy']:.2f} %{top}, loss {_four(result['loss'])}"
    return f"{figures}, AUC {_four(result['auc'])} on {samples}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _four(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _by_class(result: Mapping[str, Any]) -> list[str]:
    if len(result["classes"]) > MOST_ROWS:
        return [f"{len(result['classes']):,} classes: --csv FILE has the figures of each"]
    return class_table(result).lines()


def class_table(result: Mapping[str, Any]) -> TextTable:
    """Precision, recall and AUC of each class or label."""
    rows = tuple(
        (clean(c["class"]), count(c["samples"]), percent(c["precision"]), percent(c["recall"]), _four(c["auc"]))
        for c in result["classes"]
    )
    some = f"AUC of {result['auc_samples']:,} of the samples" if result["auc_samples"] < result["samples"] else ""
    head = "label" if result["labels"] == "several" else "class"
    return TextTable((head, "samples", "precision", "recall", "AUC"), rows, note=some)


def _confusion(result: Mapping[str, Any]) -> Iterator[str]:
    """The matrix with a number for each class, where it is not too wide to be read."""
    confusion = result["confusion"]
    if confusion is None:
        return
    yield ""
    if len(confusion) > MOST_COLUMNS:
        yield f"{len(confusion)} classes: --csv FILE or --picture FILE shows which of them are taken for which"
        return
    yield CONFUSION
    yield from confusion_table(result).lines()


def confusion_table(result: Mapping[str, Any]) -> TextTable:
    """How many samples of the class of a row were answered with the class of a column.

    Columns have the names of the classes, or numbers for each class where names are too long for a line.
    """
    names = tuple(clean(c["class"]) for c in result["classes"])
    short = sum(map(len, names)) <= _NAMES
    numbers = ("",) * len(names) if short else tuple(map(str, range(len(names))))
    rows = zip(numbers, names, result["confusion"], strict=True)
    heads = names if short else numbers
    return TextTable(("", "", *heads), tuple((i, name, *map(str, row)) for i, name, row in rows), left=2)


def readable_predictions(results: Sequence[Mapping[str, Any]]) -> str:
    """A line an image, its classes by probability. "; " separates them, for a class's name may have commas.

    A network that reconstructs images has a loss for each.
    """
    return "\n".join(f"{clean(r['image'])}: {_told(r)}" for r in results)


def _told(result: Mapping[str, Any]) -> str:
    if "loss" in result:
        return f"loss {_loss(result['loss'])}"
    return "; ".join(f"{clean(c['class'])} {100 * c['probability']:.1f} %" for c in result["classes"])


def readable_table(done: Mapping[str, Any]) -> str:
    """Where the predictions of how many samples are."""
    rate = done["samples"] / max(done["seconds"], 1e-9)
    missing = f", {done['unreadable']:,} of them unreadable" if done["unreadable"] else ""
    return plain(
        f"{clean(done['out'])}: {done['samples']:,} samples of {clean(done['data'])}{missing}, "
        f"{done['seconds']:.1f} s, {rate:,.0f} a second"
    )
