"""The tasks that run on a worker: calibrating, judging, joining the server, rounds of training."""

from __future__ import annotations

from functools import partial

from daskcnn.arrays import Array, DeviceKind, backend, device_profile, single_threaded_blas
from daskcnn.cluster.link.news import Teller
from daskcnn.cluster.link.refusals import returns_refusals
from daskcnn.cluster.messages import Calibration, RoundOrder
from daskcnn.cluster.worker.served_round import ServedRound, join_server
from daskcnn.cluster.worker.session import check_dataset, open_session, session_of
from daskcnn.cluster.worker.stopping import stop_signal, stopped
from daskcnn.conv import ConvSpec
from daskcnn.errors import ClusterError
from daskcnn.job.tables import LAYER, Job
from daskcnn.nn.score import Score
from daskcnn.store.array_index import ArrayIndex
from daskcnn.training.replica import Stopped
from daskcnn.training.reports import RoundReport
from daskcnn.training.stage_calibration import stage_seconds
from daskcnn.training.step_calibration import step_seconds, tune_convolutions


def device_problem(kind: str) -> str | None:
    """None if this worker has the device that it advertises, else what is wrong."""
    try:
        if kind == "gpu":
            backend("gpu")
    except ClusterError as error:
        return str(error)
    return None


@returns_refusals
def calibrate(run: str, job: Job, kind: DeviceKind, fingerprint: str, index: ArrayIndex | None = None) -> Calibration:
    """Measure this worker with the real shapes, through the code of training. `index`: of arrays in place.

    Raises ClusterError where it has not the device that it advertises, or does not see the very data set; ArrayChanged
    where arrays in place are not what the index says.
    """
    if problem := check_dataset(job, fingerprint, index):
        remedy = "give data on storage that every worker reaches, or copy it there"
        raise ClusterError(f"it does not see the data set: {problem}; {remedy}")
    teller = Teller(run)
    compiling = partial(teller.tell, "compiling loops for this machine")
    session = open_session(run, job, kind, index, compiling=compiling)
    profile = device_profile(kind, session.replica.device.pool.threads)
    with single_threaded_blas():
        tune_convolutions(session.replica, begun=lambda done, of, spec: teller.tell(_in_words(spec), done, of))
        teller.tell("a step of training")
        seconds, convs = step_seconds(session.replica)
        fixed, rest = dict[str, float](), None
        if job.train.strategy == LAYER or job.train.replica_size > 1:  # a shard's share goes by all that it does
            teller.tell("the layers that are sharded")
            stages = stage_seconds(session.replica)
            convs, fixed, rest = dict(stages.whole), dict(stages.fixed), stages.rest
    return Calibration(seconds, convs, fixed, profile.threads, profile.name, profile.memory, rest)


def _in_words(spec: ConvSpec) -> str:
    return f"a convolution {spec.R}x{spec.S} of {spec.C} to {spec.K} channels, maps {spec.H}x{spec.W}"


@returns_refusals
def score_weights(run: str, weights: Array, split: str, lo: int, hi: int) -> Score:
    """Judge these weights on samples lo…hi of a split ("train" or "test"); of test samples by the views of the job."""
    replica = session_of(run).replica
    with single_threaded_blas():
        theirs = replica.device.backend.from_host(weights)
        part = getattr(replica.dataset, split)
        data = replica.job.data
        whole, views = (len(part), data.views) if split == "test" else (data.validation, "none")
        return replica.evaluate(part, lo, hi, stopped, weights=theirs, whole=whole, views=views)


@returns_refusals
def join_run(order: RoundOrder) -> bool:
    """Take part in the server's barrier, as `joined` does."""
    return joined(order)


def joined(order: RoundOrder) -> bool:
    """Begin a session: take part in the server's barrier and start from its center. False: stopped meanwhile."""
    try:
        join_server(order, session_of(order.run), stop_signal())
    except Stopped:
        return False
    return True


@returns_refusals
def train_round(order: RoundOrder) -> RoundReport | None:
    """One round: train, judge, push, adopt what comes back. None: the driver stopped it."""
    served = ServedRound(order, session_of(order.run), stop_signal())
    try:
        with single_threaded_blas():
            return served.train()
    except Stopped:
        return None
