"""Names of an array's axes, as xarray and Zarr keep them, against the order in which its images are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from daskcnn.errors import DataError

CHANNELS = frozenset({"band", "bands", "channel", "channels", "c"})
"""Names of the axis of channels."""
PIXELS = frozenset({"y", "x", "h", "w", "height", "width", "row", "rows", "col", "cols", "column", "columns"})
PIXELS |= {"lat", "lon", "latitude", "longitude", "northing", "easting"}
"""Names of the axes of rows and columns of pixels."""
_Role = Literal["N", "P", "C"]
_ROLES: dict[str, tuple[_Role, ...]] = {"NHWC": ("N", "P", "P", "C"), "NCHW": ("N", "C", "P", "P")}
_GREY: tuple[_Role, ...] = ("N", "P", "P")


def axes_of(array: Any) -> Sequence[Any]:
    """Return the names of the axes of a Zarr array, of format 3 or as xarray keeps them in format 2; else none."""
    found = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
    return found if isinstance(found, list | tuple) and len(found) == array.ndim else ()


def check_axes(
    names: Sequence[Any], layout: str, *, option: str | None, methods: bool = False, what: str = "images"
) -> None:
    """Raise DataError where the names of the axes of images say that pixels or channels are elsewhere.

    Names that are not known say nothing, and neither do those of arrays that have not three or four axes.

    Parameters
    ----------
    layout : NHWC or NCHW, the order of four axes. Three are (N, H, W).
    option : what sets the layout, for the remedy; None where it is always the same.
    methods : whether the images have the methods of xarray, for the remedy.
    what : the images' name, for the message.
    """
    roles = [_role(name) for name in names]
    if len(names) not in (3, 4) or roles.count("C") > 1 or _fit(roles, layout):
        return
    told, other = [f"{name!s:.40}" for name in names], "NHWC" if layout == "NCHW" else "NCHW"
    if len(names) == 4 and option is not None and _fit(roles, other):
        remedy = f"give {option}{other!r}"
    elif None not in roles:
        extended = " images.expand_dims('sample') is one image" if methods and len(names) == 3 else ""
        remedy = f"give images with an axis of samples, which is none of these names;{extended}".rstrip(";")
    else:
        order = _ordered(told, roles, layout)
        transposed = f"images.transpose({', '.join(map(repr, order))})"
        remedy = f"give {transposed}" if methods else f"put the axes in the order ({', '.join(order)})"
    reason = f"layout {layout} has the {'channels' if 'C' in roles else 'pixels'} elsewhere"
    raise DataError(f"{what} of ({', '.join(told)})", reason, remedy)


def _role(name: Any) -> _Role | None:
    plain = str(name).lower()
    return "C" if plain in CHANNELS else "P" if plain in PIXELS else None


def _fit(roles: Sequence[_Role | None], layout: str) -> bool:
    if len(roles) == 3:  # rows or columns may be called channels, as those of an electroencephalogram
        return roles[0] is None
    return all(role in (None, wanted) for role, wanted in zip(roles, _ROLES[layout], strict=True))


def _ordered(names: Sequence[str], roles: Sequence[_Role | None], layout: str) -> list[str]:
    """The names in the order of the layout. Samples are the first axis whose name is not known."""
    rest = [name for kind in (None, "P") for name, role in zip(names, roles, strict=True) if role == kind]
    channels = [name for name, role in zip(names, roles, strict=True) if role == "C"]
    return [rest[0], *channels, *rest[1:]] if layout == "NCHW" else [*rest, *channels]
