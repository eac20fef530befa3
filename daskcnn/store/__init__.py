"""Data sets at rest and on their way into training: zarr stores, importers, loader."""

from daskcnn.store.dataset import Dataset, Described, Scattered, Split, open_dataset, verify
from daskcnn.store.datasets import DATASETS
from daskcnn.store.loader import Batch, BatchPlan, batches, load_batch, normalise, sample_keys
from daskcnn.store.making.prepare import prepare

__all__ = [
    "DATASETS",
    "Batch",
    "BatchPlan",
    "Dataset",
    "Described",
    "Scattered",
    "Split",
    "batches",
    "load_batch",
    "normalise",
    "open_dataset",
    "prepare",
    "sample_keys",
    "verify",
]
