"""Laws of the sharing of workers, and what it decides in plain cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.batch.past_use import oldest_since, used
from daskcnn.batch.policy import share
from daskcnn.batch.queue_play import QueuePlay
from daskcnn.batch.reasons import reasons
from daskcnn.batch.records import Count, Grant, QueuedJob
from daskcnn.batch.shares import Allotment, SharedWorker, SharingRules, may_have, needs_of

AGED = SharingRules().aged


def cpu(least: int, most: int | None = 0) -> dict[str, Count]:
    return {"cpu": Count(least, least if most == 0 else most)}


def job(id_: int, workers: Mapping[str, Count] = cpu(1), *, user: str = "ann", **others: Any) -> QueuedJob:
    return QueuedJob(id=id_, user=user, submitted=others.pop("submitted", 0.0), workers=workers, **others)


def running(id_: int, has: str, workers: Mapping[str, Count] | None = None, **others: Any) -> QueuedJob:
    names = tuple(has.split())
    return job(id_, workers or cpu(len(names)), state="running", has=names, **others)


def desks(number: int) -> list[SharedWorker]:
    return [SharedWorker(f"desk-{i}") for i in range(1, number + 1)]


def why(jobs: list[QueuedJob], workers: list[SharedWorker], now: float = 0.0, **others: Any) -> dict[int, str]:
    said = share(jobs, workers, now=now, **others)
    return reasons(jobs, workers, said, now=now, memory=others.get("memory"), when=lambda at, now: f"{at:g} s")


# --- what is decided ---


def test_a_job_gets_its_number_or_nothing() -> None:
    jobs = [job(1, cpu(2)), job(2, cpu(2)), job(3)]
    assert share(jobs, desks(3), now=0.0).starts == {1: ("desk-1", "desk-2"), 3: ("desk-3",)}
    assert why(jobs, desks(3)) == {
        2: "waits for 2 cpu workers: desk-1, desk-2 are given to job 1; desk-3 is given to job 3"
    }


def test_workers_of_a_running_job_are_named_with_the_time_since_it_has_them() -> None:
    jobs = [running(7, "desk-1 desk-2", since=40.0), job(8, cpu(2))]
    assert why(jobs, desks(3), now=90.0)[8] == (
        "waits for 2 cpu workers: desk-1, desk-2 are job 7's since 40 s; desk-3 is free"
    )


def test_a_newcomer_gets_its_least_from_a_job_that_has_more_and_starts_when_that_is_given_up() -> None:
    jobs = [running(1, "desk-1 desk-2 desk-3 desk-4", cpu(1, 4)), job(2, cpu(2, 2), user="bob")]
    said = share(jobs, desks(4), now=0.0)
    assert len(said.gives[1]) == 2
    assert not said.starts
    assert why(jobs, desks(4))[2] == f"starts when they are given up: {', '.join(said.gives[1])} are job 1's since 0 s"
    jobs[0] = running(1, " ".join(said.workers[1]), cpu(1, 4))
    assert share(jobs, desks(4), now=1.0).starts == {2: said.gives[1]}


def test_equal_elastic_jobs_come_to_have_equal_parts() -> None:
    jobs = [running(1, "desk-1 desk-2 desk-3 desk-4", cpu(1, 4)), job(2, cpu(1, 4), user="bob")]
    said = share(jobs, desks(4), now=0.0)
    assert Counter(map(len, said.workers.values())) == {2: 2}


def test_idle_workers_go_to_the_job_that_gains_most_and_to_none_that_gains_nothing() -> None:
    def seconds(job: QueuedJob, workers: Collection[str]) -> float:
        return {1: 100.0, 2: 100.0 - 10 * len(workers), 3: 100.0 + len(workers)}[job.id]

    jobs = [job(id_, cpu(1, None)) for id_ in (1, 2, 3)]
    said = share(jobs, desks(6), now=0.0, gain=seconds)
    assert {id_: len(own) for id_, own in said.workers.items()} == {1: 1, 2: 4, 3: 1}


def test_running_jobs_that_cannot_change_keep_what_they_have_and_get_no_more() -> None:
    jobs = [running(1, "desk-1 desk-2", cpu(1, 4)), job(2, cpu(2))]
    said = share(jobs, desks(3), now=0.0, rules=SharingRules(elastic=False))
    assert (said.gives, said.takes, said.starts) == ({}, {}, {})


def test_the_user_who_used_least_lately_goes_first() -> None:
    past = [Grant(1, "ann", "desk-1", 0.0, 1000.0)]
    jobs = [job(2, user="ann"), job(3, user="bob")]
    assert [*share(jobs, desks(1), past, now=1000.0).starts] == [3]


def test_jobs_of_users_take_turns_where_several_workers_are_free() -> None:
    jobs = [job(id_, user="ann" if id_ < 10 else "bob") for id_ in (1, 2, 3, 4, 11, 12, 13, 14)]
    assert [*share(jobs, desks(4), now=0.0).starts] == [1, 11, 2, 12]


def test_priorities_order_the_jobs_of_a_user_alone() -> None:
    jobs = [job(1), job(2, priority=5), job(3, user="bob", priority=-1)]
    assert [*share(jobs, desks(2), now=0.0).starts] == [2, 3]


def test_an_aged_job_goes_first_and_has_workers_kept_for_it_as_they_become_free() -> None:
    jobs = [running(1, "desk-1"), job(2, cpu(2), user="bob"), job(3, user="eve", since=60.0)]
    assert [*share(jobs, desks(2), now=AGED - 1).starts] == [3]
    said = share(jobs, desks(2), now=AGED)
    assert not said.starts
    assert said.waits == {2: ("desk-2",), 3: ()}
    assert why(jobs, desks(2), now=AGED) == {
        2: "waits for 2 cpu workers: desk-1 is job 1's since 0 s; desk-2 is kept for it",
        3: "waits for 1 cpu worker: desk-1 is job 1's since 0 s; desk-2 is kept for job 2",
    }


def test_an_aged_job_that_the_cluster_can_never_run_keeps_nothing_back() -> None:
    jobs = [job(1, cpu(3)), job(2, cpu(2), since=AGED)]
    assert [*share(jobs, desks(2), now=2 * AGED).starts] == [2]
    assert why(jobs, desks(2), now=2 * AGED)[1] == "needs 3 cpu workers: the cluster has 2"


def test_whoever_submits_a_thousand_jobs_is_first_once_in_a_while_not_for_ever() -> None:
    many = [job(id_) for id_ in range(1, 1000)]
    past = [Grant(0, "ann", "desk-1", AGED - 60, AGED)]  # the last one of them was started a minute ago
    said = share([*many, job(2000, user="bob", submitted=AGED, since=AGED)], desks(1), past, now=AGED)
    assert [*said.starts] == [2000]


def test_names_narrow_down_the_workers_of_a_job() -> None:
    workers = [*desks(2), SharedWorker("lab-1"), SharedWorker("gpu-1", "gpu")]
    jobs = [job(1, only=("lab-*",)), job(2, {"gpu": Count(1, 1), "cpu": Count(1, 1)}), job(3, only=("lap-*",))]
    said = share(jobs, workers, now=0.0)
    assert said.starts == {1: ("lab-1",), 2: ("gpu-1", "desk-1")}
    assert why(jobs, workers)[3] == "no cpu worker matches lap-*"
    assert why([job(1, {"gpu": Count(1, 1)})], desks(2))[1] == "no gpu worker is there"
    assert why([job(1, {})], [])[1] == "no worker is there"


def test_a_worker_that_another_job_needs_by_name_is_given_last() -> None:
    jobs = [job(1), job(2, only=("desk-1",))]
    assert share(jobs, desks(2), now=0.0).starts == {1: ("desk-2",), 2: ("desk-1",)}


def test_of_equal_workers_the_fastest_is_given_first() -> None:
    workers = [SharedWorker("old"), SharedWorker("new", speed=3.0)]
    assert share([job(1)], workers, now=0.0).starts == {1: ("new",)}


def test_a_worker_that_a_job_could_not_use_is_given_to_it_last() -> None:
    """It would be free again at once, and be the first for the next attempt."""
    workers = [SharedWorker("fast", speed=8), SharedWorker("slow", speed=4)]
    grants = [Grant(1, "ann", "fast", 0.0, 3.0)]
    for code, first in ((3, "slow"), (137, "fast")):
        again = job(1, state="waiting", again_at=50.0, attempts=1, exit_code=code)
        assert share([again], workers, grants, now=100.0).starts == {1: (first,)}
    assert share([again, job(2)], workers, grants, now=100.0).starts == {1: ("fast",), 2: ("slow",)}


def test_jobs_that_are_held_come_after_others_or_are_tried_later_wait() -> None:
    jobs = [
        job(1, state="held"),
        job(2, after=(1,)),
        job(3, after=(1, 2)),
        job(4, state="waiting", again_at=60.0),
        job(5, after=(0,)),  # it has ended
        job(6, cancelling=True),
    ]
    assert [*share(jobs, desks(9), now=59.0).starts] == [5]
    assert why(jobs, desks(9), now=59.0) == {
        1: "held",
        2: "after job 1",
        3: "after jobs 1, 2",
        4: "is tried again at 60 s",
        6: "is being cancelled",
    }
    assert 4 in share(jobs, desks(9), now=60.0).starts


def test_servers_share_a_worker_as_far_as_its_memory_goes() -> None:
    workers = [*desks(9), SharedWorker("ps-1", "ps", memory=3e9, serves=(1,)), SharedWorker("ps-2", "ps", memory=2e9)]
    jobs = [running(1, "desk-1"), job(2), job(3), job(4), job(5), job(6)]
    memory = {1: 1e9, 2: 2e9, 3: 1e9, 4: 1e9, 5: 9e9, 6: 1e9}
    said = share(jobs, workers, now=0.0, memory=memory)
    assert said.servers == {2: "ps-1", 3: "ps-2", 4: "ps-2"}
    assert 5 in said.starts  # too large for any of them: its server has to lie on a worker of its own
    assert (
        why(jobs, workers, memory=memory)[6] == "waits for 1.0 GB for its server: ps-1 has 0 B left, ps-2 has 0 B left"
    )


def test_a_job_that_lost_a_worker_is_filled_up_before_others_start() -> None:
    jobs = [running(1, "desk-1 gone-1", cpu(2, 4)), job(2, cpu(2))]
    said = share(jobs, desks(2), now=0.0)
    assert said.takes == {1: ("desk-2",)}
    assert not said.starts


# --- past use ---


def test_use_is_forgotten_by_halves() -> None:
    past = [Grant(1, "ann", "a", 0.0, 1.0), Grant(2, "bob", "b", 100.0, 101.0), Grant(3, "eve", "c", 200.0)]
    found = used(past, now=101.0, half_life=100.0)
    assert found["bob"] == pytest.approx(1.0, rel=0.01)
    assert found["ann"] == pytest.approx(0.5 * found["bob"])
    assert "eve" not in found  # the clock was set back


def test_a_job_is_the_oldest_of_its_user_since_the_one_before_it_was_started() -> None:
    past = [Grant(1, "ann", "a", 50.0, 60.0), Grant(1, "ann", "b", 70.0), Grant(9, "ann", "c", 99.0)]
    waiting = [job(2, since=10.0), job(3, since=20.0), job(4, user="bob", since=30.0)]
    assert oldest_since(waiting, past) == {2: 50.0, 4: 30.0}


# --- laws ---

counts = st.integers(1, 3).flatmap(
    lambda least: st.builds(Count, st.just(least), st.sampled_from([least, least + 2, None]))
)
asked: st.SearchStrategy[Mapping[str, Count]] = st.one_of(
    st.just({}), st.fixed_dictionaries({"cpu": counts}), st.fixed_dictionaries({"cpu": counts, "gpu": counts})
)


@st.composite
def labs(draw: st.DrawFn) -> tuple[list[QueuedJob], list[SharedWorker], list[Grant], float]:
    """Jobs, workers, the past and the time: any that a service may come upon."""
    kinds = draw(st.lists(st.sampled_from(["cpu", "cpu", "gpu"]), min_size=1, max_size=7))
    workers = [SharedWorker(f"{kind}-{i}", kind, draw(st.sampled_from([1.0, 2.0]))) for i, kind in enumerate(kinds)]
    free, jobs, past = [worker.name for worker in workers], list[QueuedJob](), list[Grant]()
    now = 2 * AGED
    for id_ in range(1, draw(st.integers(1, 7)) + 1):
        own: dict[str, Any] = {
            "priority": draw(st.integers(0, 1)),
            "since": draw(st.sampled_from([0.0, AGED + 60, now])),
        }
        own |= {"only": draw(st.sampled_from([(), (), ("cpu-*",), ("*-1", "*-2", "*-3")]))}
        made = job(id_, draw(asked), user=draw(st.sampled_from(["ann", "bob"])), **own)
        able = [worker.name for worker in workers if any(may_have(made, kind, worker) for kind in needs_of(made))]
        if draw(st.booleans()) and (has := [name for name in draw(st.permutations(free)) if name in able][:3]):
            made = replace(made, state="running", has=tuple(has))
            free = [name for name in free if name not in has]
            past += [Grant(id_, made.user, name, now - 100) for name in has]
        jobs.append(made)
    return jobs, workers, past, now


def carried_out(
    jobs: list[QueuedJob], past: list[Grant], said: Allotment, now: float
) -> tuple[list[QueuedJob], list[Grant]]:
    """The jobs and their past after all of it is done."""
    after, grants = [], [*past]
    for own in jobs:
        new = said.takes.get(own.id, said.starts.get(own.id, ()))
        gone = said.gives.get(own.id, ())
        if own.id in said.starts:
            own = replace(own, state="running", since=now)
        grants = [
            replace(g, ended=now) if g.job == own.id and g.worker in gone and g.ended is None else g for g in grants
        ]
        grants += [Grant(own.id, own.user, name, now) for name in new]
        after.append(replace(own, has=(*(name for name in own.has if name not in gone), *new)))
    return after, grants


@settings(max_examples=60)
@given(labs())
def test_no_worker_is_given_twice_and_each_job_has_its_least_or_nothing(lab: Any) -> None:
    jobs, workers, past, now = lab
    said = share(jobs, workers, past, now=now)
    kinds = {worker.name: worker.kind for worker in workers}
    assert max(Counter(name for own in said.workers.values() for name in own).values(), default=0) <= 1
    for own in jobs:
        given_, more = said.workers.get(own.id, ()), {*said.workers.get(own.id, ())} - {*own.has}
        for kind, count in needs_of(own).items():
            number = sum(kind in ("", kinds[name]) for name in given_)
            before = sum(kind in ("", kinds[name]) for name in own.has)
            if own.state != "running" and given_:
                assert count.least <= number
            assert number <= max(before, count.most or len(workers))
            assert number >= min(before, max(1, count.least))
        assert all(may_have(own, kinds[n], w) or may_have(own, "", w) for n in more for w in workers if w.name == n)
        if own.state != "running":
            assert (own.id in said.starts) != (own.id in said.waits)
    assert all(reasons(jobs, workers, said, now=now).values())


@settings(max_examples=60)
@given(labs(), st.booleans())
def test_what_is_carried_out_comes_to_rest(lab: Any, elastic: bool) -> None:
    jobs, workers, past, now = lab
    rules = SharingRules(elastic=elastic)
    for _ in range(3):  # gives; starts and takes; nothing
        said = share(jobs, workers, past, now=now, rules=rules)
        jobs, past = carried_out(jobs, past, said, now)
    said = share(jobs, workers, past, now=now, rules=rules)
    assert (said.gives, said.takes, said.starts) == ({}, {}, {})


@settings(max_examples=60)
@given(labs())
def test_workers_that_are_given_up_slowly_are_asked_for_once_and_it_comes_to_rest(lab: Any) -> None:
    jobs, workers, past, now = lab
    leaving, asked = dict[str, int](), list[str]()
    for _ in range(6):
        said = share(jobs, workers, past, now=now, leaving=leaving)
        assert not {name for own in said.starts.values() for name in own} & leaving.keys(), "it is not free yet"
        assert not any(leaving.get(name, id_) != id_ for id_, own in said.takes.items() for name in own)
        asked += [name for own in said.gives.values() for name in own]
        left = {name: id_ for name, id_ in leaving.items() if name not in said.takes.get(id_, ())}
        gives = {id_: tuple(name for name, own in left.items() if own == id_) for id_ in left.values()}
        takes = {id_: tuple(n for n in own if leaving.get(n) != id_) for id_, own in said.takes.items()}
        jobs, past = carried_out(jobs, past, replace(said, gives=gives, takes=takes), now)
        leaving = {name: id_ for id_, own in said.gives.items() for name in own}
    said = share(jobs, workers, past, now=now, leaving=leaving)
    assert (leaving, said.gives, said.takes, said.starts) == ({}, {}, {}, {})
    assert len(asked) == len({*asked})


def test_a_running_job_gives_up_workers_beyond_its_most() -> None:
    jobs = [running(1, "desk-1 desk-2 desk-3", cpu(1, 2))]
    assert share(jobs, desks(3), now=0.0).gives == {1: ("desk-3",)}
    assert share(jobs, desks(3), now=0.0, fixed=[1]).gives == {}


@settings(max_examples=6)
@given(st.integers(2, 5), st.sampled_from(["ann", "bob"]), st.integers(-1, 1), st.floats(200, 900))
def test_no_stream_of_small_jobs_keeps_a_large_one_waiting(
    number: int, user: str, priority: int, length: float
) -> None:
    """It starts once those that run when it has aged have ended."""
    large = job(1, cpu(number), user=user, priority=priority, submitted=1.0)
    stream = [
        job(2 + i, user="ann", submitted=i * length / (2 * number)) for i in range(round(2 * AGED / length) * number)
    ]
    played = QueuePlay([large, *stream], desks(number), lambda job, workers: length).run()
    (began,) = [own.began for own in played.jobs if own.job.id == 1]
    assert began is not None
    assert AGED < began <= 1.0 + AGED + length


def test_every_job_of_a_user_starts_in_time_though_smaller_and_dearer_ones_never_end() -> None:
    """A job waits, after those before it, as long as it takes to age, and as a job takes to end."""
    stuck = [job(id_, cpu(2), priority=-1) for id_ in range(1, 4)]
    stream = [job(10 + i, submitted=i * 100.0, priority=1) for i in range(130)]
    played = QueuePlay([*stuck, *stream], desks(2), lambda job, workers: 400.0).run()
    began = [own.began or 0.0 for own in played.jobs if own.job.priority < 0]
    assert all(then - before <= AGED + 800.0 for before, then in zip([0.0, *began], began, strict=False))


@pytest.mark.parametrize(
    ("sizes", "lengths"), [((1, 1), (100.0, 300.0)), ((1, 3), (100.0, 300.0)), ((2, 1), (200.0, 900.0))]
)
def test_shares_of_users_become_equal(sizes: tuple[int, int], lengths: tuple[float, float]) -> None:
    users, end = ("ann", "bob"), 8_000.0
    jobs = [job(2 * i + u, cpu(sizes[u]), user=users[u], submitted=i * 40.0) for i in range(190) for u in (0, 1)]
    times = dict(zip(users, lengths, strict=True))
    played = QueuePlay(jobs, desks(4), lambda job, workers: times[job.user]).run(until=end)
    shares = used(played.grants, end, half_life=1e9)
    assert shares["ann"] / shares["bob"] == pytest.approx(1.0, abs=0.1)
