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
    """A line an image, its classes by probability. "; " separates them, for a class's name may have commas."""
    return "\n".join(
        f"{clean(r['image'])}: "
        + "; ".join(f"{clean(c['class'])} {100 * c['probability']:.1f} %" for c in r["classes"])
        for r in results
    )
