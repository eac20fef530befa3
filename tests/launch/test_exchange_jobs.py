"""Jobs that say how weights travel: what is refused, and who drives them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from daskcnn.cluster.shell.data_parallel import DataParallel
from daskcnn.cluster.shell.layer_sharded import LayerSharded
from daskcnn.errors import JobError
from daskcnn.job.network import layout_of
from daskcnn.job.resolve import resolve
from daskcnn.launch.prepared_job import fitted
from daskcnn.launch.training import driver_of
from daskcnn.training.coordinator.settings import Settings
from tests.toy_data import toy_dataset

ASA: dict[str, Any] = {"train": {"strategy": "bsp"}, "rule": {"exchange": "asa"}}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"cluster": {"ps_shards": 0}}, "cluster.ps_shards = 0: input should be greater than or equal to 1"),
        (ASA | {"cluster": {"ps_shards": 2}}, "cluster.ps_shards = 2: rule.exchange = 'asa' has no server to split"),
        ({"cluster": {"wire": "float8"}}, "cluster.wire = 'float8'"),
        ({"train": {"strategy": "bsp"}, "rule": {"exchange": "asa8"}}, "rule.exchange = 'asa8'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_exchanges_are_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=re.escape(message)):
        resolve(tables)


def test_a_server_cannot_be_split_into_more_ranges_than_the_vector_has_numbers(tmp_path: Path) -> None:
    dataset = toy_dataset(tmp_path)
    tables: dict[str, Any] = {"data": {"validation": 30}, "model": {"layers": [{"layer": "dense", "units": 10}]}}
    numbers = dataset.shape[0] * dataset.shape[1] * dataset.shape[2] * 10 + 10
    fitted(resolve(tables | {"cluster": {"ps_shards": numbers}}), dataset)
    with pytest.raises(JobError, match=rf"cluster\.ps_shards = {numbers + 1}: the network has {numbers} numbers"):
        fitted(resolve(tables | {"cluster": {"ps_shards": numbers + 1}}), dataset)


def test_a_server_cannot_be_split_within_a_block_of_int8(tmp_path: Path) -> None:
    """The run ended with a traceback once its workers were calibrated."""
    dataset = toy_dataset(tmp_path)
    tables: dict[str, Any] = {"data": {"validation": 30}, "model": {"layers": [{"layer": "dense", "units": 10}]}}
    most = -(-layout_of(resolve(tables), dataset).size // 256)
    fitted(resolve(tables | {"cluster": {"ps_shards": most, "wire": "int8"}}), dataset)
    with pytest.raises(JobError, match=rf"cluster\.ps_shards = {most + 1}: .* in int8 {most} blocks of 256; lower it"):
        fitted(resolve(tables | {"cluster": {"ps_shards": most + 1, "wire": "int8"}}), dataset)


@pytest.mark.parametrize(
    ("tables", "peers"),
    [
        ({}, False),
        ({"train": {"strategy": "bsp"}}, False),
        (ASA, True),
        ({"train": {"strategy": "bsp"}, "rule": {"exchange": "asa16"}}, True),
    ],
    ids=str,
)
def test_a_run_without_a_server_exchanges_from_peer_to_peer(tables: dict[str, Any], peers: bool) -> None:
    job = resolve(tables)
    assert driver_of(job) is DataParallel
    assert Settings.of(job, 1000).peers is peers


def test_the_layer_strategy_has_a_driver_of_its_own() -> None:
    assert driver_of(resolve({"train": {"strategy": "layer"}})) is LayerSharded
