"""Buckets of S3: a prepared data set and arrays in place, and what is said where credentials do not do."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from daskcnn.errors import DataError
from daskcnn.store import BatchPlan, batches, open_dataset, verify
from daskcnn.store.array_index import ArrayChanged
from daskcnn.store.foreign.in_place import Arrays, outline
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import Source, describe
from tests.store.arrays_in_place import index_of, opened, tiles

moto_server = pytest.importorskip("moto.server", reason="moto plays S3: pip install 'moto[server]'")
s3fs = pytest.importorskip("s3fs", reason="s3fs reads S3: pip install 'daskcnn[s3]'")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

KEYS = {"AWS_ACCESS_KEY_ID": "one", "AWS_SECRET_ACCESS_KEY": "two", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket, with credentials that may do everything."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"b{abs(hash(str(tmp_path))) % 10**12}"
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"


def test_a_prepared_data_set(bucket: str, source: Source) -> None:
    path = f"{bucket}/toy.zarr"
    write(source, describe(source, chunk=50, order="stored", seed=0), path, lambda part: None)
    data = open_dataset(path)
    verify(data)
    plan = BatchPlan(((0, 230),), 64, seed=1)
    with batches(data, data.train, plan) as stream:
        assert sum(len(batch.labels) for batch in stream) == 230
    s3fs.S3FileSystem().rm(f"{path}/train/images/c/2/0/0/0")
    with pytest.raises(DataError, match=r"chunk 2 .* is missing"):
        verify(open_dataset(path))


def test_arrays_in_place(bucket: str, tmp_path: Path) -> None:
    local = tiles(tmp_path)
    s3fs.S3FileSystem().put(str(tmp_path / "tiles.zarr"), f"{bucket}/tiles.zarr", recursive=True)
    arrays = replace(local, images=f"{bucket}/tiles.zarr/x", labels=f"{bucket}/tiles.zarr/y")
    data, found = opened(arrays), outline(arrays)
    np.testing.assert_array_equal(data.train.read(0, 240)[0], opened(local).train.read(0, 240)[0])
    assert index_of(found) == index_of(outline(local))
    before = found.cache_key
    zarr.open_array(arrays.images, mode="r+")[130] = 3
    assert outline(arrays).cache_key != before, "the bucket has tags of every object"
    with pytest.raises(ArrayChanged, match=r"samples 120 to 139 \(chunk 6\) have changed since"):
        found.dataset(index_of(outline(local))).train.source.load(6)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"a folder, not an array \(arrays in it: x, y\); give the path of one"):
        outline(replace(arrays, images=f"{bucket}/tiles.zarr"))


def refusal(path: str) -> str:
    with pytest.raises(DataError) as caught:
        outline(Arrays(f"{path}/x", f"{path}/y"))
    with pytest.raises(DataError) as prepared:
        open_dataset(path)
    assert prepared.value.remedy == caught.value.remedy
    return str(caught.value)


def test_missing_credentials(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    told = refusal(f"{bucket}/tiles.zarr")
    assert "redentials" in told
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws" in told


def test_wrong_credentials(bucket: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _checked_from_now_on(endpoint, 0)
    try:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        s3fs.S3FileSystem.clear_instance_cache()
        assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in refusal(f"{bucket}/tiles.zarr")
    finally:
        _checked_from_now_on(endpoint, 10**9)


def _checked_from_now_on(endpoint: str, count: int) -> None:
    request: Any = urllib.request.Request(f"{endpoint}/moto-api/reset-auth", data=str(count).encode())
    request.add_header("Content-Type", "text/plain")
    with urllib.request.urlopen(request) as answer:
        assert json.loads(answer.read())["status"] == "ok"
