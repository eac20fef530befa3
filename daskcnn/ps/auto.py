"""`bsp` on the workers that shorten a step, or what is sooner, by measurement (`training.strategy_choice`). No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from daskcnn.ps.bsp import BSP
from daskcnn.ps.local_sgd import LocalSGD
from daskcnn.ps.rule import UpdateRule


class Auto(BSP):
    """The strategy that takes the least expected time: shared steps, steps of their own, or one worker alone.

    Workers and links are measured first. A worker that costs more than it brings is left out, and named. Where nothing
    is chosen, as with groups, it is `bsp`.
    """

    chooses_workers: ClassVar[bool] = True

    def problems(self, epochs: int) -> Iterator[str]:
        plain = type(self)()
        if self not in (plain, plain.for_groups()):
            given = ", ".join(f"rule.{key}" for key in sorted(self.model_fields_set))
            yield (
                f'{given}: strategy "auto" chooses for itself; remove it, or name the strategy that it is for, such as '
                'train.strategy = "bsp"'
            )

    def for_resumed(self) -> tuple[UpdateRule, ...]:
        return BSP(), LocalSGD()


ALONE = BSP(exchange="asa")
"""The rule of a worker that trains by itself: without a server, and as there are no others, without an exchange."""
