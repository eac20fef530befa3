"""No test of a queue waits for the disk."""

from __future__ import annotations

import pytest

from daskcnn.batch import spool


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "DURABLE", "OFF")
