"""Every convolution algorithm."""

from __future__ import annotations

from daskcnn.conv.algorithm import ConvAlgorithm
from daskcnn.conv.im2col import Im2col
from daskcnn.conv.spectral import Spectral

ALGORITHMS: dict[str, ConvAlgorithm] = {
    a.name: a for a in (Im2col(), Spectral(), Spectral(tile=4), Spectral(tile=8), Spectral(tile=16))
}
"""Algorithms by name; im2col supports every problem."""
