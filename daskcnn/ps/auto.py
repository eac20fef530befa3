"""`bsp` on the workers that shorten a step, chosen by measurement (`training.strategy_choice`). No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from daskcnn.ps.bsp import BSP


class Auto(BSP):
    """Shared steps of those workers with whom they take the least time; of one alone, where that is soonest.

    Workers and links are measured first. A worker that costs more than it brings is left out, and named.
    """

    chooses_workers: ClassVar[bool] = True

    def problems(self, epochs: int) -> Iterator[str]:
        if self != type(self)():
            yield '[rule]: strategy "auto" chooses for itself; remove the table, or use train.strategy = "bsp"'

    def problems_with_groups(self, size: int) -> Iterator[str]:
        yield (
            f'train.replica_size = {size}: strategy "auto" chooses among single workers; remove it, or use '
            'train.strategy = "bsp"'
        )
