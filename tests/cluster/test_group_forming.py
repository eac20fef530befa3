"""Groups that are formed while workers are lost, without a cluster."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from unittest.mock import MagicMock

import pytest

from daskcnn.cluster.groups import replicas
from daskcnn.cluster.link.calls import WorkersLost
from daskcnn.training.coordinator.orders import FormGroups


def test_a_group_that_was_to_be_formed_as_another_lost_a_worker_is_formed_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses, formed = [WorkersLost(["c"])], list[set[str]]()

    def links(part: Any, home: str, members: Collection[str]) -> Any:
        if losses:
            raise losses.pop()
        formed.append({*members})
        return MagicMock()

    for name in ("layout_of", "network_of", "stages_of", "Cadence", "fastest", "GroupGraph", "FormedGroup"):
        monkeypatch.setattr(replicas, name, MagicMock())
    for name in ("GroupsFormed", "Shares", "KernelsSharded"):
        monkeypatch.setattr(replicas, name, MagicMock())
    monkeypatch.setattr(replicas, "measure_links", links)
    context = MagicMock()
    context.calibrations.__getitem__.return_value.seconds_per_sample = 1.0
    groups = replicas.GroupReplicas(context, MagicMock())
    both = {"group-1": ("c", "d"), "group-2": ("e", "f")}
    with pytest.raises(WorkersLost):
        groups.form(FormGroups(both, (), True, ("group-1", "group-2")))
    groups.form(FormGroups({**both, "group-1": ("d",)}, (), True, ("group-1",)))
    assert formed == [{"d"}, {"e", "f"}]
