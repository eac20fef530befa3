"""`[data]` of a job: the samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from daskcnn.job.options import Location, Options
from daskcnn.nn.network import Views
from daskcnn.store.augmentation import Augment, read_augment
from daskcnn.store.split import MOST_HELD_OUT

BUILT_IN = "synthetic"
"""The data set of a job that gives neither a name nor a path."""


class Scale(Options):
    """`[data.scale]`: what pixels are normalised by, in place of the data set's own statistics."""

    mean: tuple[Annotated[float, Field(ge=-1e30, le=1e30)], ...]
    """Numbers that are subtracted from the pixels, one for each channel."""
    deviation: tuple[Annotated[float, Field(gt=1e-30, le=1e30)], ...]
    """Numbers that the pixels are divided by after that, one for each channel."""

    @field_validator("mean", "deviation", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """Take a list for a tuple, as TOML and JSON have no other."""
        return tuple(float(v) if type(v) is int else v for v in value) if isinstance(value, list) else value


class Data(Options):
    """`[data]`: the samples, of a prepared data set or of zarr arrays that are used in place."""

    name: str | None = Field(None, min_length=1)
    """Name of the data set. Default: that of the store at `data.path`; without a path `synthetic`."""
    path: Location | None = None
    """Path or URL of the prepared data set (a zarr store). Default: `data/NAME.zarr`."""
    archive: Location | None = None
    """File or folder of the data set's publisher. The data set is prepared from it."""
    order: Literal["shuffled", "stored"] = "shuffled"
    """Order of the samples in the store: shuffled once by a recorded seed, or as published."""
    images: Location | None = None
    """Path or URL of a zarr array with the images (N, H, W, C) or (N, H, W), which is used in place. It takes the place
    of `path`."""
    labels: Location | None = None
    """Path or URL of the zarr array with the labels of `images`: integers or text (N,), or rows of 0 and 1 (N, L)."""
    test: float | None = Field(None, gt=0, lt=1)
    """Part of `images` that is set apart for testing, stratified by class. Default: 0.2, without `test_images`."""
    test_images: Location | None = None
    """Path or URL of a zarr array with the images for testing."""
    test_labels: Location | None = None
    """Path or URL of the labels of `test_images`."""
    layout: Literal["NHWC", "NCHW"] = "NHWC"
    """Order of the axes of `images` and `test_images`."""
    nodata: float | None = Field(
        None, json_schema_extra={"because": "give any number such as -9999, and NaN stands for no data too"}
    )
    """Value of pixels without data in `images`. With it NaN stands for no data, too."""
    labelling: Literal["classes", "several"] | None = None
    """Meaning of rows of `labels`: `classes` if the one 1 of each row is its class, `several` if columns are labels of
    their own. Default: `several`; rows that all have exactly one 1 are refused then."""
    given: dict[Literal["layout", "nodata", "labelling", "test"], str | int | float] | None = None
    """Options of `daskcnn.prepare` by which the arrays that `daskcnn.train` was given became the data set at `path`. It
    sets them, and takes them from here when the run goes on."""
    scale: Scale | None = None
    """Mean and deviation of every channel. Default: those of the training part."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of which samples of `images` are for testing and validation, and of the order of its chunks."""
    validation: int = Field(MOST_HELD_OUT, ge=1)
    """Samples at the end of the training part that are used for validation only. Default: a tenth of the part, 2000 at
    most."""
    augment: Annotated[Augment | None, BeforeValidator(read_augment)] = None
    """Augmentation of the training images: a name, or a list of steps in their order, such as `[{step = "translate",
    pixels = 2}, {step = "mirror"}]`. Default: what suits the data set."""
    views: Views = "none"
    """Views of a test image whose scores are averaged: it alone, with its `mirror` image, or with both shifted by a
    pixel too (`mirror-translate`). Validation during training sees the image alone."""
    limit: int | None = Field(None, ge=1)
    """Samples of each part, training and test, that are used. Default: all."""

    @property
    def in_place(self) -> bool:
        """True if the samples are those of arrays that are used in place."""
        return self.images is not None
