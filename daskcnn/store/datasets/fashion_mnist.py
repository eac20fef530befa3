"""Fashion-MNIST: 70,000 grey photographs of clothing, in the files of MNIST (Xiao, Rasul, Vollgraf 2017)."""

from __future__ import annotations

from daskcnn.store.datasets.download import Download
from daskcnn.store.datasets.mnist import IdxFiles

_PLACE = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"


def _file(name: str, size: int, sha256: str) -> Download:
    return Download(f"{_PLACE}{name}.gz", size, sha256)


OFFICIAL = (
    _file("train-images-idx3-ubyte", 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    _file("train-labels-idx1-ubyte", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    _file("t10k-images-idx3-ubyte", 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    _file("t10k-labels-idx1-ubyte", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
)

FASHION_MNIST = IdxFiles(
    name="fashion-mnist",
    title="Fashion-MNIST",
    class_names=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    official=OFFICIAL,
)
