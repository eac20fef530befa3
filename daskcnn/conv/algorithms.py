"""Every convolution algorithm."""

from __future__ import annotations

from daskcnn.conv.depthwise import Depthwise, Grouped
from daskcnn.conv.dilated import Dilated
from daskcnn.conv.direct import DirectSums
from daskcnn.conv.im2col import Im2col
from daskcnn.conv.minimal import Minimal
from daskcnn.conv.pointwise import Pointwise
from daskcnn.conv.spec import ConvAlgorithm
from daskcnn.conv.spectral import Spectral
from daskcnn.conv.winograd import Winograd

_WHOLE: tuple[ConvAlgorithm, ...] = (
    Spectral(),
    Winograd("winograd-2x3", Minimal.of(2, 3), rounding=2e-6),
    Winograd("winograd-4x3", Minimal.of(4, 3), rounding=1e-5),
    Winograd("winograd-4x5", Minimal.of(4, 5), rounding=3e-5),
)
_OF_ONE_GROUP: tuple[ConvAlgorithm, ...] = (
    *(Im2col(), Pointwise(), DirectSums()),
    *(Spectral(tile=4), Spectral(tile=8), Spectral(tile=16)),
    *_WHOLE,
    *map(Dilated, _WHOLE),  # phases of dilated kernels are small maps, which tiles of transforms are too large for
    Winograd("winograd-4x3-stride2", Minimal.halving(4), rounding=1e-5),
)
_FOR_ONE_THREAD: tuple[ConvAlgorithm, ...] = (
    Winograd("winograd-2x3-whole", Minimal.of(2, 3), rounding=2e-6, whole=True),
    Winograd("winograd-4x3-whole", Minimal.of(4, 3), rounding=1e-5, whole=True),
    Winograd("winograd-4x5-whole", Minimal.of(4, 5), rounding=3e-5, whole=True),
)
ALGORITHMS: dict[str, ConvAlgorithm] = {
    a.name: a for a in (*_OF_ONE_GROUP, *_FOR_ONE_THREAD, *map(Grouped, _OF_ONE_GROUP), Depthwise())
}
"""Algorithms by name; im2col supports every problem of one group, and grouped-im2col or depthwise every other."""
