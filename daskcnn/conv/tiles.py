"""Maps cut into overlapping tiles: a convolution of a large map as one of many small maps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from daskcnn.arrays import Array, Device
from daskcnn.conv.fourier import Axis
from daskcnn.conv.spec import ConvSpec


@dataclass(frozen=True)
class Tiling:
    """`spec`, of stride 1, in tiles of `size` outputs a side; one tile for the whole map if size is None."""

    spec: ConvSpec
    size: int | None

    @cached_property
    def outs(self) -> tuple[int, int]:
        """Outputs of a tile."""
        size = self.size or max(self.spec.out_H, self.spec.out_W)
        return min(size, self.spec.out_H), min(size, self.spec.out_W)

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Tiles along the height and the width."""
        (h, w), s = self.outs, self.spec
        return -(-s.out_H // h), -(-s.out_W // w)

    @cached_property
    def tiles(self) -> int:
        """All tiles."""
        return self.grid[0] * self.grid[1]

    @cached_property
    def axes(self) -> tuple[Axis, Axis]:
        """The axes of a tile, whose padding is part of it, or of the whole map."""
        s, (h, w) = self.spec, self.outs
        if self.size is None:
            return Axis(s.H, s.R, s.pad[0], s.pad_end[0]), Axis(s.W, s.S, s.pad[1], s.pad_end[1])
        return Axis(h + s.R - 1, s.R, 0), Axis(w + s.S - 1, s.S, 0)

    def zeros(self, device: Device) -> Array:
        """Return memory for dx: zeros where tiles are added up."""
        made = device.xp.empty if self.size is None else device.xp.zeros
        return made(self.spec.x_shape, self.spec.dtype)

    # --- as array expressions ---

    def cut(self, x: Array, xp: Any) -> Array:
        """Return what each tile reads of x (H, W, N, C): (h, w, tiles · N, C), with zeros beyond the map."""
        (top, left), (h, w) = self.spec.pad, self._reads
        whole = xp.zeros((*self._padded, *x.shape[2:]), x.dtype)
        rows, cols = min(x.shape[0], len(whole) - top), min(x.shape[1], whole.shape[1] - left)
        whole[top : top + rows, left : left + cols] = x[:rows, :cols]
        tiles = [whole[i : i + h, j : j + w] for i, j in self._corners]
        return xp.stack(tiles, axis=2).reshape(h, w, -1, x.shape[3])

    def split(self, dy: Array, xp: Any) -> Array:
        """Return the outputs of each tile of dy (out_H, out_W, N, K): (h, w, tiles · N, K), with zeros beyond."""
        (h, w), (down, across) = self.outs, self.grid
        whole = xp.zeros((down * h, across * w, *dy.shape[2:]), dy.dtype)
        whole[: len(dy), : dy.shape[1]] = dy
        tiles = [whole[i : i + h, j : j + w] for i, j in self._corners]
        return xp.stack(tiles, axis=2).reshape(h, w, -1, dy.shape[3])

    def join(self, tiles: Array, xp: Any) -> Array:
        """Invert `split`."""
        (h, w), (down, across) = self.outs, self.grid
        parts = tiles.reshape(h, w, self.tiles, self.spec.N, -1)
        whole = xp.empty((down * h, across * w, *parts.shape[3:]), tiles.dtype)
        for t, (i, j) in enumerate(self._corners):
            whole[i : i + h, j : j + w] = parts[:, :, t]
        return xp.ascontiguousarray(whole[: self.spec.out_H, : self.spec.out_W])

    def add_up(self, dtiles: Array, xp: Any) -> Array:
        """Apply the adjoint of `cut`: gradients of the same pixels from several tiles are added."""
        s, (top, left), (h, w) = self.spec, self.spec.pad, self._reads
        parts = dtiles.reshape(h, w, self.tiles, s.N, -1)
        whole = xp.zeros((max(self._padded[0], top + s.H), max(self._padded[1], left + s.W), *parts.shape[3:]), s.dtype)
        for t, (i, j) in enumerate(self._corners):
            whole[i : i + h, j : j + w] += parts[:, :, t]
        return xp.ascontiguousarray(whole[top : top + s.H, left : left + s.W])

    @property
    def _reads(self) -> tuple[int, int]:
        return self.outs[0] + self.spec.R - 1, self.outs[1] + self.spec.S - 1

    @property
    def _padded(self) -> tuple[int, int]:
        """Rows and columns that all tiles read together."""
        (h, w), (down, across) = self.outs, self.grid
        return down * h + self.spec.R - 1, across * w + self.spec.S - 1

    @property
    def _corners(self) -> list[tuple[int, int]]:
        (h, w), (down, across) = self.outs, self.grid
        return [(i * h, j * w) for i, j in product(range(down), range(across))]
