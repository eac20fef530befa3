"""Where the parts of a coordinator put what is to be done, in turn."""

from __future__ import annotations

from collections.abc import Iterable

from daskcnn.events import Event, Warned
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.orders import Order


class Outbox:
    """The orders that follow from one fact."""

    def __init__(self) -> None:
        self._orders: list[Order] = []

    def renew(self) -> list[Order]:
        """Begin anew. Returns the list that all orders come into from now on."""
        self._orders = []
        return self._orders

    def put(self, order: Order) -> None:
        """This is to be done next."""
        self._orders.append(order)

    def extend(self, following: Iterable[Order]) -> None:
        """These are to be done next, in turn."""
        self._orders.extend(following)

    def drop(self, kind: type) -> None:
        """Orders of this kind that were put since the fact are not to be done."""
        self._orders[:] = [order for order in self._orders if not isinstance(order, kind)]

    def log(self, event: Event) -> None:
        """This is to be recorded."""
        self._orders.append(orders.Log(event))

    def warn(self, message: str) -> None:
        """This is to be recorded as a warning."""
        self.log(Warned(message=message))
