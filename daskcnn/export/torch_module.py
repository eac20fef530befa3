"""A trained network as a Python module of plain PyTorch, and its `state_dict` as safetensors beside it.

The module needs torch and safetensors, nothing of ours. Names from outside appear in it as literals only. `CONVERTERS`
makes a line of each kind of layer. Maps are (N, C, H, W) there, vectors (N, F).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
from pathlib import Path
from textwrap import indent
from typing import Any, TypeAlias

import numpy as np
from safetensors.numpy import save as encode

from daskcnn.arrays import Array
from daskcnn.errors import UserError
from daskcnn.export.trained_layers import TrainedLayer, converter_of, trained_layers, version
from daskcnn.files import output_file, replace_file
from daskcnn.nn.layers.parallel import Parallel
from daskcnn.nn.losses import SigmoidReconstruction
from daskcnn.nn.sequential import Sequential
from daskcnn.store.chunk_facts import mark_of
from daskcnn.training.trained_network import Classifier


@dataclass(frozen=True, slots=True)
class Lines:
    """A layer in PyTorch: an expression of its input x, and what makes its module, where it has one.

    tensors: the module's parameters and buffers by their names in PyTorch.
    """

    forward: str
    module: str | None = None
    tensors: Mapping[str, Array] = field(default_factory=dict)


Converter: TypeAlias = Callable[[TrainedLayer], Lines]
_HERE = "PyTorch", "daskcnn/export/torch_module.py"


def attribute(trained: TrainedLayer) -> str:
    """Return the name of the layer's module and of its values."""
    return trained.name.replace(".", "_")


def _conv(trained: TrainedLayer) -> Lines:
    layer, s = trained.layer, trained.problem
    (top, left), (below, right) = s.pad, s.pad_end
    uneven = below or right  # nn.Conv2d has the same padding on both sides
    options = {
        "stride": _short(s.stride),
        "padding": 0 if uneven else _short(s.pad),
        "dilation": _short(s.dilation),
        "groups": s.groups,
        "bias": layer.bias,
    }
    usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "bias": True}
    given = "".join(f", {key}={value!r}" for key, value in options.items() if value != usual[key])
    module = f"nn.Conv2d({s.C}, {s.K}, {_short((s.R, s.S))!r}{given})"
    x = f"F.pad(x, ({left}, {left + right}, {top}, {top + below}))" if uneven else "x"
    tensors = {"weight": trained.values["w"].transpose(3, 2, 0, 1)}
    return Lines(f"self.{attribute(trained)}({x})", module, tensors | _bias(trained))


def _short(pair: tuple[int, int]) -> int | tuple[int, int]:
    """Return one number for two that are equal."""
    return pair[0] if pair[0] == pair[1] else pair


def _dense(trained: TrainedLayer) -> Lines:
    layer, of_map = trained.layer, len(trained.in_shape) == 3
    if trained.owner is not None:
        return _tied(trained, trained.owner)
    w = trained.w_chw
    module = f"nn.Linear({len(w)}, {layer.units}{'' if layer.bias else ', bias=False'})"
    forward = f"self.{attribute(trained)}(x.flatten(1))" if of_map else f"self.{attribute(trained)}(x)"
    return Lines(forward, module, {"weight": w.T} | _bias(trained))


def _tied(trained: TrainedLayer, owner: TrainedLayer) -> Lines:
    """Return a product with the owner's weight transposed, in the order of our vectors: channels vary fastest."""
    weight = f"self.{attribute(owner)}.weight"
    if len(owner.in_shape) == 3:
        H, W, C = owner.in_shape
        weight = f"{weight}.unflatten(1, ({C}, {H}, {W})).permute(0, 2, 3, 1).flatten(1)"
    if not trained.layer.bias:
        return Lines(f"F.linear(x, {weight}.T)")
    module = f'nn.ParameterDict({{"bias": nn.Parameter(torch.zeros({trained.layer.units}))}})'
    return Lines(f'F.linear(x, {weight}.T, self.{attribute(trained)}["bias"])', module, _bias(trained))


def _bias(trained: TrainedLayer) -> dict[str, Array]:
    return {"bias": trained.values["b"]} if "b" in trained.values else {}


def _batchnorm(trained: TrainedLayer) -> Lines:
    layer, values = trained.layer, trained.values
    kind = "BatchNorm2d" if len(trained.in_shape) == 3 else "BatchNorm1d"
    affine = layer.scale or layer.shift  # PyTorch has both or neither: what is left out is 1 or 0, and is trained on
    options = f"eps={layer.epsilon!r}, momentum={layer.momentum!r}{'' if affine else ', affine=False'}"
    module = f"nn.{kind}({trained.in_shape[-1]}, {options})"
    scale, shift = trained.scale_and_shift
    tensors = ({"weight": scale, "bias": shift} if affine else {}) | {
        "running_mean": values["mean"],
        "running_var": np.maximum(values["variance"], 0),  # as the layer itself does
        "num_batches_tracked": np.zeros((), np.int64),
    }
    return Lines(f"self.{attribute(trained)}(x)", module, tensors)


def _lrn(trained: TrainedLayer) -> Lines:
    layer = trained.layer
    options = f"{layer.size}, alpha={layer.alpha!r}, beta={layer.beta!r}, k={layer.k!r}"
    if len(trained.in_shape) == 3:
        return Lines(f"F.local_response_norm(x, {options})")
    return Lines(f"F.local_response_norm(x.unsqueeze(-1), {options}).squeeze(-1)")


def line(forward: str | Callable[[Any], str]) -> Converter:
    """Return the converter to an expression of x, which may depend on the layer's options."""
    return lambda trained: Lines(forward if isinstance(forward, str) else forward(trained.layer))


_MODES = {"nearest": "mode='nearest'", "bilinear": "mode='bilinear', align_corners=False"}
CONVERTERS: dict[str, Converter] = {
    "conv": _conv,
    "relu": line("torch.relu(x)"),
    "sigmoid": line("torch.sigmoid(x)"),
    "tanh": line("torch.tanh(x)"),
    "leakyrelu": line(lambda layer: f"nn.functional.leaky_relu(x, {float(layer.slope)!r})"),
    "gelu": line("nn.functional.gelu(x)"),
    "silu": line("nn.functional.silu(x)"),
    "lrn": _lrn,
    "batchnorm": _batchnorm,
    "maxpool": line(lambda layer: f"F.max_pool2d(x, {layer.size}, {layer.step})"),
    "averagepool": line(lambda layer: f"F.avg_pool2d(x, {layer.size}, {layer.step})"),
    "l2pool": line(lambda layer: f"F.lp_pool2d(x, 2.0, {layer.size}, {layer.step})"),
    "globalpool": line("x.mean((2, 3))"),
    "dense": _dense,
    "dropout": lambda trained: Lines(f"self.{attribute(trained)}(x)", f"nn.Dropout({trained.layer.rate!r})"),
    "flatten": line("x.permute(0, 2, 3, 1).flatten(1)"),
    "reshape": line(lambda layer: "x.reshape(-1, {}, {}, {}).permute(0, 3, 1, 2)".format(*layer.shape)),
    "upsample": line(lambda layer: f"F.interpolate(x, scale_factor={layer.factor}, {_MODES[layer.mode]})"),
    "scale": line(lambda layer: f"x * {float(layer.factor)!r}"),
    "pad": line(lambda layer: f"F.pad(x, {(*[layer.size] * 4, 0, layer.channels)!r})"),
    "auxiliary": line("x"),
}
"""Converters by the kinds of `LAYERS`. A new layer is a new entry."""


JOINS: dict[str, Callable[[Sequence[str]], str]] = {
    "residual": " + ".join,
    "add": " + ".join,
    "branches": lambda names: f"torch.cat([{', '.join(names)}], 1)",
}
"""Expressions of the paths' outputs, by the kind of a layer of paths."""


WEIGHTS = ".weights.safetensors"
"""Takes the place of the module's suffix."""

_IMPORTED = ("pathlib", "safetensors", "torch")
"""Modules that the written one imports. Under one of these names it would import itself."""

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
{widened}    model.load_state_dict(load_file(weights or Path(__file__).with_suffix({suffix!r})))
    return model.eval()
'''


def write_torch(classifier: Classifier, run: str, out: Path) -> tuple[Path, ...]:
    """Write and return the module and its weights. Raises UserError for a layer without converter, and OSError."""
    if not out.stem.isidentifier() or iskeyword(out.stem) or out.suffix != ".py":
        raise UserError(f"--out {out.name}", "no name that Python can import", "give one such as network.py")
    if out.stem in _IMPORTED:
        raise UserError(f"--out {out.name}", f"the module itself imports {out.stem}", "give one such as network.py")
    code, tensors = torch_module(classifier, run)
    weights = out.with_suffix(WEIGHTS)
    replace_file(output_file(weights), encode(tensors, {"format": "pt", "run": run, "version": version()}))
    replace_file(output_file(out), code.encode())
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
        normalised=_normalised(classifier),
        widened=_WIDENED if _wide(classifier) else "",
        run=ascii(run),
        version=ascii(version()),
        names="[\n" + "".join(f"    {name!a},\n" for name in facts.classes) + "]",  # ASCII alone
        C=C,
        modules=indent("\n".join(network.modules), " " * 8),
        forward=indent("\n".join(network.forward), " " * 8),
        dtype=dtype,
        suffix=WEIGHTS,
    )
    scaling, wide = {"mean": facts.mean, "deviation": facts.deviation}, "float64" if _wide(classifier) else dtype
    state: dict[str, Any] = {k: np.array(v, wide, order="C").reshape(C, 1, 1) for k, v in scaling.items()}
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
            self._add_paths(trained)
        else:
            found = converter_of(trained, CONVERTERS, *_HERE)(trained)
            self.modules += [f"self.{attribute(trained)} = {found.module}"] if found.module else []
            self.forward.append(f"x = {found.forward}")
            own = {f"{attribute(trained)}.{name}": a for name, a in found.tensors.items()}
            self.state |= {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in own.items()}

    def _add_paths(self, trained: TrainedLayer) -> None:
        """Add paths that begin at the same x, and join their outputs."""
        given, inner = attribute(trained), {child.name.rpartition(".")[2]: child for child in trained.children}
        self.forward.append(f"{given} = x")
        outputs = []
        for name, path in trained.layer.paths:
            outputs.append(given if path is None else f"{given}_{name}")
            if path is not None:
                self.forward.append(f"x = {given}")
                self.add(inner[name])
                self.forward.append(f"{given}_{name} = x")
        self.forward.append(f"x = {converter_of(trained, JOINS, *_HERE)(outputs)}")


def _answer(classifier: Classifier) -> dict[str, str]:
    """Return the name of the module's method that takes images, and its result."""
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


_WIDENED = """\
    # float32 has no room for what tells values of float64 apart
    model.mean, model.deviation = model.mean.double(), model.deviation.double()
"""


def _wide(classifier: Classifier) -> bool:
    """Return True if images are normalised in a wider type than that of the network."""
    return classifier.facts.dtype == np.float64 and classifier.job.model.dtype != "float64"


def _normalised(classifier: Classifier) -> str:
    """Return the lines that subtract and divide; pixels without data become 0, the mean."""
    facts, lines, scaled = classifier.facts, [], "(x - self.mean) / self.deviation"
    if facts.nodata is None:
        lines.append(f"x = {scaled}")
    else:
        mark = mark_of(facts.nodata, facts.dtype)
        lines.append(f"missing = {'' if mark is None else f'(x == {float(mark)!r}) | '}torch.isnan(x)")
        lines.append(f"x = ({scaled}).masked_fill(missing, 0.0)")
    if _wide(classifier):
        lines.append("x = x.to(next(self.parameters()).dtype)")
    return "\n        ".join(lines)
