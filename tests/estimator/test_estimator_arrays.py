"""`CNNClassifier` on arrays without data in places, with names and coordinates, on one worker in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dask.array as da
import numpy as np
import pytest

from daskcnn.cluster.link.own_process import SHARED
from daskcnn.errors import DataError
from daskcnn.estimator.classifier import CNNClassifier

pytest.importorskip("sklearn")

N = 40
LABELS = np.where(np.arange(N) % 2, "light", "dark")
HOLES = np.random.default_rng(1).random((N, 4, 4)) < 0.1
IMAGES = np.random.default_rng(0).normal(2.0 * (LABELS == "light")[:, None, None], 1, (N, 4, 4))


@pytest.fixture(scope="module", autouse=True)
def one_cluster() -> Iterator[None]:
    yield
    SHARED.close()


def small(**parameters: Any) -> CNNClassifier:
    """A classifier that learns to tell dark from light in a moment."""
    return CNNClassifier(model=[{"layer": "dense"}], epochs=3, batch_size=10, optimizer="sgd", lr=0.02, **parameters)


@pytest.mark.slow
def test_pixels_without_data_are_those_of_nan_of_a_mask_and_of_a_number() -> None:
    as_nan, as_number = np.where(HOLES, np.nan, IMAGES), np.where(HOLES, -9999, IMAGES)
    masked = np.ma.masked_array(np.where(HOLES, 1e6, IMAGES), HOLES)
    fitted = small(nodata=-9999).fit(as_nan, LABELS)
    assert fitted.score(as_nan, LABELS) > 0.9
    givens = [as_number, masked, da.from_array(masked, chunks=(9, 2, 4), asarray=False), da.from_array(as_nan)]
    for X in givens:
        np.testing.assert_array_equal(small(nodata=-9999).fit(X, LABELS).model_.vector, fitted.model_.vector)
        np.testing.assert_allclose(np.asarray(fitted.predict_proba(X)), fitted.predict_proba(as_nan), rtol=1e-5)
    np.testing.assert_array_equal(small().fit(masked, LABELS).model_.vector, fitted.model_.vector)


def test_masked_integers_become_the_number_for_no_data() -> None:
    X = (10 * IMAGES + 100).astype(np.int64)
    masked = np.ma.masked_array(X, HOLES)
    number = small(nodata=-1).fit(np.where(HOLES, -1, X), LABELS)
    np.testing.assert_array_equal(small(nodata=-1).fit(masked, LABELS).model_.vector, number.model_.vector)
    with pytest.raises(DataError, match="are masked, and no number stands for no data; set nodata to a uint8"):
        small().fit(masked.astype(np.uint8), LABELS)


def test_nan_is_refused_with_the_remedy_where_nothing_stands_for_no_data() -> None:
    holes = np.where(HOLES, np.nan, IMAGES)
    fitted = small().fit(IMAGES, LABELS)
    sample = int(np.flatnonzero(HOLES.any(axis=(1, 2)))[0])
    for use in (lambda: small().fit(holes, LABELS), lambda: fitted.predict(holes)):
        with pytest.raises(ValueError, match=f"contains NaN in sample {sample}: fit with nodata=-9999"):
            use()
    with pytest.raises(DataError, match="nodata=nan: a finite number is needed; give one such as -9999"):
        small(nodata=np.nan).fit(holes, LABELS)
    assert small(nodata=0).__sklearn_tags__().input_tags.allow_nan


def test_masked_labels_are_refused() -> None:
    with pytest.raises(DataError, match="y: sample 3 is masked; leave such samples out"):
        small().fit(IMAGES, np.ma.masked_array(np.arange(N) % 2, np.arange(N) == 3))


def test_coordinates_of_samples_lead_from_images_to_labels_and_to_predictions() -> None:
    xarray = pytest.importorskip("xarray")
    tiles, order = 100 + np.arange(N), np.random.default_rng(2).permutation(N)
    X = xarray.DataArray(IMAGES, dims=("tile", "y", "x"), coords={"tile": tiles})
    y = xarray.DataArray(LABELS, dims="tile", coords={"tile": tiles})
    weights = xarray.DataArray(1.0 + np.arange(N), dims="tile", coords={"tile": tiles})
    fitted = small().fit(X, y[order], weights[order])
    plain = small().fit(IMAGES, LABELS, weights.values)
    np.testing.assert_array_equal(fitted.model_.vector, plain.model_.vector)
    assert fitted.score(X, y[order]) == plain.score(IMAGES, LABELS) > 0.9
    for given in (X, X.chunk(tile=9)):
        found, proba = fitted.predict(given), fitted.predict_proba(given)
        assert (found.dims, proba.dims, proba["class"].values.tolist()) == (
            ("tile",),
            ("tile", "class"),
            ["dark", "light"],
        )
        np.testing.assert_array_equal(found.sel(tile=tiles[order]), plain.predict(IMAGES)[order])
        np.testing.assert_allclose(proba, plain.predict_proba(IMAGES), rtol=1e-5)
    with pytest.raises(DataError, match=r"images of \(y, x, tile\).*; give images.transpose\('tile', 'y', 'x'\)"):
        small().fit(X.transpose("y", "x", "tile"), y)


def test_channels_that_seem_to_come_first_are_told_of() -> None:
    X = np.repeat(IMAGES[:, None], 3, axis=1)[..., [0, 1, 2, 3, 0]][:, :, [0, 1, 2, 3, 0]]
    with pytest.warns(UserWarning, match=r"taken as 3 rows of 5 channels; if not, give numpy.moveaxis\(X, 1, -1\)"):
        small().fit(X, LABELS)
