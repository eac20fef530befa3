"""The sessions of a life's replicas: who has joined, who joins, and whose rounds wait or are under way.

One life of a run: its rounds are given out, its replicas join and leave, its reports are taken.

A life ends with its parameter server, or with all presentations made. `replicas` says how lives follow each other.

Joining. All replicas whose rounds are due together join before the first of these rounds starts, because a barrier
counts the replicas that have joined. Reports that come meanwhile are put off.
"""

from __future__ import annotations

from dataclasses import dataclass

from daskcnn.events import SamplesAllocated, WorkerJoined
from daskcnn.partition.allocation import Allocation
from daskcnn.partition.rounds import Round, Rounds
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.orders import Outbox
from daskcnn.training.coordinator.records import Records
from daskcnn.training.coordinator.roster import Roster
from daskcnn.training.coordinator.settings import PATIENCE, STEPS_AHEAD, Settings
from daskcnn.training.coordinator.teams import Teams


@dataclass(slots=True)
class Running:
    """A round under way. Not frozen: it is made once a round, and a sign of life renews it.

    Attributes
    ----------
    heard : when there was the last sign of life.
    expected : seconds within which the next one should come.
    """

    round: Round
    session: int
    heard: float
    expected: float


class Sessions:
    """The replicas that take part in a life, and their rounds under way.

    Attributes
    ----------
    joined : replicas that hold the center and count in the barrier; an ordered set.
    joining : replicas that were asked to join, and since when.
    due : rounds that start once all who join have joined.
    held : reports that came meanwhile.
    running : rounds under way, by replica.
    asked : whether an answer is to come to who waits for whom.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.joined: dict[str, None] = {}
        self.joining: dict[str, float] = {}
        self.due: list[Round] = []
        self.held: list[facts.RoundDone] = []
        self.running: dict[str, Running] = {}
        self.asked = False

    def begin(self, replica: str, now: float) -> int:
        """The replica is to join; returns the number of its session."""
        self._numbers[replica] = session = self._numbers.get(replica, 0) + 1
        self.joining[replica] = now
        return session

    def has_joined(self, replica: str, session: int) -> bool:
        """The replica says that it has joined; returns whether it was waited for."""
        if replica not in self.joining or session != self._numbers[replica]:
            return False
        del self.joining[replica]
        self.joined[replica] = None
        return True

    def number(self, replica: str) -> int | None:
        """The number of the replica's session; None: it was never asked to join."""
        return self._numbers.get(replica)

    def waiting(self) -> tuple[list[Round], list[facts.RoundDone]]:
        """Rounds and reports that have waited for others to join; they wait no longer."""
        due, self.due = self.due, []
        held, self.held = self.held, []
        return due, held

    def start(self, round_: Round, now: float, expected: float) -> int:
        """The round is under way; returns the number of its replica's session."""
        session = self._numbers[round_.worker]
        self.running[round_.worker] = Running(round_, session, now, expected)
        return session

    def leave(self, replica: str) -> int:
        """The replica takes part no longer, until it joins again; returns the number of its session."""
        self.joined.pop(replica, None)
        return self._numbers[replica]

    def drop(self, replica: str) -> bool:
        """The replica is lost; returns whether it had something under way."""
        joining, running = self.joining.pop(replica, None), self.running.pop(replica, None)
        self.joined.pop(replica, None)
        self.due = [round_ for round_ in self.due if round_.worker != replica]
        return joining is not None or running is not None

    # --- signs of life ---

    def heard(self, replica: str, session: int, now: float) -> None:
        """The replica's round goes on."""
        running = self.running.get(replica)
        if running is not None and running.session == session:
            running.heard = now

    def heard_of_all(self, now: float) -> None:
        """Nobody is to blame for the silence up to now."""
        for running in self.running.values():
            running.heard = now

    def limit(self, stall_timeout: float) -> float:
        """Seconds without a sign of life after which a replica is overdue."""
        return stall_timeout + PATIENCE * max((running.expected for running in self.running.values()), default=0.0)

    def silent(self, now: float, limit: float) -> list[str]:
        """Replicas whose rounds have not been heard of for longer than `limit` seconds."""
        return [replica for replica, running in self.running.items() if now - running.heard > limit]

    def not_joined(self, now: float, limit: float) -> list[str]:
        """Replicas that have been joining for longer than `limit` seconds."""
        return [replica for replica, since in self.joining.items() if now - since > limit]

    def validate(self) -> None:
        """Assert what holds between two facts."""
        assert self.running.keys() <= self.joined.keys(), "a round of a replica that has not joined"
        assert not self.joined.keys() & self.joining.keys()
        assert self.joined.keys() | self.joining.keys() <= self._numbers.keys()


class Life:
    """Decides what the replicas do while all goes well.

    Parameters
    ----------
    logs : whether `Log` orders for rounds are wanted.

    Attributes
    ----------
    newcomers : workers calibrated in mid-run, without samples yet.
    """

    def __init__(
        self, number: int, settings: Settings, roster: Roster, records: Records, out: Outbox, *, logs: bool
    ) -> None:
        self.number, self._settings, self._roster, self._records = number, settings, roster, records
        self._out, self._logs = out, logs
        self._barrier = settings.rule.barrier  # asked for with every report: kept where a look-up is cheap
        self.teams = Teams(settings, roster, out)
        self.sessions = Sessions()
        self.rounds = self._first_rounds()
        self.newcomers: list[str] = []
        self._scored: set[str] = set()  # replicas that judge the center after their round
        self._told: Allocation | None = None  # what was logged last

    def _first_rounds(self) -> Rounds:
        settings, rule, seconds = self._settings, self._settings.rule, self.teams.seconds
        rounds = Rounds(
            settings.partitioner,
            settings.samples,
            seconds,
            epochs=settings.epochs,
            barrier=rule.barrier,
            passes=rule.passes(settings.epochs),
            swaps=rule.swaps,
            batch_size=settings.batch_size if settings.meets_within_rounds else None,
        )
        kept = self._records.kept
        if book := kept.book:
            # by what was done, and not by what was left: the run may have been given more epochs since
            rounds.restore(book["rounds"], tuple(seconds), done=round(kept.epoch * settings.samples))
        return rounds

    @property
    def over(self) -> bool:
        """Whether no replica has anything left to do."""
        return not self.sessions.running and not self.sessions.joining

    # --- rounds are given out ---

    def issue(self, now: float, ended: tuple[str, ...] = ()) -> None:
        """Start the rounds that are due; their replicas join first, replicas without a round leave the barrier.

        ended: replicas whose round has ended just now.
        """
        rounds, joined = self.rounds, self.sessions.joined
        if self.newcomers and not (self._barrier and rounds.running):
            self._admit()
        due = [] if self._records.looks.stopping else rounds.due()
        if rounds.allocation is not self._told:  # given out, or left by a replica that is lost
            self._told = rounds.allocation
            if self._logs:
                self._out.log(SamplesAllocated(sizes=rounds.allocation.sizes()))
        self._sit_out(ended, due)
        strangers = [round_.worker for round_ in due if round_.worker not in joined]
        if strangers:
            self.sessions.due += due
            for replica in strangers:
                self._out.put(orders.Join(replica, self.number, self.sessions.begin(replica, now)))
        elif due:
            self._start(due, now)

    def _sit_out(self, ended: tuple[str, ...], due: list[Round]) -> None:
        """Nobody is to wait for replicas without a round: behind a barrier once the others' is due, else at once."""
        if self._barrier:
            ended = tuple(self.sessions.joined) if due else ()
        for replica in ended:
            if replica not in self.rounds.running and replica in self.sessions.joined:
                self._leave(replica)

    def _leave(self, replica: str) -> None:
        self._out.put(orders.Leave(replica, self.number, self.sessions.leave(replica)))

    def _admit(self) -> None:
        """Workers that came in mid-run take their share of the samples from the others."""
        for worker in self.newcomers:
            self.rounds.join(worker, self._roster.alive[worker].seconds)
            self.teams.add(worker)
            self._out.log(WorkerJoined(worker=worker, samples=self.rounds.allocation.size(worker)))
        self.newcomers = []

    def _start(self, due: list[Round], now: float) -> None:
        scored = self._to_score(due)
        scale = self._settings.rate_scale(len(self.rounds.running)) * self._records.divergence.scale
        self._scored.update(scored)
        for round_ in due:
            session = self.sessions.start(round_, now, self._expected(round_))
            self._out.put(orders.StartRound(self.number, session, round_, scored.get(round_.worker), scale))

    def _expected(self, round_: Round) -> float:
        """Seconds within which the round should be heard of."""
        settings, each = self._settings, self.rounds.seconds[round_.worker]
        if settings.replica_size > 1:
            return (STEPS_AHEAD + 1) * settings.batch_size * each
        if round_.steps and settings.peers and (period := settings.rule.period):
            return round_.samples * each / -(-round_.steps // period)
        return round_.samples * each

    def _to_score(self, due: list[Round]) -> dict[str, tuple[int, int]]:
        """Which replica judges which validation samples: behind a barrier all of them, else one each epoch."""
        rounds, settings = self.rounds, self._settings
        lo, hi = settings.samples, settings.samples + settings.validation
        if self._barrier:
            parts = self.teams.parts(lo, hi)
            return parts if parts.keys() <= {r.worker for r in due} else {due[0].worker: (lo, hi)}
        issued = 1 - rounds.budget.left / rounds.presentations
        return {due[-1].worker: (lo, hi)} if self._records.looks.due(issued * settings.epochs) else {}

    # --- what is heard of them ---

    def all_joined(self, now: float) -> None:
        """Nobody is joining any more: the rounds start, and the reports that came meanwhile are taken."""
        due, held = self.sessions.waiting()
        if due:
            self._start(due, now)
        for report in held:
            if self._records.ruined is None:
                self.round_done(report, now)
        if not due and not held:
            self.issue(now)

    def round_done(self, fact: facts.RoundDone, now: float) -> None:
        """A round has ended. Nothing follows from one of a replica that was given up, or from one that comes twice."""
        replica, report, sessions = fact.replica, fact.report, self.sessions
        running = sessions.running.get(replica)
        if running is None or fact.session != running.session or report.round.number != running.round.number:
            return
        if sessions.joining:
            sessions.held.append(fact)
            return
        del sessions.running[replica]
        rounds = self.rounds
        rounds.finished(replica, report.busy / report.round.samples)
        self._record(fact, now)
        if self._records.ruined is not None:  # the run goes back: nothing starts any more
            return
        # behind a barrier nothing follows before the last report, unless a loss has changed the allocation
        if not (self._barrier and rounds.running) or rounds.allocation is not self._told:
            self.issue(now, (replica,))

    def _record(self, fact: facts.RoundDone, now: float) -> None:
        report, records, rounds = fact.report, self._records, self.rounds
        if report.version > records.version:
            records.version = report.version
        if judged := fact.replica in self._scored:
            self._scored.remove(fact.replica)
        records.looks.add(report, judged=judged)
        if self._logs:
            self._out.log(report.event(records.epoch(rounds)))
        round_ended = not rounds.running if self._barrier else judged
        if round_ended and records.looks.judged:
            records.look(report.lr, rounds, self.number, now)

    # --- a replica is lost ---

    def samples_of(self, replica: str) -> int:
        """Samples that the replica has; 0 for one without a round to its name."""
        return self.rounds.allocation.size(replica) if replica in self.rounds.seconds else 0

    def lose(self, replica: str) -> None:
        """The replica is gone: what it has under way is given up."""
        self.teams.drop(replica)
        if self.sessions.drop(replica):
            self._out.put(orders.Cancel(replica))
        self._scored.discard(replica)

    def give_away(self, replica: str) -> None:
        """The other replicas take the lost one's samples, and none waits for it."""
        if replica in self.rounds.seconds:
            self.rounds.lost(replica)
        if self.sessions.number(replica) is not None and not self._settings.peers:
            self._leave(replica)  # it may have joined without our knowing

    def go_on_without(self, now: float) -> None:
        """Behind a loss: rounds start that are due now."""
        if self.sessions.joining:
            return
        if self.sessions.due or self.sessions.held:
            self.all_joined(now)
        else:
            self.issue(now)

    def validate(self, *, training: bool) -> None:
        """Assert every invariant that holds between two facts."""
        rounds, sessions = self.rounds, self.sessions
        self.teams.validate()
        sessions.validate()
        rounds.allocation.check()
        members = self.teams.members.keys()
        assert rounds.seconds.keys() == rounds.allocation.ranges.keys() == members
        assert sessions.joined.keys() | sessions.joining.keys() <= members
        started = {round_.worker for round_ in sessions.due} | sessions.running.keys()
        assert rounds.running.keys() == started, f"{rounds.running.keys()} are under way, {started} were started"
        under_way = sum(round_.samples for round_ in rounds.running.values())
        assert rounds.done + under_way + rounds.budget.left == rounds.presentations
        if training:
            assert sessions.running or sessions.joining, "nobody goes on"
            assert bool(sessions.due) == bool(sessions.joining), f"{sessions.due} wait for {sessions.joining}"
            assert not sessions.held or sessions.joining, "a report waits for nobody"
