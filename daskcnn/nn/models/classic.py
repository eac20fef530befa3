"""LeNet-5, and the small network of cuda-convnet."""

from __future__ import annotations

from daskcnn.nn.layer import Shape
from daskcnn.nn.models.parts import Spec, conv, dense, only, pool


def quick(in_shape: Shape, classes: int) -> Spec:
    """Three 5×5 convolutions of 32, 32 and 64 kernels, for 32×32 images: "quick" of cuda-convnet and Caffe."""
    return [
        *(conv(32, 5, pad=2), pool("maxpool"), *only("relu")),
        *(conv(32, 5, pad=2), *only("relu"), pool("averagepool")),
        *(conv(64, 5, pad=2), *only("relu"), pool("averagepool")),
        dense(classes),
    ]


def lenet5(in_shape: Shape, classes: int) -> Spec:
    """LeCun et al. 1998, Fig. 2, with plain averages and full connections. 28×28 images are padded to its 32×32."""
    hidden = [layer for units in (120, 84) for layer in (dense(units), *only("tanh"))]
    return [
        *(conv(6, 5, pad=0 if min(in_shape[:2]) >= 32 else 2), *only("tanh"), pool("averagepool")),
        *(conv(16, 5, pad=0), *only("tanh"), pool("averagepool")),
        *hidden,
        dense(classes),
    ]
