"""The shuffle through files is exact, however the samples come in blocks and go in buckets."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.errors import DataError
from daskcnn.store.making.writer import buckets, read_bucket, write_block


@given(
    samples=st.integers(1, 60),
    block=st.integers(1, 20),
    bucket=st.integers(1, 20),
    seed=st.integers(0, 5),
)
@settings(max_examples=40, deadline=None)
def test_every_sample_comes_to_its_place(samples: int, block: int, bucket: int, seed: int) -> None:
    places = np.random.default_rng(seed).permutation(samples)
    values = np.stack([np.arange(samples, dtype=np.int16), -np.arange(samples, dtype=np.int16)], axis=1)
    cuts = [(lo, min(lo + block, samples)) for lo in range(0, samples, block)]
    edges = [(lo, min(lo + bucket, samples)) for lo in range(0, samples, bucket)]
    with tempfile.TemporaryDirectory() as folder:
        for number, (lo, hi) in enumerate(cuts):
            write_block(folder, number, values[lo:hi], places[lo:hi])
        found = [
            read_bucket(folder, each, (2,), np.dtype(np.int16))
            for each in buckets([places[lo:hi] for lo, hi in cuts], edges)
        ]
    np.testing.assert_array_equal(np.concatenate(found)[places], values)


def test_a_block_whose_folder_is_gone_is_the_user_s_to_mend_and_makes_none(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(DataError, match="this folder for blocks is not there"):
        write_block(str(gone), 0, np.zeros((2, 1), np.uint8), np.arange(2))
    assert not gone.exists()
