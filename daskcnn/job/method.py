"""The keys of a job that describe its method: what runs are told apart by, and the hyper-parameters of other tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_METHOD = ("data", "model", "train", "rule")
_METHOD_OF_CLUSTER = ("workers", "wire", "overlap", "ps_shards")


def method_of(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a job's tables that describe the method, without where the run takes place and is kept."""
    found = {section: tables[section] for section in _METHOD if section in tables}
    cluster = tables.get("cluster")
    own = {key: cluster[key] for key in _METHOD_OF_CLUSTER if key in cluster} if isinstance(cluster, Mapping) else {}
    return found | {"cluster": own}
