"""Initial kernels that whiten: the first convolution's outputs are uncorrelated over patches of the training images.

As in airbench94 (Jordan 2024), after tysam-code's hlb-CIFAR10: eigenvectors of the patches' second moments, divided by
the root of the eigenvalue, and their negatives. Such kernels are usually not trained on (`freeze`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array
from daskcnn.nn.layer import Shape, walk
from daskcnn.nn.layers.conv import Conv
from daskcnn.nn.sequential import Sequential

WHITENING = "whitening"
SAMPLES = 5000
"""Images whose patches are looked at, as in airbench94."""
EPS = 5e-4
"""Added to eigenvalues, that of airbench94: patches hardly vary along the last eigenvectors."""

Moments = npt.NDArray[np.float64]


def whitened_layer(model: Sequential) -> tuple[str, Conv] | None:
    """Return name and layer of the first convolution, if it is to whiten; None if not."""
    name, first = model.layers[0]
    return (name, first) if isinstance(first, Conv) and first.initial == WHITENING else None


def check_whitening(model: Sequential, in_shape: Shape) -> None:
    """Raise ValueError where a convolution is to whiten that cannot, for images (H, W, C)."""
    found = whitened_layer(model)
    for path, layer, _ in walk(model, in_shape):
        if isinstance(layer, Conv) and layer.initial == WHITENING and (found is None or path != found[0]):
            of_first = "is for the network's first layer, as it is made of patches of the images; remove it there"
            raise ValueError(f"layer {path}: initial = {WHITENING!r} {of_first}")
    if found is None:
        return
    (name, conv), (H, W, C) = found, in_shape
    said = f"layer {name}: initial = {WHITENING!r}"
    if not isinstance(conv.size, int) or conv.groups > 1:
        raise ValueError(f"{said} is for square kernels that see all channels")
    if conv.size > min(H, W):
        raise ValueError(f"{said}: images of {H}x{W} have no patches of size {conv.size}; lower size")
    if conv.kernels != (n := 2 * conv.size**2 * C):
        raise ValueError(f"{said} makes 2·size²·channels = {n} kernels, not {conv.kernels}; set kernels = {n}")


def patch_moments(x: Array, size: int) -> tuple[Moments, int]:
    """Return the sum of products of all pairs of pixels of a patch, over all patches of x (H, W, N, C).

    The sums are (size²·C, size²·C), for pixels in the order of a kernel (size, size, C).
    """
    H, W, _, C = x.shape
    high, wide = H - size + 1, W - size + 1
    taps = [x[i : i + high, j : j + wide].reshape(-1, C) for i in range(size) for j in range(size)]
    patches = np.concatenate(taps, axis=1, dtype=np.float64)
    return patches.T @ patches, len(patches)


def whitening_kernels(moments: Moments, size: int, eps: float = EPS) -> Array:
    """Return kernels (size, size, C, 2·size²·C) from the mean products of a patch's pixels, likeliest patterns first.

    The second half are the negatives of the first. An eigenvector's sign is free: its largest number is positive.
    """
    values, vectors = np.linalg.eigh(moments)
    values, vectors = values[::-1].clip(0), vectors[:, ::-1]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    kernels = vectors * np.where(largest < 0, -1, 1) / np.sqrt(values + eps)
    return np.concatenate([kernels, -kernels], axis=1).reshape(size, size, -1, 2 * len(moments))
