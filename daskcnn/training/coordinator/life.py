"""One life of a run: its rounds are given out, its replicas join and leave, its reports are taken.

A life ends with its parameter server, or with all presentations made. `replicas` says how lives follow each other.

Joining. All replicas whose rounds are due together join before the first of these rounds starts, because a barrier
counts the replicas that have joined. Reports that come meanwhile are put off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from daskcnn.events import SamplesAllocated, WorkerJoined
from daskcnn.partition.allocation import Allocation
from daskcnn.partition.rounds import Round, Rounds
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.orders import Outbox
from daskcnn.training.coordinator.records import Records
from daskcnn.training.coordinator.roster import Roster
from daskcnn.training.coordinator.sessions import Running, Sessions
from daskcnn.training.coordinator.settings import STEPS_AHEAD, Settings
from daskcnn.training.coordinator.teams import Teams
from daskcnn.training.judging import JudgedPart, pushes_a_measurement

SHOWN = 8
"""A line is shown of other shares of a step once a worker has this part of its samples more or fewer."""


class Life:
    """Gives the replicas work while all goes well.

    logs: give `Log` orders for rounds. newcomers: workers calibrated in mid-run, without samples yet, for whom there is
    a place; groups formed anew, without a round; and since when. paused: no round is given out, as too few workers are
    there.
    """

    def __init__(
        self, number: int, settings: Settings, roster: Roster, records: Records, out: Outbox, *, logs: bool
    ) -> None:
        self.number, self._settings, self._roster, self._records = number, settings, roster, records
        self._out, self._logs = out, logs
        self._barrier = settings.rule.barrier  # read with every report: kept where a look-up is cheap
        self.teams = Teams(settings, roster, out)
        self.sessions = Sessions()
        self.rounds = self._first_rounds()
        self.newcomers: dict[str, float] = {}
        self.closing = False  # no round starts any more
        self.paused = False
        self._scored: set[str] = set()  # replicas that judge the center after their round
        self._told: Allocation | None = None  # what was logged last
        self._said: dict[str, int] = {}  # samples of a step that a line was shown of

    def _first_rounds(self) -> Rounds:
        settings, rule, seconds = self._settings, self._settings.rule, self.teams.seconds
        growth = self._records.growth
        growth.fit(self._roster.alive.values())
        rounds = Rounds(
            settings.partitioner,
            settings.samples,
            seconds,
            epochs=settings.epochs,
            barrier=rule.barrier,
            passes=rule.passes(settings.epochs),
            swaps=rule.swaps,
            batch_size=growth.samples if settings.meets_within_rounds else None,
            shares_steps=rule.shares_steps,
            alone=settings.may_be_alone,
            cuts_alone=growth.grows,
            resizes_steps=settings.resizes_steps,
            meetings=rule.meetings if rule.steps_by_speed else None,
        )
        kept = self._records.kept
        if book := kept.book:
            # by what was done, and not by what was left: the run may have been given more epochs since
            rounds.restore(book["rounds"], tuple(seconds), done=round(kept.epoch * settings.samples))
        return rounds

    @property
    def over(self) -> bool:
        """True if no replica has anything left to do."""
        waits = self.paused and not (self.closing or self.rounds.ended or self._records.evaluations.stopping)
        return not (self.sessions.running or self.sessions.joining or waits)

    def waited_for(self) -> list[str]:
        """Return the replicas whose rounds have to end before newcomers have samples, or a round."""
        running, teams = self.sessions.running, self.teams
        if self._settings.replica_size == 1:
            return [*running] if self.newcomers else []
        if self._barrier:
            formed_anew = self.newcomers.keys() & teams.members.keys() - running.keys()
            return [*running] if formed_anew or teams.lacks_free else []
        return [replica for replica in running if teams.short(replica)] if teams.free else []

    def seconds_left(self, replicas: Iterable[str], now: float) -> float:
        """Return the seconds until these rounds under way should have ended."""
        return max((self.sessions.running[replica].ends - now for replica in replicas), default=0.0)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of the slowest of the rounds under way; of all that are submitted, for groups."""
        ahead = STEPS_AHEAD + 1 if self._settings.replica_size > 1 else 1
        rounds, batch = [running.round for running in self.sessions.running.values()], self._settings.batch_size
        each = [(round_.samples / round_.steps if round_.steps else batch, round_.worker) for round_ in rounds]
        return ahead * max((samples * self.rounds.seconds[worker] for samples, worker in each), default=0.0)

    # --- rounds are given out ---

    def issue(self, now: float, ended: tuple[str, ...] = ()) -> None:
        """Start the rounds that are due; their replicas join first, replicas without a round leave the barrier.

        ended: replicas whose round has ended just now.
        """
        rounds, joined = self.rounds, self.sessions.joined
        if not (self._barrier and rounds.running):
            self._take_in()
        due = [] if self._records.evaluations.stopping or self.closing or self.paused else rounds.due()
        if rounds.allocation is not self._told and not rounds.ended:  # given out, or left by a replica that is lost
            self._told = rounds.allocation
            if self._logs:
                self._log_allocation(rounds.allocation.sizes())
        self._sit_out(ended, due)
        strangers = [round_.worker for round_ in due if round_.worker not in joined]
        if strangers:
            self.sessions.due += due
            for replica in strangers:
                self._out.put(orders.Join(replica, self.number, self.sessions.begin(replica, now)))
        elif due:
            self._start(due, now)

    def _take_in(self) -> None:
        """Let workers that came, and groups of them, take their share from the others; fill up groups without a round.

        These join anew.
        """
        teams, rounds = self.teams, self.rounds
        for replica in self._new_replicas() if self._settings.replica_size == 1 else self._new_groups():
            rounds.join(replica, teams.seconds[replica])
            self._out.log(WorkerJoined(worker=replica, samples=rounds.allocation.size(replica)))

    def _new_replicas(self) -> list[str]:
        new, self.newcomers = [*self.newcomers], {}
        for worker in new:
            self.teams.add(worker, (worker,))
        return new

    def _new_groups(self) -> list[str]:
        teams = self.teams
        for replica in [each for each in teams.members if each not in self.rounds.running] if teams.free else ():
            if teams.short(replica) and teams.free:
                if replica in self.sessions.joined:
                    self._leave(replica)
                teams.regroup(replica)
        found, free = teams.new_groups(), teams.free
        self.newcomers = {worker: since for worker, since in self.newcomers.items() if worker in free}
        return found

    def _log_allocation(self, sizes: dict[str, int]) -> None:
        step, said = self._settings.step_parts(sizes, self._records.growth.samples), self._said
        least = sum(step.values()) / SHOWN
        alike = step.keys() == said.keys() != set() and all(abs(step[each] - said[each]) < least for each in step)
        self._said = said if alike else step
        self._out.log(SamplesAllocated(sizes=sizes, step=step, alike=alike))

    def _sit_out(self, ended: tuple[str, ...], due: list[Round]) -> None:
        """Let no one wait for replicas without a round: behind a barrier once the others' is due, else at once."""
        if self._barrier:
            ended = tuple(self.sessions.joined) if due else ()
        for replica in ended:
            if replica not in self.rounds.running and replica in self.sessions.joined:
                self._leave(replica)

    def _leave(self, replica: str) -> None:
        sessions = self.sessions
        sessions.joined.pop(replica, None)
        number = sessions.numbers.get(replica)
        if number is not None and number != sessions.left.get(replica):  # else its last push would not count any more
            self._out.put(orders.Leave(replica, self.number, number))

    def _start(self, due: list[Round], now: float) -> None:
        if self._settings.rule.judges_pushes and self._settings.rule.period is not None:
            between = pushes_a_measurement([(round_.samples, self._pushes(round_)) for round_ in due])
            due = [replace(round_, judged_every=between) for round_ in due]
        q, scored = self._to_judge(due)
        records, alive = self._records, self._roster.alive
        scale = self._settings.rate_scale(len(self.rounds.running)) * records.divergence.scale * records.growth.rate
        self._scored.update(scored)
        for round_ in due:
            worker, session = round_.worker, self.sessions.numbers[round_.worker]
            ends = now + round_.samples * self.rounds.seconds[worker]
            self.sessions.running[worker] = Running(round_, session, now, self._expected(round_), ends)
            round_ = records.growth.measuring(round_, alive.get(worker))
            self._out.put(orders.StartRound(self.number, session, round_, scored.get(worker), q, scale))

    def _expected(self, round_: Round) -> float:
        """Return the seconds within which the round should be heard of."""
        settings, each = self._settings, self.rounds.seconds[round_.worker]
        if settings.replica_size > 1:
            return (STEPS_AHEAD + 1) * settings.batch_size * each
        if round_.steps and settings.peers and (period := settings.rule.period):
            return round_.samples * each / -(-round_.steps // period)
        return round_.samples * each

    def _to_judge(self, due: list[Round]) -> tuple[JudgedPart | None, dict[str, JudgedPart]]:
        """Return the samples for Q, the same for all these rounds, and those on which each replica judges the center.

        Behind a barrier all replicas judge the center, else one each epoch.
        """
        settings, judging, lo = self._settings, self._records.judging, self._settings.samples
        whole, judges = settings.validation, self._judges_of_center(due)
        each = 1 / max(1, whole if self._barrier else whole * len(self.teams.members))
        costs = [
            judging.cost(
                round_.worker,
                round_.samples,
                self.rounds.seconds[round_.worker],
                own=self._measurements(round_),
                share=each * (judges.get(round_.worker, 0) if self._barrier else sum(judges.values())),
                alone=self.teams.judges[round_.worker],
            )
            for round_ in due
        ]
        q, center = judging.sizes(costs, last=self._barrier and self.rounds.budget.spent)
        draw = max(round_.number for round_ in due)
        own = JudgedPart.of(lo, q, whole, draw) if settings.rule.judges_pushes else None
        part = JudgedPart.of(lo, center, whole, draw)
        return own, self.teams.parts(part) if len(judges) > 1 else dict.fromkeys(judges, part)

    def _pushes(self, round_: Round) -> int:
        """Return the pushes of a round of a rule that goes by Q."""
        steps, period = -(-round_.samples // self._settings.batch_size), self._settings.rule.period
        return 1 if round_.alone or period is None else round_.meetings or -(-steps // period)

    def _measurements(self, round_: Round) -> int:
        """Return the times that Q is measured in a round."""
        return -(-self._pushes(round_) // round_.judged_every) if self._settings.rule.judges_pushes else 0

    def _judges_of_center(self, due: list[Round]) -> dict[str, int]:
        """Return the replicas that judge the center after these rounds, and the samples of each if it judges on all."""
        rounds, whole = self.rounds, self._settings.validation
        if self._barrier:
            parts = self.teams.parts(JudgedPart(0, whole))
            here = parts.keys() <= {round_.worker for round_ in due}
            return {name: part.samples for name, part in parts.items()} if here else {due[0].worker: whole}
        issued = 1 - rounds.budget.left / rounds.presentations
        return {due[-1].worker: whole} if self._records.evaluations.due(issued * self._settings.epochs) else {}

    # --- they join and report ---

    def all_joined(self, now: float) -> None:
        """Start the rounds that are due, and take the reports that came meanwhile, once all have joined."""
        sessions = self.sessions
        due, held = sessions.due, sessions.held
        sessions.due, sessions.held = [], []
        if self.closing:
            for round_ in due:
                self.rounds.dropped(round_.worker)
        elif due:
            self._start(due, now)
        for report in held:
            if self._records.ruined is None:
                self.round_done(report, now)
        if not held:  # a group that was formed anew meanwhile may have no round
            self.issue(now)

    def round_done(self, fact: facts.RoundDone, now: float) -> None:
        """End a round. Nothing follows from one of a replica that was given up, or from one that comes twice."""
        if not self.awaits(fact):
            return
        if self.sessions.joining:
            if all(report.replica != fact.replica for report in self.sessions.held):  # it may come twice
                self.sessions.held.append(fact)
            return
        self.take(fact, now)
        if self._records.ruined is not None:  # the run goes back: nothing starts any more
            return
        # behind a barrier nothing follows before the last report, unless a loss has changed the allocation
        if not (self._barrier and self.rounds.running) or self.rounds.allocation is not self._told:
            self.issue(now, (fact.replica,))

    def awaits(self, fact: facts.RoundDone) -> bool:
        """Return True if this is the report of a round that is under way."""
        running = self.sessions.running.get(fact.replica)
        if running is None or fact.session != running.session:
            return False
        return fact.report.round.number == running.round.number

    def take(self, fact: facts.RoundDone, now: float) -> None:
        """Take the report of a round that is under way, and nothing else."""
        report, replica = fact.report, fact.replica
        del self.sessions.running[replica]
        if report.cut is not None:
            self._scored.discard(replica)  # it has not judged the center
            if not self._settings.peers:  # it has left the server with its last push, and joins anew for another round
                self.sessions.joined.pop(replica, None)
                if self._barrier:  # where the push may wait for others
                    self.sessions.left[replica] = self.sessions.numbers[replica]
        if samples := report.samples:
            exchanges = {"exchanges": report.communication / samples, "hidden": report.hidden / samples}
            self.rounds.finished(replica, report.busy / samples, report.sizes, cut=report.cut, **exchanges)
            self._record(fact, now)
        else:
            self.rounds.dropped(replica)

    def _record(self, fact: facts.RoundDone, now: float) -> None:
        report, records, rounds = fact.report, self._records, self.rounds
        if report.version > records.version:
            records.version = report.version
        if judged := fact.replica in self._scored:
            self._scored.remove(fact.replica)
        records.evaluations.add(report, judged=judged)
        paid = (report.worker,) if self._barrier else [*self.teams.members]
        records.judging.add(
            report.worker,
            report.samples,
            report.busy,
            own=report.q_samples * report.q_measured,
            center=report.judged,
            evaluation=report.evaluation,
            paid=paid,
        )
        if self._logs:
            self._out.log(report.event(records.epoch(rounds)))
        records.growth.add(report, self._roster.alive.get(report.worker))
        round_ended = not rounds.running if self._barrier else judged
        resized = records.growth.decide(self._roster.alive.values()) if round_ended else None  # kept by what is saved
        if round_ended and records.evaluations.judged:
            records.evaluated(report, rounds, self.number, now)
        if resized is not None and not rounds.ended:
            rounds.batch_size, self._told = resized.samples, None
            self._out.log(resized)
        if not (self._barrier and rounds.running):
            records.snapshot_if_due(rounds, self.number, now)

    # --- a replica is lost ---

    def samples_of(self, replica: str) -> int:
        """Return the number of the replica's samples; 0 for one without a round to its name."""
        return self.rounds.allocation.size(replica) if replica in self.rounds.seconds else 0

    def lose(self, replica: str) -> None:
        """Give up all that the lost replica has under way."""
        self.teams.drop(replica)
        self._give_up(replica)

    def reform(self, replica: str, now: float) -> bool:
        """Form a group anew that has lost workers, and give up its round. Returns False without any worker."""
        if not (self.teams.left(replica) or self.teams.free):
            return False
        self._give_up(replica)
        if replica in self.rounds.running:
            self.rounds.dropped(replica)
        self._leave(replica)
        self.teams.regroup(replica)
        self.newcomers[replica] = now
        return True

    def _give_up(self, replica: str) -> None:
        sessions = self.sessions
        joining, running = sessions.joining.pop(replica, None), sessions.running.pop(replica, None)
        sessions.joined.pop(replica, None)
        sessions.due = [round_ for round_ in sessions.due if round_.worker != replica]
        if joining is not None or running is not None:
            self._out.put(orders.Cancel(replica))
        self._scored.discard(replica)

    def give_away(self, replica: str) -> None:
        """Give the replica's samples to the others, and let none wait for it."""
        if replica in self.rounds.seconds:
            self.rounds.lost(replica)
        if not self._settings.peers:
            self._leave(replica)  # it may have joined without our knowing

    def go_on_without(self, now: float) -> None:
        """Start the rounds that are due after a loss."""
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
        assert rounds.done + under_way + rounds.unmerged + rounds.budget.left == rounds.presentations
        if training:
            assert sessions.running or sessions.joining or self.paused, "nobody goes on"
            assert bool(sessions.due) == bool(sessions.joining), f"{sessions.due} wait for {sessions.joining}"
            assert not sessions.held or sessions.joining, "a report waits for nobody"
            assert all(report.replica in sessions.running for report in sessions.held), "of a round that was given up"
