"""Trained networks as files for other programs: ONNX, PyTorch and safetensors. One file a format."""

from daskcnn.export.formats import FORMATS, Format
from daskcnn.export.model_file import read_model

__all__ = ["FORMATS", "Format", "read_model"]
