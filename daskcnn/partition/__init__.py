"""The division of samples and kernels between workers. Pure: times come in as arguments, allocations go out."""

from __future__ import annotations

from daskcnn.partition.allocation import Allocation
from daskcnn.partition.partitioner import IDPA, UDPA, IDPAPaper, Partitioner
from daskcnn.partition.proportions import kernel_shards, proportional
from daskcnn.partition.rounds import Budget

PARTITIONERS: dict[str, type[Partitioner]] = {
    "idpa": IDPA,
    "idpa-paper": IDPAPaper,
    "udpa": UDPA,
}

__all__ = ["PARTITIONERS", "Allocation", "Budget", "Partitioner", "kernel_shards", "proportional"]
