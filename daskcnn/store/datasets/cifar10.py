"""CIFAR-10: 60,000 colour photographs of 32×32 pixels in ten classes, 50,000 to train, 10,000 to test."""

from __future__ import annotations

from daskcnn.store.datasets.cifar import Cifar
from daskcnn.store.datasets.download import Download

OFFICIAL = Download(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size=170_052_171,
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)

CIFAR10 = Cifar(
    name="cifar10",
    title="CIFAR-10",
    official=OFFICIAL,
    folder="cifar-10-batches-bin",
    train={f"data_batch_{i}.bin": 10_000 for i in range(1, 6)},
    test={"test_batch.bin": 10_000},
    classes_file="batches.meta.txt",
    labels=(10,),
    others={"readme.html": 4096},
    training_samples=50_000,
)
