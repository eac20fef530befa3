"""A shell of a layer-sharded run without a cluster: it counts steps in place of training them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from daskcnn.events import CalibratedWorker, Event, Spent, Warned
from daskcnn.nn import sequential_from_spec
from daskcnn.nn.score import Score
from daskcnn.sharded.balance import ShareSearch, WorkerLinks
from daskcnn.sharded.cutting import stages_of
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.layer import LayerCoordinator
from daskcnn.training.coordinator.layer_records import REPLICA, LayerSnapshot
from daskcnn.training.coordinator.orders import Order
from daskcnn.training.coordinator.roster import Measured
from daskcnn.training.coordinator.settings import STEPS_AHEAD, LayerSettings

STAGES = stages_of(
    sequential_from_spec(
        [
            {"layer": "conv", "kernels": 40, "size": 3, "pad": 1},
            {"layer": "maxpool", "size": 2},
            {"layer": "dense", "units": 10},
        ]
    )
)


def balancing(home: str, measured: Mapping[str, Measured], links: WorkerLinks) -> ShareSearch:
    compute = {worker: dict(own.row.conv_seconds) for worker, own in measured.items()}
    return ShareSearch(STAGES, (8, 8, 3), home, compute, links.by_worker)


def settings_of(**changed: Any) -> LayerSettings:
    """Ten steps an epoch, two epochs."""
    numbers: dict[str, Any] = {"samples": 80, "validation": 20, "epochs": 2, "batch_size": 8, "eq2": 7}
    return LayerSettings(**{**numbers, "balancing": balancing, **changed})


def row_of(worker: str, seconds: float) -> CalibratedWorker:
    return CalibratedWorker(name=worker, address=f"tcp://{worker}", conv_seconds={"conv1": seconds})


def spent_by(worker: str, seconds: float, samples: float = 100.0) -> Spent:
    """A worker takes so many seconds a sample for its kernels."""
    return Spent(
        name=worker, busy=seconds * samples, conv_seconds={"conv1": seconds * samples}, conv_samples={"conv1": samples}
    )


class Shell:
    """Carries out a coordinator's orders. Answers wait in `open`, by order, until a test delivers them.

    Attributes
    ----------
    orders : all orders so far.
    told : all facts so far.
    kept, saved : the step of the snapshot, and of the last checkpoint.
    seconds : seconds a sample that each worker's kernels take, for its counters.
    """

    def __init__(self, settings: LayerSettings | None = None, snapshot: LayerSnapshot | None = None) -> None:
        self.settings = settings or settings_of()
        self.coordinator = LayerCoordinator(self.settings, snapshot)
        self.now = 0.0
        self.orders: list[Order] = []
        self.told: list[Fact] = []
        self.open: dict[type, Order] = {}
        self.seconds: dict[str, float] = {}
        self.calibrating: set[str] = set()
        self.alive: set[str] = set()
        self.kept = self.saved = self.coordinator.snapshot.step
        self.life = self.trained = self.next = self.end = 0
        self.collected = self.kept
        self.accuracy = iter(range(1, 1000))

    # --- facts ---

    def tell(self, fact: Fact) -> list[Order]:
        self.told.append(fact)
        if isinstance(fact, facts.Calibrated) and fact.worker in self.calibrating:
            self.calibrating.remove(fact.worker)
            self.alive.add(fact.worker)
        out = self.coordinator.handle(fact)
        self.coordinator.validate()
        for order in out:
            self._carry_out(order)
        self.orders += out
        return out

    def then(self, kind: Callable[..., Fact], *args: Any, after: float = 1.0) -> list[Order]:
        """Tell a fact, some time later."""
        self.now += after
        return self.tell(kind(*args, at=self.now))

    def start(self, **workers: float) -> list[Order]:
        """Calibrated workers, by their seconds a sample."""
        for worker in workers:
            self.tell(facts.WorkerReady(worker, "cpu", self.now))
        for worker, seconds in workers.items():
            out = self.tell(facts.Calibrated(worker, seconds, row_of(worker, seconds), self.now))
        return out

    def come(self, worker: str, seconds: float) -> list[Order]:
        """A worker comes in mid-run, and has measured itself."""
        self.then(facts.WorkerReady, worker, "cpu")
        return self.then(facts.Calibrated, worker, seconds, row_of(worker, seconds))

    def leave(self, *workers: str) -> list[Order]:
        return self.then(facts.WorkerLeaving, workers, "it is shut down")

    def lose(self, *workers: str) -> list[Order]:
        return self.then(facts.WorkerGone, workers, "connection lost")

    def cut_off(self) -> list[Order]:
        """The scheduler drops the driver with all tasks. What the driver itself is at is begun anew, and answered."""
        for kind in (orders.Collect, orders.Judge, orders.AskCounters):
            self.open.pop(kind, None)
        self.end = self.trained
        self.calibrating.clear()
        out = self.then(facts.ConnectionCut)
        assert self.calibrating == {*self.coordinator.roster.calibrating} or self.coordinator.ended
        return out

    def interrupt(self) -> list[Order]:
        return self.then(facts.Interrupted, 15)

    # --- what a cluster answers ---

    def links(self) -> list[Order]:
        return self.then(facts.LinksMeasured, self._asked(orders.MeasureLinks).life, WorkerLinks())

    def step(self, loss: float = 8.0) -> list[Order]:
        """The oldest step under way ends."""
        assert self.trained < self.end, "no step is under way"
        self.trained += 1
        self._submit()
        return self.then(facts.StepDone, self.life, self.trained - 1, Score(loss, 4, 8), 0.1)

    def steps(self, count: int) -> list[Order]:
        for _ in range(count):
            out = self.step()
        return out

    def stopped(self) -> list[Order]:
        order = self._asked(orders.StopSegment)
        return self.then(facts.SegmentStopped, order.life, self.end)

    def pieces(self, *, finite: bool = True) -> list[Order]:
        order = self._asked(orders.Collect)
        self.collected = order.step
        return self.then(facts.PiecesCollected, order.life, order.step, finite)

    def judged(self, correct: int | None = None) -> list[Order]:
        order = self._asked(orders.Judge)
        samples = order.part.samples
        right = min(samples, next(self.accuracy)) if correct is None else correct
        return self.then(facts.Judged, Score(10.0, right, samples))

    def counted(self) -> list[Order]:
        order = self._asked(orders.AskCounters)
        spent = {worker: spent_by(worker, self.seconds.get(worker, 0.5)) for worker in sorted(self.alive)}
        return self.then(facts.Counted, order.ask, spent)

    def epoch(self, correct: int | None = None) -> list[Order]:
        """To the end of an epoch of one segment, and everything behind it."""
        self.steps(self.end - self.trained)
        self.pieces()
        self.judged(correct)
        while orders.AskCounters in self.open and not self.coordinator.ended:
            out = self.counted()
        return out

    def go_on(self, wait: int = 0) -> None:
        """Answer whatever is asked, until the run ends. wait: seconds before each step."""
        answers = {
            orders.MeasureLinks: self.links,
            orders.StopSegment: self.stopped,
            orders.Collect: self.pieces,
            orders.Judge: self.judged,
            orders.AskCounters: self.counted,
        }
        while not self.coordinator.ended:
            if kind := next((kind for kind in answers if kind in self.open), None):
                answers[kind]()
                continue
            for _ in range(wait):
                self.then(facts.Tick)
            if orders.StopSegment in self.open:
                self.stopped()
            self.step()

    def _asked(self, kind: type) -> Any:
        return self.open.pop(kind)

    # --- orders ---

    def _carry_out(self, order: Order) -> None:
        match order:
            case orders.Calibrate():
                self.calibrating.add(order.worker)
            case orders.Dismiss():
                self.calibrating.discard(order.worker)
                self.alive.discard(order.worker)
            case orders.CancelAll():
                self.open.clear()
                self.trained = self.next = self.end = 0
            case orders.Keep():
                assert order.step == self.collected, "kept without its pieces"
                self.kept = order.step
            case orders.Save():
                assert order.epoch == self.kept / self.settings.steps_per_epoch
                assert order.replicas == (REPLICA,)
                self.saved = self.kept
            case orders.Restore():
                self.kept = self.collected = self.saved
            case orders.Log() | orders.End() | orders.IgnoreSignals():
                pass
            case _:
                self._begin(order)

    def _begin(self, order: Order) -> None:
        """What takes its time."""
        match order:
            case orders.Place():
                assert order.step == self.kept, "other pieces are placed than are kept"
                assert set(order.shares.balance.compute) == self.alive
                self.life, self.trained, self.next, self.end = order.life, order.step, order.step, order.step
            case orders.RunSegment():
                assert (order.life, order.begin) == (self.life, self.trained)
                self.end = order.end
                self._submit()
            case orders.StopSegment():
                assert order.life == self.life
                self.end = self.next
                self.open[orders.StopSegment] = order
            case orders.Collect():
                assert (order.life, order.step) == (self.life, self.trained), "collected while steps are under way"
                self.open[orders.Collect] = order
            case orders.AskCounters() | orders.MeasureLinks() | orders.Judge() | orders.AskWaiting():
                self.open[type(order)] = order
            case _:
                raise AssertionError(f"{order} is not for a layer-sharded run")

    def _submit(self) -> None:
        self.next = min(self.end, self.trained + STEPS_AHEAD + 1)

    # --- what is to be seen ---

    def events(self, kind: type[Event]) -> list[Any]:
        return [order.event for order in self.orders if isinstance(order, orders.Log) and isinstance(order.event, kind)]

    def warnings(self) -> list[str]:
        return [event.message for event in self.events(Warned)]
