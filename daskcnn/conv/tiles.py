"""Maps cut into overlapping tiles: a convolution of a large map as one of many small maps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from daskcnn.arrays import Array, Device
from daskcnn.conv.algorithm import Direction, Work
from daskcnn.conv.spec import ConvSpec

Place = tuple[int, int, int]
"""A tile: its number, and where its outputs begin, row and column."""
Region = tuple[slice, slice]


@dataclass(frozen=True)
class Tiling:
    """`spec`, of stride 1, in tiles of `size` outputs a side, which are samples of `inner`; not cut if size is None."""

    spec: ConvSpec
    size: int | None

    @property
    def inner(self) -> ConvSpec:
        """The problem of the tiles, without padding: tiles times samples."""
        if self.size is None:
            return self.spec
        s, (h, w) = self.spec, self._outs
        return replace(s, N=s.N * len(self._places()), H=h + s.R - 1, W=w + s.S - 1, pad=(0, 0))

    @property
    def bytes(self) -> int:
        """Bytes of the tiles of maps, their gradients and outputs."""
        if self.size is None:
            return 0
        H, W, N, C = self.inner.x_shape
        h, w, _, K = self.inner.y_shape
        return (2 * H * W * C + h * w * K) * N * self.spec.itemsize

    def work(self, direction: Direction) -> tuple[Work, ...]:
        """Return the bytes that cutting and joining move."""
        if self.size is None:
            return ()
        passes = {"forward": 1, "backward": 2, "backward_filter": 1}[direction]
        return (Work("tiles", 0, passes * self.bytes),)

    def out(self, shape: tuple[int, ...], device: Device) -> Array:
        """Return memory for a result of the inner problem."""
        if self.size is None:
            return device.xp.empty(shape, self.spec.dtype)
        return device.workspace.take("tiles.result", shape, self.spec.dtype)

    def cut(self, x: Array, device: Device) -> Array:
        """Cut maps (H, W, N, C) into maps of `inner`: what each tile reads, with zeros beyond the map."""
        (top, left), H, W = self.spec.pad, self.inner.H, self.inner.W
        return self._gather("map", x, (H, W), (top, left), device)

    def split(self, dy: Array, device: Device) -> Array:
        """Cut (out_H, out_W, N, K) into outputs of `inner`, with zeros beyond."""
        return self._gather("output", dy, self._outs, (0, 0), device)

    def join(self, y: Array, device: Device) -> Array:
        """Invert `split`."""
        return self._scatter(y, self.spec.y_shape, self._outs, (0, 0), device)

    def add_up(self, dx: Array, device: Device) -> Array:
        """Apply the adjoint of `cut`: gradients of the same pixels from several tiles are added."""
        return self._scatter(dx, self.spec.x_shape, (self.inner.H, self.inner.W), self.spec.pad, device)

    @property
    def _outs(self) -> tuple[int, int]:
        size = self.size or max(self.spec.out_H, self.spec.out_W)
        return min(size, self.spec.out_H), min(size, self.spec.out_W)

    def _places(self) -> list[Place]:
        h, w = self._outs
        corners = product(range(0, self.spec.out_H, h), range(0, self.spec.out_W, w))
        return [(i, *corner) for i, corner in enumerate(corners)]

    def _gather(self, name: str, whole: Array, size: tuple[int, int], pad: tuple[int, int], device: Device) -> Array:
        if self.size is None:
            return device.xp.ascontiguousarray(whole)
        N, places = self.spec.N, self._places()
        shape = (*size, len(places), N, whole.shape[-1])
        tiles = device.workspace.take(f"tiles.{name}", shape, self.spec.dtype)

        def copy(samples: slice) -> None:
            for i, *corner in places:
                inside, own = _overlap(corner, pad, size, whole.shape)
                if own != (slice(0, size[0]), slice(0, size[1])):
                    tiles[:, :, i, samples] = 0
                tiles[*own, i, samples] = whole[*inside, samples]

        device.pool.map(copy, device.pool.slices(N))
        return tiles.reshape(*size, len(places) * N, whole.shape[-1])

    def _scatter(
        self, parts: Array, shape: tuple[int, ...], size: tuple[int, int], pad: tuple[int, int], device: Device
    ) -> Array:
        if self.size is None:
            return parts
        whole = device.xp.zeros(shape, self.spec.dtype)
        N, places = self.spec.N, self._places()
        tiles = parts.reshape(*size, len(places), N, shape[-1])

        def add(samples: slice) -> None:
            for i, *corner in places:
                inside, own = _overlap(corner, pad, size, shape)
                whole[*inside, samples] += tiles[*own, i, samples]

        device.pool.map(add, device.pool.slices(N))
        return whole


def _overlap(
    corner: list[int], pad: tuple[int, int], size: tuple[int, int], shape: tuple[int, ...]
) -> tuple[Region, Region]:
    """Return where a tile of this size lies in the whole, and where that part lies in the tile."""
    inside, own = [], []
    for first, before, length, limit in zip(corner, pad, size, shape, strict=False):
        low, high = max(0, first - before), min(limit, first - before + length)
        high = max(low, high)
        inside.append(slice(low, high))
        own.append(slice(low - first + before, high - first + before))
    return (inside[0], inside[1]), (own[0], own[1])
