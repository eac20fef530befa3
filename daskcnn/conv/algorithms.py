"""Every convolution algorithm."""

from __future__ import annotations

from daskcnn.conv.algorithm import ConvAlgorithm
from daskcnn.conv.im2col import Im2col
from daskcnn.conv.spectral import Spectral
from daskcnn.conv.winograd import Winograd

ALGORITHMS: dict[str, ConvAlgorithm] = {
    a.name: a
    for a in (
        *(Im2col(), Spectral(), Spectral(tile=4), Spectral(tile=8), Spectral(tile=16)),
        *(Winograd(2, 3, rounding=1e-6), Winograd(4, 3, rounding=1e-5), Winograd(4, 5, rounding=3e-5)),
    )
}
"""Algorithms by name; im2col supports every problem."""
