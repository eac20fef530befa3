"""What a worker refuses before it takes memory for a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from daskcnn.cluster.session import session
from daskcnn.errors import ClusterError
from daskcnn.job.dataset import opened
from daskcnn.job.network import vector_bytes
from daskcnn.job.resolve import resolve
from tests.tiny_runs import tiny_data, tiny_job


@pytest.mark.parametrize("missing", [0, 1])
def test_a_network_whose_vectors_are_more_than_the_workers_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    hidden = [{"layer": "dense", "units": 500}, {"layer": "dense", "units": 10}]
    job = resolve(tiny_job(tiny_data(tmp_path), model={"layers": hidden}))
    limit = vector_bytes(job, opened(job.data)) - missing
    memory = SimpleNamespace(memory_limit=limit)
    worker = SimpleNamespace(address="tcp://a", state=SimpleNamespace(nthreads=1), memory_manager=memory)
    monkeypatch.setattr(session, "get_worker", lambda: worker)
    if missing:
        with pytest.raises(ClusterError, match=r"weights, gradients and optimizer take .* smaller network"):
            session.open_session("run", job, "cpu")
    else:
        session.open_session("run", job, "cpu")
        session.forget_run("run")
