"""What a trained network was found to do, for people: evaluations and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from daskcnn.show.text import clean, plain


def readable_evaluation(result: Mapping[str, Any]) -> str:
    """The figures in two lines."""
    auc = "-" if result["auc"] is None else f"{result['auc']:.4f}"
    return plain(
        f"accuracy {100 * result['accuracy']:.2f} %, loss {result['loss']:.4f}, AUC {auc} "
        f"on {result['samples']:,} test samples of {result['data']}\ncheckpoint {result['checkpoint']}"
    )


def readable_predictions(results: Sequence[Mapping[str, Any]]) -> str:
    """A line an image, its classes by probability."""
    return "\n".join(
        f"{clean(r['image'])}: "
        + ", ".join(f"{clean(c['class'])} {100 * c['probability']:.1f} %" for c in r["classes"])
        for r in results
    )


def readable_table(done: Mapping[str, Any]) -> str:
    """Where the predictions of how many samples are."""
    rate = done["samples"] / max(done["seconds"], 1e-9)
    missing = f", {done['unreadable']:,} of them unreadable" if done["unreadable"] else ""
    return plain(
        f"{clean(done['out'])}: {done['samples']:,} samples of {clean(done['data'])}{missing}, "
        f"{done['seconds']:.1f} s, {rate:,.0f} a second"
    )
