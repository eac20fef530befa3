"""Which channels the kernels of a shard see, where a convolution has groups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelPart:
    """Kernels of a shard that make one convolution: of whole groups, or of one group some.

    Attributes
    ----------
    kernels : which of the shard's
    channels : which of the map's they see
    groups : that they are of
    """

    kernels: slice
    channels: slice
    groups: int


def kernel_parts(first: int, count: int, *, kernels: int, channels: int, groups: int) -> list[KernelPart]:
    """Return the parts of a shard of `count` kernels from `first` on, out of all `kernels` over `channels`.

    A shard is cut at the borders of groups: its first and its last group may be another worker's too.
    """
    if groups == 1:
        return [KernelPart(slice(0, count), slice(0, channels), 1)]
    of_group, seen, last = kernels // groups, channels // groups, first + count
    found, at = [], first
    while at < last:
        group = at // of_group
        several = max(1, (last - at) // of_group) if at % of_group == 0 else 1
        end = min(last, (group + several) * of_group)
        part = slice(at - first, end - first), slice(group * seen, (group + several) * seen)
        found.append(KernelPart(*part, several))
        at = end
    return found
