"""A data set that tests only read."""

from __future__ import annotations

import pytest
from tiny_runs import tiny_data


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a tiny data set."""
    return tiny_data(tmp_path_factory.mktemp("data"))
