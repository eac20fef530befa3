"""A trained network as a Python module of plain PyTorch, and its `state_dict` as safetensors beside it.

The module needs torch and safetensors, nothing of ours. Names from outside appear in it as literals only.
"""

from __future__ import annotations

from collections.abc import Iterable
from keyword import iskeyword
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as encode

from daskcnn.errors import UserError
from daskcnn.export.torch_layers import JOINS, attribute, lines_of, state_dict
from daskcnn.export.trained_layers import TrainedLayer, trained_layers, version
from daskcnn.files import replace_file
from daskcnn.nn.layers.parallel import Parallel
from daskcnn.nn.losses import SigmoidReconstruction
from daskcnn.nn.sequential import Sequential
from daskcnn.store import Described
from daskcnn.store.chunk_facts import mark_of
from daskcnn.training.trained_network import Classifier

WEIGHTS = ".weights.safetensors"
"""Takes the place of the module's suffix."""

_IMPORTED = ("pathlib", "safetensors", "torch")
"""What the module imports: under one of these names it would import itself."""

_MODULE = '''"""A network that daskcnn trained, in plain PyTorch. The weights are in the {weights} file beside this one.

model = load()
model.{answer}(images)      # images ({N_SHAPE}) {at_rest}, not normalised; the result is ({result})

Called as a module, the network returns the scores in front of the {activation}, for training on.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

RUN = {run}
VERSION = {version}
CLASSES = {names}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros({C}, 1, 1))
        self.register_buffer("deviation", torch.ones({C}, 1, 1))
{modules}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images.to(self.mean.dtype)
        {normalised}
{forward}
        return x

    @torch.no_grad()
    def {answer}(self, images: torch.Tensor) -> torch.Tensor:
        return {answer_of}


def load(weights: str | Path | None = None) -> Network:
    """Return the trained network, ready to predict."""
    model = Network().to(torch.{dtype})
    model.load_state_dict(load_file(weights or Path(__file__).with_suffix({suffix!r})))
    return model.eval()
'''


def write_torch(classifier: Classifier, run: str, out: Path) -> tuple[Path, ...]:
    """Write the module and its weights; returns both. Raises UserError for a layer without converter, and OSError."""
    if not out.stem.isidentifier() or iskeyword(out.stem) or out.suffix != ".py":
        raise UserError(f"--out {out.name}", "no name that Python can import", "give one such as network.py")
    if out.stem in _IMPORTED:
        raise UserError(f"--out {out.name}", f"the module itself imports {out.stem}", "give one such as network.py")
    code, tensors = torch_module(classifier, run)
    weights = out.with_suffix(WEIGHTS)
    replace_file(weights, encode(tensors, {"format": "pt", "run": run, "version": version()}))
    replace_file(out, code.encode())
    return out, weights


def torch_module(classifier: Classifier, run: str = "") -> tuple[str, dict[str, Any]]:
    """Return the module's text and its `state_dict`."""
    network = _Code()
    for trained in trained_layers(classifier):
        network.add(trained)
    facts, dtype = classifier.facts, classifier.job.model.dtype
    H, W, C = facts.shape
    code = _MODULE.format(
        weights=WEIGHTS,
        N_SHAPE=f"N, {C}, {H}, {W}",
        at_rest=facts.dtype.name,
        **_answer(classifier),
        normalised=_normalised(facts),
        run=ascii(run),
        version=ascii(version()),
        names=_literal_list(facts.classes),
        C=C,
        modules=_indented(network.modules),
        forward=_indented(network.forward),
        dtype=dtype,
        suffix=WEIGHTS,
    )
    scaling = {"mean": facts.mean, "deviation": facts.deviation}
    state: dict[str, Any] = {k: np.array(v, dtype, order="C").reshape(C, 1, 1) for k, v in scaling.items()}
    return code, state | network.state


class _Code:
    """The lines of the modules and of the forward pass, and the `state_dict`, as layers are added."""

    def __init__(self) -> None:
        self.modules, self.forward = list[str](), list[str]()
        self.state: dict[str, Any] = {}

    def add(self, trained: TrainedLayer) -> None:
        """Add a layer that takes x and leaves its output there. Raises UserError for one without converter."""
        if isinstance(trained.layer, Sequential):
            for child in trained.children:
                self.add(child)
        elif isinstance(trained.layer, Parallel):
            self._add_paths(trained, trained.layer)
        else:
            line = lines_of(trained)
            self.modules += [f"self.{attribute(trained)} = {line.module}"] if line.module else []
            self.forward.append(f"x = {line.forward}")
            self.state |= state_dict(trained, line)

    def _add_paths(self, trained: TrainedLayer, layer: Parallel) -> None:
        """Add paths that begin at the same x, and join their outputs."""
        given, inner = attribute(trained), {child.name.rpartition(".")[2]: child for child in trained.children}
        self.forward.append(f"{given} = x")
        outputs = []
        for name, path in layer.paths:
            outputs.append(given if path is None else f"{given}_{name}")
            if path is not None:
                self.forward.append(f"x = {given}")
                self.add(inner[name])
                self.forward.append(f"{given}_{name} = x")
        self.forward.append(f"x = {JOINS[type(layer)](outputs)}")


def _answer(classifier: Classifier) -> dict[str, str]:
    """What the module's method that takes images is called, and what it returns."""
    facts = classifier.facts
    H, W, C = facts.shape
    if not classifier.reconstructs:
        softmax = facts.labels == "classes"
        return {
            "answer": "probabilities",
            "result": f"N, {len(facts.classes)}",
            "activation": "softmax" if softmax else "sigmoid",
            "answer_of": f"self(images).{'softmax(1)' if softmax else 'sigmoid()'}",
        }
    own = isinstance(classifier.loss, SigmoidReconstruction)
    vector = len(classifier.model.out_shape(facts.shape)) == 1
    pixels = "self(images)" + (f".reshape(-1, {H}, {W}, {C}).permute(0, 3, 1, 2)" if vector else "")
    return {
        "answer": "reconstructed",
        "result": f"N, {C}, {H}, {W}",
        "activation": "sigmoid" if own else "scale of the images",
        "answer_of": f"{pixels}{'.sigmoid()' if own else ''} * self.deviation + self.mean",
    }


def _normalised(facts: Described) -> str:
    """The lines that subtract and divide; pixels without data become 0, the mean."""
    scaled = "(x - self.mean) / self.deviation"
    if facts.nodata is None:
        return f"x = {scaled}"
    mark = mark_of(facts.nodata, facts.dtype)
    missing = "missing = torch.isnan(x)" if mark is None else f"missing = (x == {float(mark)!r}) | torch.isnan(x)"
    return f"{missing}\n        x = ({scaled}).masked_fill(missing, 0.0)"


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(f"        {line}" for line in lines)


def _literal_list(names: Iterable[str]) -> str:
    """A list of strings in Python, a line each; all characters but ASCII are escaped."""
    return "[\n" + "".join(f"    {name!a},\n" for name in names) + "]"
