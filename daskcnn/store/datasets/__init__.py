"""The data sets that can be imported: one file and one line each."""

from daskcnn.store.datasets.cifar10 import Cifar10
from daskcnn.store.datasets.importer import Importer
from daskcnn.store.datasets.mnist import Mnist
from daskcnn.store.datasets.synthetic import Synthetic

DATASETS: dict[str, Importer] = {
    "cifar10": Cifar10(),
    "mnist": Mnist(),
    "synthetic": Synthetic(),
}
