"""The formats that a network is exported to. Each writer is imported when it is used: some need a package more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from daskcnn.errors import UserError, installing
from daskcnn.training.trained_network import Classifier


@dataclass(frozen=True, slots=True)
class Format:
    """A format: its file's suffix, where its writer is, and the package, an extra of ours too, that it needs."""

    suffix: str
    module: str
    writer: str
    package: str | None = None

    def write(self, classifier: Classifier, run: str, out: Path) -> tuple[Path, ...]:
        """Write the network and return the files. Raises UserError, and OSError where a file cannot be written."""
        try:
            writer: Callable[[Classifier, str, Path], tuple[Path, ...]]
            writer = getattr(import_module(self.module), self.writer)
        except ModuleNotFoundError as error:
            if self.package is None or (error.name or "").partition(".")[0] != self.package:
                raise
            raise UserError(f"package {self.package}", "it is not installed", installing(self.package)) from error
        return writer(classifier, run, out)


FORMATS: Mapping[str, Format] = {
    "onnx": Format(".onnx", "daskcnn.export.onnx_file", "write_onnx", "onnx"),
    "torch": Format(".py", "daskcnn.export.torch_module", "write_torch"),
    "safetensors": Format(".safetensors", "daskcnn.export.model_file", "write_model"),
}
