"""LeNet-5, AlexNet, and the small network of cuda-convnet."""

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


def alexnet(in_shape: Shape, classes: int) -> Spec:
    """Krizhevsky et al. 2012, Fig. 2, with its two groups. Images of 224×224 are padded by 2, for maps of 55×55."""
    lrn = only("lrn", size=5, alpha=1e-4, beta=0.75, k=2.0)
    hidden = [layer for _ in range(2) for layer in (*only("dropout", rate=0.5), dense(4096), *only("relu"))]
    return [
        *(conv(96, 11, stride=4, pad=2), *only("relu"), *lrn, pool("maxpool", 3)),
        *(conv(256, 5, pad=2, groups=2), *only("relu"), *lrn, pool("maxpool", 3)),
        *(conv(384, 3, pad=1), *only("relu")),
        *(conv(384, 3, pad=1, groups=2), *only("relu")),
        *(conv(256, 3, pad=1, groups=2), *only("relu"), pool("maxpool", 3)),
        *hidden,
        dense(classes),
    ]
