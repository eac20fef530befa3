"""The data sets that can be imported: one file and one line each."""

from daskcnn.store.datasets.cifar10 import CIFAR10
from daskcnn.store.datasets.cifar100 import CIFAR100
from daskcnn.store.datasets.fashion_mnist import FASHION_MNIST
from daskcnn.store.datasets.importer import Importer
from daskcnn.store.datasets.mnist import MNIST
from daskcnn.store.datasets.synthetic import Synthetic

DATASETS: dict[str, Importer] = {
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "fashion-mnist": FASHION_MNIST,
    "mnist": MNIST,
    "synthetic": Synthetic(),
}
