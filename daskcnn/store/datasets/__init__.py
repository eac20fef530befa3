"""The data sets that can be imported: one file and one line each."""

from daskcnn.store.datasets.cifar import CIFAR10, CIFAR100
from daskcnn.store.datasets.mnist import FASHION_MNIST, MNIST
from daskcnn.store.datasets.synthetic import Importer, Synthetic

DATASETS: dict[str, Importer] = {
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "fashion-mnist": FASHION_MNIST,
    "mnist": MNIST,
    "synthetic": Synthetic(),
}
