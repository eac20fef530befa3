"""Draw every figure of docs/concepts into docs/pictures.

`make figures`, or `python docs/figures/draw_all.py [NAME …]`. Needs matplotlib. Names are those of the files without
`concept-` and `.svg`; without any, all are drawn.
"""

from __future__ import annotations

import sys

import rules
import timing
import work
from common import Draw, save

FIGURES: dict[str, Draw] = {
    "weight-updating": rules.weight_updating,
    "bsp": timing.bsp,
    "easgd": rules.easgd,
    "downpour": timing.downpour,
    "admm": rules.admm,
    "parallel-sgd": rules.parallel_sgd,
    "local-sgd": rules.local_sgd,
    "partitioning": work.partitioning,
    "layer-sharding": work.layer_sharding,
    "convolution": work.convolution,
    "simulation": timing.simulation,
}


def main(names: list[str]) -> None:
    """Draw these."""
    for name in names or FIGURES:
        print(save(FIGURES[name](), name))


if __name__ == "__main__":
    main(sys.argv[1:])
