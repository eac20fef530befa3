"""A job's keys and its data set in aligned text.

Networks in aligned text: layers, plans of convolutions, evaluations, predictions.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from daskcnn.conv import ConvSpec
from daskcnn.conv.planner import readable, unusual
from daskcnn.job.reference import TableEntry
from daskcnn.show.text import (
    TextTable,
    aligned,
    checkpoint_text,
    clean,
    count,
    measured,
    number,
    percent,
    plain,
    plural,
    size,
)

_MOST_CHANNELS = 16


def readable_dataset(found: Mapping[str, Any]) -> str:
    """Return the facts of a data set, then a line for each class."""
    train, test = found["train"], found["test"]
    H, W, C = found["shape"]
    several = found["labels"] == "several"
    shuffle = f", seed {found['seed']}" if found["order"] == "shuffled" else ""
    nodata = "" if found["nodata"] is None else f"; {found['nodata']:g} stands for no data"
    weights = ", ".join(
        f"{name} {number(found['weights'][name])}" for name in ("least", "mean", "most") if found["weights"]
    )
    rows = [
        ("data", f"{clean(found['name'])} at {clean(found['path'])}, fingerprint {found['fingerprint'][:12]}"),
        ("images", f"{H}x{W}x{C} {found['dtype']}, {size(found['bytes'])} in all{nodata}"),
        ("samples", f"{count(train['samples'])} to train, {count(test['samples'])} to test"),
        ("chunks", f"{train['chunks']:,} + {test['chunks']:,} of {count(found['chunk'])} samples"),
        ("order", f"{found['order']}{shuffle}; {plural(count(found['sources']), 'source file')}"),
        ("labels", "several a sample" if several else "one class a sample"),
        ("mean", _numbers(found["mean"])),
        ("deviation", _numbers(found["deviation"])),
        *([("weights", f"one for each training sample: {weights}")] if weights else ()),
        *(("picture", clean(file)) for file in found["pictures"]),
    ]
    head = [f"{name:<10}{text}" for name, text in rows]
    label = "label" if several else "class"
    table = [(label, "train", "test")]
    table += [(clean(c["class"]), count(c["train"]), count(c["test"])) for c in found["classes"]]
    return "\n".join([*head, "", *aligned(table)])


def _numbers(values: Sequence[float]) -> str:
    more = f", ... ({len(values):,} channels)" if len(values) > _MOST_CHANNELS else ""
    return ", ".join(map(number, values[:_MOST_CHANNELS])) + more


MOST = 110  # columns of the text without a width, and at the most


def readable_keys(tables: Iterable[TableEntry], width: int | None = None) -> str:
    """Return every key with its type, its default and its meaning, under the heading of its table."""
    columns = max(40, min(width or MOST, MOST))
    return "\n\n".join("\n".join(_table(table, columns)) for table in tables)


def _table(table: TableEntry, columns: int) -> Iterator[str]:
    of = "strategy" if table.name == "rule" else "step"
    yield f"[{table.name}]" + (f" of {of} {table.member}" if table.member else "")
    yield from _wrapped(table.meaning, columns, "")
    for key in table.keys:
        default = f" = {key.default}" if key.default else ""
        yield from _wrapped(f"{table.name}.{key.name}{default}  ({key.type})", columns, "  ")
        yield from _wrapped(key.meaning, columns, "      ")


def _wrapped(text: str, columns: int, indent: str) -> list[str]:
    plain = text.replace("`", "")
    further = indent if indent != "  " else "      "
    return textwrap.wrap(plain, columns, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)


def readable_model(result: dict[str, Any]) -> str:
    """Return a line a layer: output, parameters, operations of a sample there and back, memory of a batch's outputs."""
    rows = [("layer", "", "output", "parameters", "FLOP forward", "FLOP backward", "memory")]
    for row in result["layers"]:
        alone = bool(row["outputs"])
        own = f"{row['parameters']:,}" if row["parameters"] else "-"
        numbers = own, operations(row["forward"]), operations(row["backward"]), size(row["memory"])
        shown = numbers if alone else ("", "", "", "")
        rows.append((row["name"], row["layer"], times(row["out_shape"]), *shown))
    total = {key: sum(row[key] for row in result["layers"]) for key in ("parameters", "forward", "backward", "memory")}
    sums = (f"{total['parameters']:,}", operations(total["forward"]), operations(total["backward"]))
    rows.append(("total", "", "", *sums, size(total["memory"])))
    head = f"{result['model']} for images of {times(result['image'])}, batch {result['batch']}, {result['dtype']}"
    drawn = [f"figure {result['picture']}"] if result["picture"] else []
    note = "FLOP: products of one image; memory: outputs that a step of training keeps at most."
    return "\n".join([head, "", *aligned(rows, left=2), "", note, *drawn])


def readable_models(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line a network."""
    table = [("model", "images", "parameters", "FLOP forward", "from")]
    table += [
        (row["name"], times(row["image"]), f"{row['parameters']:,}", operations(row["forward"]), row["origin"])
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        f"{name:<{widths[0]}}  {image:>{widths[1]}}  {count:>{widths[2]}}  {flop:>{widths[3]}}  {origin}"
        for name, image, count, flop, origin in table
    ]
    return "\n".join([*lines, "C1:C2, such as 50:500: two 5×5 convolutions of C1 and C2 kernels (Marques et al.)"])


def operations(count: int) -> str:
    """Return three digits and a unit: '1.23 G'; '-' for none."""
    for unit, many in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * many:
            return f"{count / many:.3g} {unit}"
    return str(count) if count else "-"


def times(shape: Sequence[int]) -> str:
    """Return a shape as '32×32×3'."""
    return "×".join(map(str, shape))


def readable_conv_plans(result: dict[str, Any]) -> str:
    """Return a line a convolution; under it the reason, and the seconds of a training step by the other algorithms."""
    rows = [("layer", "convolution", "algorithm", "step", "GFLOP/s", "workspace"), *map(_row, result["layers"])]
    head, *lines = aligned(rows, left=len(rows[0]))
    indent = " " * max(len(row[0]) for row in rows)
    limit = result["workspace_limit"] / 2**20
    told = [
        f"{result['model']}, batch {result['batch']}, {result['dtype']}, on {result['device']}: "
        f"threads {result['threads']}, workspace up to {limit:,.0f} MiB",
        *("", head),
    ]
    for layer, line in zip(result["layers"], lines, strict=True):
        told += [line, *(f"{indent}  {reason}" for reason in _reasons(layer))]
    return "\n".join(told)


def _row(layer: dict[str, Any]) -> tuple[str, ...]:
    s = layer["spec"]
    down, right = s["stride"]
    stride = "" if down == right == 1 else f" stride {down}" if down == right else f" stride {down}×{right}"
    return (
        layer["layer"],
        f"{s['R']}×{s['S']} {s['C']}→{s['K']} on {s['H']}×{s['W']}{stride}{unusual(ConvSpec(**s))}",
        layer["algorithm"],
        readable(layer["seconds"]),
        f"{layer['gflops_per_second']:.0f}",
        f"{layer['workspace'] / 2**20:.1f} MiB",
    )


def _reasons(layer: dict[str, Any]) -> Iterator[str]:
    yield layer["why"]
    others = []
    for c in layer["candidates"]:
        if c["algorithm"] != layer["algorithm"]:
            kind = "predicted" if c["measured"] is None else "measured"
            others.append(f"{c['algorithm']} {readable(c[kind])} ({kind})")
    if others:
        yield f"others: {', '.join(others)}"


MOST_ROWS, MOST_COLUMNS = 200, 20  # classes up to which their figures, and the confusion matrix, are printed
_NAMES = 40  # letters of all names that stand above a confusion matrix
CONFUSION = "samples of each class (rows) by the network's answer (columns)"


def readable_evaluation(result: Mapping[str, Any]) -> str:
    """Return the figures in two lines, a table by class, and the confusion matrix; without classes the loss."""
    seen = "" if result["views"] == "none" else f", scores averaged over views: {result['views']}"
    weights = checkpoint_text(result["checkpoint"], result["choice"], result["epoch"])
    lines = [judged_line(result), f"checkpoint {weights}{seen}"]
    if result["classes"]:
        many = len(result["classes"]) > MOST_ROWS
        by_class = [f"{len(result['classes']):,} classes: --csv FILE has the figures of each"]
        lines += ["", *(by_class if many else class_table(result).lines()), *_confusion(result)]
    return plain("\n".join(lines))


def judged_line(result: Mapping[str, Any]) -> str:
    """Return the figures of all samples; of a network that reconstructs images, its loss."""
    samples = f"{result['samples']:,} test samples of {clean(result['data'])}"
    if result["labels"] == "image":
        return f"loss {_four(result['loss'], '.4g')} on {samples}"
    top = "" if result["top5"] is None else f", top-5 {100 * result['top5']:.2f} %"
    accuracy = "accuracy by label" if result["labels"] == "several" else "accuracy"
    figures = f"{accuracy} {100 * result['accuracy']:.2f} %{top}, loss {_four(result['loss'])}"
    return (
        ", ".join([figures, f"AUC {_four(result['auc'])}", *measured(result.get("metrics") or {})]) + f" on {samples}"
    )


def _four(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else f"{value:{form}}"


def class_table(result: Mapping[str, Any]) -> TextTable:
    """Return the table of precision, recall and AUC of each class or label."""
    rows = tuple(
        (clean(c["class"]), count(c["samples"]), percent(c["precision"]), percent(c["recall"]), _four(c["auc"]))
        for c in result["classes"]
    )
    some = f"AUC of {result['auc_samples']:,} of the samples" if result["auc_samples"] < result["samples"] else ""
    head = "label" if result["labels"] == "several" else "class"
    return TextTable((head, "samples", "precision", "recall", "AUC"), rows, note=some)


def _confusion(result: Mapping[str, Any]) -> Iterator[str]:
    """The matrix, unless it is too wide to be read."""
    if (confusion := result["confusion"]) is None:
        return
    yield ""
    if len(confusion) > MOST_COLUMNS:
        yield f"{len(confusion)} classes: --csv FILE or --picture FILE shows which of them are taken for which"
    else:
        yield from (CONFUSION, *confusion_table(result).lines())


def confusion_table(result: Mapping[str, Any]) -> TextTable:
    """Return the table of the samples of each class (rows) by answer (columns: names, or numbers if they are long)."""
    names = tuple(clean(c["class"]) for c in result["classes"])
    short = sum(map(len, names)) <= _NAMES
    numbers = ("",) * len(names) if short else tuple(map(str, range(len(names))))
    rows = zip(numbers, names, result["confusion"], strict=True)
    heads = names if short else numbers
    return TextTable(("", "", *heads), tuple((i, name, *map(str, row)) for i, name, row in rows), left=2)


def readable_predictions(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a line an image: its classes by probability or, of a network that reconstructs images, its loss."""
    lines = []
    for result in results:
        answers = [f"{clean(c['class'])} {100 * c['probability']:.1f} %" for c in result.get("classes", ())]
        told = f"loss {_four(result['loss'], '.4g')}" if "loss" in result else "; ".join(answers)
        lines.append(f"{clean(result['image'])}: {told}")
    return "\n".join(lines)


def readable_table(done: Mapping[str, Any]) -> str:
    """Return a line about a table of predictions that was written."""
    rate = done["samples"] / max(done["seconds"], 1e-9)
    missing = f", {done['unreadable']:,} of them unreadable" if done["unreadable"] else ""
    return plain(
        f"{clean(done['out'])}: {done['samples']:,} samples of {clean(done['data'])}{missing}, "
        f"{done['seconds']:.1f} s, {rate:,.0f} a second"
    )
