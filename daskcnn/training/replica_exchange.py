"""A replica's side of the exchanges with the center, as a state machine without I/O and without a clock.

Theory of operation. A method is called for each fact: an event on the worker and its time. It returns the order that
follows. The driver of the machine (a task on a worker, the simulator, a test) carries the order out and calls the
method that answers it. The driver measures or simulates time and moves the bytes; it decides nothing.

    fact                       orders that may follow
    joined                     none: a round may begin
    begin                      TrainSteps
    trained                    JudgeLocal, Send, Await; after a last stop without exchange as after its reply
    judged_local               Send
    judged_center              Report
    replied (Send)             TrainSteps, PullCenter, JudgeCenter, Report
    replied (Send, overlapped) none: training goes on
    replied (Await)            JudgeLocal, Send
    replied (PullCenter)       JudgeCenter
    report                     none: a round may begin

Rounds. A round is cut into stretches of steps. Each ends at a stop, after which the rule wants a push, a pull or both;
the last stop is the round's end. `Cadence` knows the stops ahead, so that one fact stands for a whole stretch. After
the last exchange the center is judged if the round asks for it. A replica that goes its own way (the rule answers a
push with a difference) has not seen the center since it joined, and pulls it first. Where the average of the center
stands for the network, that is pulled and judged instead. Every round that is not given up ends in exactly one report.

Minibatches. Where all workers make each step together, the reply to a push may change the sizes of those that come
(`sizes`). Steps stay as they are; the samples between two stops, and those of the round, follow.

Leaving. A worker that is to leave ends its round behind the step at hand, or while it waits for a reply. It pushes what
it has gained since its last push, if anything, and waits for no answer. Q is measured on no more samples than a
moment is enough for. The report counts the samples that were pushed. Where all replicas end their rounds with the same
exchange, those that come to know it by the reply end theirs behind it (`ends_here`).

Exchanges. At most one is under way; its push and its pull are one Send, and all its replies are one fact. `seq` counts
the pushes of a session from 1, and a push carries the version that it was trained from. Q is measured before a push,
on the weights that are pushed.

Overlap. If rule and cluster allow it, a Send names the stretch to train meanwhile, unless it is the round's last. The
weights that were sent are set aside. The change that the steps since then have made is added to the vectors of the
replies when these are there: between two steps, or at the next stop, where the machine says Await first.

Seconds. Facts carry the times at which work began and ended. An exchange counts as communication from the moment at
which the replica has nothing else to do until the replies are there. The server's wait for other workers counts as
wait, as far as the replica waits too. An exchange that ends while steps are made costs nothing; its seconds are counted
apart. Judging counts as evaluation.

Arithmetic. The weights are changed here, by the rule's own functions: `begin`, `payload`, `adopt`, `pulled`. The
driver hands in vectors where the replica computes, in its dtype, and brings payloads into the host's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Protocol

from daskcnn.nn import OptimizerState
from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.partition.step_shares import StepSizes
from daskcnn.ps import Local, UpdateRule, Vector
from daskcnn.training.cadence import Cadence, TrainSteps
from daskcnn.training.exchange_orders import (
    Answer,
    Await,
    Gain,
    JudgeCenter,
    JudgeLocal,
    Order,
    PullCenter,
    Report,
    Send,
)
from daskcnn.training.judging import FORWARD, JudgedPart
from daskcnn.training.round_report import RoundReport
from daskcnn.training.round_tally import RoundTally

CERTAIN = 1.0
"""The Q of a push whose weights were not judged."""
MOMENT = 1.0
"""Seconds that a worker which leaves may judge its weights for."""


_AWAIT, _REPORT = Await(), Report()


class ExchangePhase(Enum):
    """The input that the machine waits for."""

    APART = "a session"
    IDLE = "a round"
    TRAINING = "steps"
    AWAITING = "the replies of the exchange under way"
    JUDGING_LOCAL = "the score of the own weights"
    SENDING = "replies"
    PULLING_CENTER = "the center"
    JUDGING_CENTER = "the center's score"
    REPORTING = "the report to be asked for"


# the module's own names: looking up a member of an enum takes ten times as long
(_APART, _IDLE, _TRAINING, _AWAITING, _JUDGING_LOCAL, _SENDING, _PULLING_CENTER, _JUDGING_CENTER, _REPORTING) = (
    ExchangePhase
)


class Arithmetic(Protocol):
    """Arithmetic of an exchange, of the push and of its answer: a rule's own, unless merges travel in another way."""

    def pushed(self, local: Local) -> Vector:
        """Return the vector that is pushed."""

    def adopt(self, local: Local, answer: Vector, version: int) -> None:
        """Go on from the reply to a push."""


class ReplicaExchange:
    """One worker's machine, for its whole life in a run, as the module's text describes it.

    cadence: shared by all workers. overlap: let replicas train during an exchange, if the rule allows it. via:
    arithmetic of the exchange, if not the rule's own. frozen: places in the weights that no exchange changes. averaged:
    judge the average of the center.
    """

    # slots: a simulation reads these millions of times
    __slots__ = (
        "_cadence", "_frozen", "_overlaps", "_phase", "_pulled", "_sent", "_seq", "_tally", "_under_way", "_via",
        "local", "rule",
    )  # fmt: skip

    def __init__(
        self,
        rule: UpdateRule,
        local: Local,
        cadence: Cadence,
        *,
        overlap: bool,
        via: Arithmetic | None = None,
        frozen: Sequence[slice] = (),
        averaged: bool = False,
    ) -> None:
        self.rule, self.local, self._frozen = rule, local, tuple(frozen)
        self._cadence, self._via, self._overlaps = cadence, via or rule, overlap and rule.overlaps
        unseen = rule.answers == "difference"  # then a replica has not seen the center since it joined
        self._pulled = PullCenter(averaged) if averaged or unseen else None
        self._phase, self._seq = _APART, 0
        self._tally: RoundTally | None = None
        self._under_way: Send | None = None
        self._sent: Vector | None = None  # set aside during an exchange that overlaps training

    @property
    def sizes(self) -> StepSizes | None:
        """The minibatches of the round under way, where all workers make its steps together; None: as planned."""
        return None if self._tally is None else self._tally.sizes

    @property
    def phase(self) -> ExchangePhase:
        """The input that the machine waits for."""
        return self._phase

    # --- facts ---

    def joined(self, center: Vector, version: int) -> None:
        """Begin a session from this center. A round under way is given up."""
        self._tally = self._under_way = self._sent = None
        self.rule.begin(self.local, center, version)
        self._phase, self._seq = _IDLE, 0

    def begin(self, round_: Round, center_part: JudgedPart | None, own_part: JudgedPart | None = None) -> TrainSteps:
        """Begin a round.

        center_part: the samples to judge the center on afterwards. own_part: those to judge the own weights on before
        a push; None: Q is the round's training accuracy.
        """
        assert self._phase is _IDLE, self._not_now("a round begins")
        stops, version = self._cadence.stops(round_), self.local.base_version
        sizes, steps = None, round_.steps
        if steps == stops[-1].step and round_.meetings is None:  # one pass, cut into that many
            sizes = StepSizes(round_.samples, steps)
        self._tally = RoundTally(round_, center_part, own_part, stops, version, version, sizes)
        self._phase = _TRAINING
        return stops[0]

    def trained(self, score: Score | None, lr: float | None, *, busy: float, load: float, at: float) -> Order:
        """Take in that the ordered stretch is trained. score, busy, load: of the round so far; busy includes load."""
        tally = self._tally
        assert tally is not None and self._phase is _TRAINING, self._not_now("steps are made")  # noqa: PT018
        tally.score, tally.lr, tally.busy, tally.load, tally.since = score, lr, busy, load, at
        if self._under_way is not None:
            self._phase = _AWAITING
            return _AWAIT
        return self._at_stop(tally)

    def leave(
        self, step: int, samples: int, score: Score | None, lr: float | None, *, busy: float, load: float, at: float
    ) -> Order:
        """Take in that the round ends behind this step of the stretch, with these samples; else as `trained`."""
        tally = self._tally
        assert tally is not None and self._phase is _TRAINING, self._not_now("a worker leaves")  # noqa: PT018
        stop = tally.stops[tally.told].sized(tally.sizes)
        gained = samples - (stop.samples - stop.gained)
        push = samples > tally.pushed
        judge = push and tally.own_part is not None and self.rule.judges_pushes
        cut = (samples - tally.pushed) / (stop.samples - tally.pushed)
        stop = replace(stop, step=step, samples=samples, gained=gained, push=push, pull=False, judge=judge, last=True)
        tally.stops, tally.center_part, tally.cut = (*tally.stops[: tally.told], stop), None, cut
        if tally.own_part is not None:
            affordable = int(MOMENT / (FORWARD * busy / samples)) if busy else tally.own_part.samples
            tally.own_part = tally.own_part.first(affordable)
        return self.trained(score, lr, busy=busy, load=load, at=at)

    def departed(self, at: float) -> Report:
        """Take in that the worker leaves, and the server merges its last push: no reply is waited for."""
        tally, sent, self._under_way, self._sent = self._tally, self._under_way, None, None
        assert tally is not None and sent is not None, self._not_now("a worker leaves")  # noqa: PT018
        tally.communication += at - tally.since
        tally.pushes += sent.push is not None
        tally.since = at
        return self.ends_here()

    def ends_here(self) -> Report:
        """Take in that the round ends behind its last exchange: what is left of it is not trained."""
        tally = self._tally
        assert tally is not None, self._not_now("a round ends")
        tally.stops, tally.center_part, tally.cut = tally.stops[: tally.told], None, 0.0
        self._phase = _REPORTING
        return _REPORT

    def judged_local(self, score: Score | None, *, begun: float, at: float) -> Send:
        """Take in the score of the replica's own weights; None: it is not known."""
        tally = self._tally
        assert tally is not None and self._phase is _JUDGING_LOCAL, self._not_now("own weights are judged")  # noqa: PT018
        assert tally.own_part is not None
        tally.evaluation += at - begun
        tally.since, tally.q_samples = at, tally.own_part.samples
        tally.q_measured += 1
        return self._send(tally, None if score is None else score.quality)

    def judged_center(self, score: Score | None, *, begun: float, at: float) -> Report:
        """Take in the score of the center; None: it is not known."""
        tally = self._tally
        assert tally is not None and self._phase is _JUDGING_CENTER, self._not_now("the center is judged")  # noqa: PT018
        assert tally.center_part is not None
        tally.evaluation += at - begun
        tally.center, tally.judged = score, tally.center_part.samples
        self._phase = _REPORTING
        return _REPORT

    def replied(self, answers: Sequence[Answer], at: float) -> Order | None:
        """Take in the answers to all that was sent. Returns None if training goes on as ordered."""
        tally, phase = self._tally, self._phase
        assert tally is not None, self._not_now("replies are there")
        if phase is _PULLING_CENTER:
            tally.communication += at - tally.since
            ((_, center),) = answers
            assert tally.center_part is not None
            self._phase = _JUDGING_CENTER
            return JudgeCenter(tally.center_part, center)
        sent, self._under_way = self._under_way, None
        assert sent is not None, self._not_now("replies are there")
        spent = 0.0 if phase is _TRAINING else at - tally.since
        tally.communication += spent
        if phase is not _TRAINING:
            tally.since = at
        if sent.meanwhile is None:
            self._take_in(tally, sent, answers)
            return self._go_on(tally)
        waited = answers[0][0].waited if sent.push is not None else 0.0
        tally.wait += min(0.0, spent - waited)  # while steps were made nobody waited
        tally.hidden += max(0.0, at - tally.sent - max(spent, waited))
        weights, before = self.local.weights, self._sent
        assert before is not None, "weights are set aside"
        gained, self._sent = weights - before, None  # by what was trained since
        weights[...] = before
        self._take_in(tally, sent, answers)
        weights += gained
        return None if phase is _TRAINING else self._at_stop(tally)

    def coming(self, samples: int) -> tuple[int, int, int] | None:
        """Return seq, base and step of the push that follows the step at hand, of these samples; None: none does."""
        tally = self._tally
        if tally is None or self._phase is not _TRAINING or self._under_way is not None:
            return None
        stop = tally.stops[tally.told].sized(tally.sizes)
        if not stop.push or stop.judge or stop.first != stop.step or samples != stop.samples - tally.pushed:
            return None
        return self._seq + 1, self.local.base_version, 0 if tally.sizes is None else stop.step

    def report(self, *, bytes_up: int, bytes_down: int, optimizer: OptimizerState | None = None) -> RoundReport:
        """Return the ended round's report. optimizer: the optimizer's state on the host."""
        tally = self._tally
        assert tally is not None and self._phase is _REPORTING, self._not_now("a report is asked for")  # noqa: PT018
        self._tally, self._phase = None, _IDLE
        communication, own = tally.communication - tally.wait, self.local.noise
        return RoundReport(
            tally.round,
            tally.score,
            tally.lr,
            tally.busy,
            tally.load,
            tally.wait,
            communication if communication > 0.0 else 0.0,
            tally.evaluation,
            bytes_up,
            bytes_down,
            tally.pushes,
            tally.version,
            tally.base_version,
            tally.staleness,
            tally.gamma,
            tally.q,
            tally.q_samples,
            tally.judged,
            tally.center,
            optimizer,
            sizes=tally.sizes,
            noise=tally.noise if own is None else own.scale,
            cut=None if tally.cut is None else tally.pushed,
            norms=() if own is None else own.kept(),
            hidden=tally.hidden,
            q_measured=tally.q_measured,
        )

    def give_up(self) -> None:
        """Drop the round under way: no report is made."""
        self._tally = self._under_way = self._sent = None
        if self._phase is not _APART:
            self._phase = _IDLE

    # --- orders that follow ---

    def _at_stop(self, tally: RoundTally) -> Order:
        """Return the order at a stop whose steps are all made, with nothing under way."""
        stop = tally.stops[tally.told].sized(tally.sizes)
        if stop.judge and tally.own_part is not None:
            self._phase = _JUDGING_LOCAL
            return JudgeLocal(tally.own_part)
        if stop.push or stop.pull:
            trained = None if tally.score is None else tally.score.quality
            return self._send(tally, tally.q if tally.q_samples else trained)
        tally.told += 1
        return self._go_on(tally)

    def _send(self, tally: RoundTally, q: float | None) -> Send:
        stop, local, push = tally.stops[tally.told].sized(tally.sizes), self.local, None
        tally.told += 1
        meanwhile = tally.stops[tally.told].sized(tally.sizes) if self._overlaps and not stop.last else None
        self._sent, tally.sent = None if meanwhile is None else local.weights.copy(), tally.since
        if stop.push:
            payload = self._via.pushed(local)
            if self._sent is not None and payload is local.weights:  # they are trained on meanwhile
                payload = self._sent
            self._seq += 1
            if tally.cut is not None:
                q = self.rule.of_part(CERTAIN if q is None else q, tally.cut)
            tally.q, tally.base_version = q, local.base_version
            samples, tally.pushed = stop.samples - tally.pushed, stop.samples
            known = samples, CERTAIN if q is None else q, local.pace
            step = 0 if tally.sizes is None else stop.step
            push = Gain(self._seq, local.base_version, payload, *known, step)
        self._phase = _SENDING if meanwhile is None else _TRAINING
        self._under_way = order = Send(push, stop.pull, meanwhile)
        return order

    def _take_in(self, tally: RoundTally, sent: Send, answers: Sequence[Answer]) -> None:
        """Go on from the replies: first that to the push, then that to the pull, as far as they were asked for."""
        push, pull, _ = sent
        kept = [self.local.weights[place].copy() for place in self._frozen]
        assert len(answers) == (push is not None) + pull, f"{len(answers)} replies to {sent}"
        if push is not None:
            reply, brought = answers[0]
            self._via.adopt(self.local, brought, reply.version)
            tally.pushes += 1
            tally.wait += reply.waited
            tally.gamma, tally.noise, tally.version = reply.gamma, reply.noise, reply.version
            if reply.staleness > tally.staleness:
                tally.staleness = reply.staleness
            if tally.sizes is not None:
                tally.sizes.change(reply.since, reply.more)
        if pull:
            reply, brought = answers[-1]
            self.rule.pulled(self.local, brought, reply.version)
            tally.version = reply.version
        for place, own in zip(self._frozen, kept, strict=True):
            self.local.weights[place] = own

    def _go_on(self, tally: RoundTally) -> TrainSteps | PullCenter | JudgeCenter | Report:
        """Train the next stretch, or end the round."""
        if tally.told < len(tally.stops):
            self._phase = _TRAINING
            return tally.stops[tally.told].sized(tally.sizes)
        if tally.center_part is None:
            self._phase = _REPORTING
            return _REPORT
        if self._pulled is not None:
            self._phase = _PULLING_CENTER
            return self._pulled
        self._phase = _JUDGING_CENTER
        return JudgeCenter(tally.center_part, self.local.base)

    def _not_now(self, fact: str) -> str:
        return f"{fact}, while the machine waits for {self._phase.value}"

    def validate(self) -> None:
        """Assert the invariants between two facts."""
        tally, sent, phase = self._tally, self._under_way, self._phase
        assert (tally is None) == (phase in (_APART, _IDLE)), phase
        assert (self._sent is not None) == (sent is not None and sent.meanwhile is not None)
        assert self._seq >= 0
        if tally is None:
            assert sent is None
            return
        waiting = phase in (_SENDING, _AWAITING)
        assert (sent is not None) if waiting else (sent is None or phase is _TRAINING), phase
        assert 0 <= tally.told <= len(tally.stops)
        assert tally.pushed <= (tally.round.samples if tally.sizes is None else tally.sizes.until(tally.sizes.steps))
        assert tally.cut is not None or tally.stops[-1].samples == tally.round.samples
        assert tally.pushes + (sent is not None and sent.push is not None) <= self._seq
        assert min(tally.wait, tally.communication, tally.evaluation) >= 0.0
        if phase in (_PULLING_CENTER, _JUDGING_CENTER, _REPORTING):
            assert tally.told == len(tally.stops), "the round has ended"
