"""CIFAR-100 by its fine labels: 60,000 colour photographs of 32×32 pixels in a hundred classes.

50,000 are to train, 10,000 to test. A record has a byte for its class of twenty coarse ones, then one for its own.
"""

from __future__ import annotations

from daskcnn.store.datasets.cifar import Cifar
from daskcnn.store.datasets.download import Download

OFFICIAL = Download(
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    size=168_513_733,
    sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
)

CIFAR100 = Cifar(
    name="cifar100",
    title="CIFAR-100",
    official=OFFICIAL,
    folder="cifar-100-binary",
    train={"train.bin": 50_000},
    test={"test.bin": 10_000},
    classes_file="fine_label_names.txt",
    labels=(20, 100),
    others={"coarse_label_names.txt": 4096},
    training_samples=50_000,
)
