"""Runs in simulated time: what must hold of each, and times computed by hand."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from daskcnn.errors import ClusterError
from daskcnn.events import RoundEnded, RunEnded
from daskcnn.nn.score import Score
from daskcnn.partition import PARTITIONERS
from daskcnn.partition.rounds import Round
from daskcnn.ps import RULES
from daskcnn.show.report_tables import tables
from daskcnn.sim.simulation import Simulation
from daskcnn.training.round_report import RoundReport
from tests.sim.sim_cases import WITHIN, cluster, of, run, seconds, workload

every = pytest.mark.parametrize("name", RULES)
WALK = {"kind": "walk", "every": 0.5, "spread": 0.3}

clusters = st.builds(
    cluster,
    *[st.floats(5, 200)] * 3,
    server=st.sampled_from([{}, {"bandwidth": 3000.0, "merge_rate": 5000.0}]),
    costs=st.sampled_from([{}, {"dispatch": 0.05, "exchange": 0.01}]),
    latency=st.sampled_from([0.0, 0.02]),
    speed=st.sampled_from([{"kind": "constant"}, WALK, {"kind": "stall", "seconds": 1.0, "every": 2.0}]),
)


# --- what holds of every run ---


@every
@pytest.mark.parametrize("partition", PARTITIONERS)
@settings(max_examples=12)
@given(on=clusters, epochs=st.integers(2, 4), seed=st.integers(0, 3))
@example(on=cluster(5.0, 5.0, 185.0), epochs=2, seed=0)  # the slow workers have room for a single meeting
def test_presentations_add_up_to_all_samples_times_epochs(
    name: str, partition: str, on: Any, epochs: int, seed: int
) -> None:
    increments = 1 if name == "parallel-sgd" else 3
    work = workload(name, partition=partition, increments=increments, rule=WITHIN.get(name), samples=97, epochs=epochs)
    simulation, events = run(work, on, seed=seed)
    assert simulation.rounds.ended
    assert sum(event.samples for event in of(RoundEnded, events)) == 97 * epochs
    assert of(RunEnded, events)[0].status == "done"
    assert of(RoundEnded, events)[-1].epoch == epochs


@every
def test_the_same_seed_gives_the_same_events_and_another_one_others(name: str) -> None:
    work, on = workload(name, rule=WITHIN.get(name), epochs=3), cluster(10, 20, 30, speed=WALK)
    first, again, other = (run(work, on, seed=seed)[1] for seed in (1, 1, 2))
    assert first == again
    assert first[1:] != other[1:]


@every
def test_without_anything_random_the_seed_says_nothing(name: str) -> None:
    work, on = workload(name, rule=WITHIN.get(name), epochs=2), cluster(10, 20, 30)
    assert run(work, on, seed=1)[1][1:] == run(work, on, seed=2)[1][1:]


@every
def test_time_never_goes_back(name: str) -> None:
    events = run(workload(name, epochs=3), cluster(10, 25, 40, latency=0.01))[1]
    times = [event.at or 0.0 for event in events]
    assert times == sorted(times)
    assert times[0] == 0.0


@every
def test_a_round_s_event_has_the_keys_of_a_cluster_s(name: str) -> None:
    values: Any = dict.fromkeys(RoundReport._fields, 1)
    known: Any = {
        "round": Round("w0", 0, ((0, 10),), 10, (0.0, 1.0)),
        "score": Score(1.0, 5, 10),
        "members": (),
        "sizes": None,
    }
    expected = RoundReport(**{**values, **known}).event(1.0)
    for event in of(RoundEnded, run(workload(name), cluster(10, 20))[1]):
        assert event.record().keys() - {"at"} == expected.record().keys()


@every
def test_a_report_s_tables_can_be_made_of_it(name: str) -> None:
    found = tables(run(workload(name, rule=WITHIN.get(name), epochs=2), cluster(10, 20))[1])
    assert found.status == "done"
    assert found.total.samples == 200
    assert found.seconds > 0
    assert found.server is not None
    assert found.server.merged == found.total.pushes


@every
def test_seconds_of_a_worker_are_accounted_for(name: str) -> None:
    """Busy, evaluation, waiting and communication fill the time from a round's first step to its report."""
    work, on = workload(name, rule=WITHIN.get(name), epochs=3, overlap=False), cluster(10, 20, latency=0.01)
    spent: dict[str, float] = {}
    simulation, events = run(work, on)
    begun = {worker: replica.session * 0.02 for worker, replica in simulation.replicas.items()}
    for event in of(RoundEnded, events):
        taken = sum(getattr(event, key) for key in ("busy", "evaluation", "wait", "communication"))
        spent[event.worker] = spent.get(event.worker, 0.0) + taken
    last = {event.worker: event.at for event in of(RoundEnded, events)}
    for worker, total in spent.items():
        if RULES[name].barrier:  # there the driver waits for the slowest to judge its part
            assert total <= last[worker]
        else:
            assert total + begun[worker] == pytest.approx(last[worker], rel=1e-9)


# --- times by hand ---


def test_one_worker_s_epoch_by_hand() -> None:
    on = cluster(10, bandwidth=1000.0, latency=0.1, costs={"dispatch": 0.5}, evaluations_per_second=40.0)
    simulation, events = run(workload("sgwu", rule={"accuracy_on": "train"}), on)
    joining = 0.1 + (0.1 + 400 / 1000)
    training = 100 / 10
    exchange = 2 * (0.1 + 400 / 1000)
    judging = 20 / 40
    (report,) = of(RoundEnded, events)
    assert report.busy == pytest.approx(training, rel=1e-12)
    assert report.communication == pytest.approx(exchange, rel=1e-12)
    assert report.evaluation == pytest.approx(judging, rel=1e-12)
    assert report.bytes_up == report.bytes_down == 400
    assert simulation.now == pytest.approx(joining + 0.5 + training + exchange + judging, rel=1e-12)


def test_q_is_measured_before_a_push() -> None:
    on = cluster(10, evaluations_per_second=40.0)
    assert seconds(workload("sgwu"), on) == pytest.approx(10 + 20 / 40 + 20 / 40)
    assert seconds(workload("agwu"), on) == pytest.approx(10 + 20 / 40 + 20 / 40)


def test_two_unequal_workers_by_hand() -> None:
    on = cluster(10, 30, evaluations_per_second=1e9)
    train = {"accuracy_on": "train"}
    assert seconds(workload("sgwu", rule=train), on) == pytest.approx(50 / 10, rel=1e-6)
    assert seconds(workload("sgwu", partition="idpa", rule=train), on) == pytest.approx(25 / 10, rel=1e-6)
    # asynchronously, the faster takes up what the epoch still has when its own half is done
    events = run(workload("agwu", rule=train, epochs=2), on)[1]
    ends = sorted((round(event.at, 6), event.worker, event.samples) for event in of(RoundEnded, events))
    assert ends == [(1.666667, "w1", 50), (3.333333, "w1", 50), (5.0, "w0", 50), (5.0, "w1", 50)]


def test_the_server_takes_one_after_the_other_in_and_out() -> None:
    """Two pushes of 400 bytes at 10 s: in at 11 and 12, merged at 13, out at 14 and 15."""
    on = cluster(5, 5, server={"bandwidth": 400.0, "merge_rate": 800.0}, evaluations_per_second=1e9)
    simulation, events = run(workload("sgwu", rule={"accuracy_on": "train"}), on)
    begun = 2.0  # both have joined: a center went to each
    ends = [event.at - begun for event in of(RoundEnded, events)]
    assert ends == pytest.approx([14, 15], rel=1e-6)
    waited = {event.worker: (event.wait, event.communication) for event in of(RoundEnded, events)}
    assert waited == {"w0": pytest.approx((1, 3)), "w1": pytest.approx((0, 5))}
    twice = cluster(5, 5, server={"bandwidth": 400.0, "merge_rate": 800.0}, evaluations_per_second=1e9)
    faster = run(workload("sgwu", rule={"accuracy_on": "train"}, shards=2), twice)[0]
    assert simulation.now - faster.now == pytest.approx((2 + 5) / 2, rel=1e-6)


def test_a_slow_link_delays_its_own_worker_only() -> None:
    workers: Any = {"bandwidth": 100.0}
    on = cluster(10, 10, evaluations_per_second=1e9)
    on = on.model_copy(update={"worker": [on.worker[0].model_copy(update=workers), on.worker[1]]})
    ends = {e.worker: e for e in of(RoundEnded, run(workload("agwu", rule={"accuracy_on": "train"}), on)[1])}
    assert ends["w0"].communication == pytest.approx(8.0)
    assert ends["w1"].communication == 0.0


def test_exchanges_within_a_round_cost_no_time_while_steps_are_made() -> None:
    """Ten steps of 1 s, a push and a pull after each that take 0.4 s: only those at the end are waited for."""
    on = cluster(10, latency=0.1, evaluations_per_second=1e9)
    hidden, waited = (run(workload("downpour", overlap=overlap), on) for overlap in (True, False))
    for (simulation, events), communication in ((hidden, 0.4), (waited, 4.0)):
        (report,) = of(RoundEnded, events)
        assert report.communication == pytest.approx(communication)
        assert report.pushes == 10
        assert simulation.now == pytest.approx(0.2 + 10 + communication, rel=1e-6)


def test_an_exchange_longer_than_the_steps_is_waited_for() -> None:
    """Each takes 4 s, the steps in between 1 s: nine times 3 s, and 4 s at the end."""
    on = cluster(10, latency=1.0, evaluations_per_second=1e9)
    (report,) = of(RoundEnded, run(workload("downpour"), on)[1])
    assert report.communication == pytest.approx(9 * 3 + 4)


def test_bounded_staleness_holds_the_fast_back() -> None:
    free, bounded = (
        run(workload("easgd", rule=rule, epochs=4), cluster(10, 100))[1]
        for rule in ({"tau": 1}, {"tau": 1, "max_staleness": 2})
    )
    assert sum(event.wait for event in of(RoundEnded, free)) == 0
    waits = {event.worker: event.wait for event in of(RoundEnded, bounded)}
    assert waits["w1"] > 1
    assert waits["w0"] == 0


def test_peers_move_two_parts_in_k_of_the_vector_each_and_one_alone_moves_nothing() -> None:
    """(k - 1)/k of the vector goes to the others and as much comes back, at the speed of the slowest link."""
    for speeds, moved, took in (((10, 10, 10, 10), 600, 10 * 2 * 300 / 1000), ((10,), 0, 0.0)):
        on = cluster(*speeds, bandwidth=1000.0, evaluations_per_second=1e9)
        rule = {"exchange": "asa", "batch": "worker"}
        events = run(workload("bsp", rule=rule, samples=100 * len(speeds)), on)[1]
        for event in of(RoundEnded, events):
            assert event.bytes_up == event.bytes_down == 10 * moved
            assert event.communication == pytest.approx(took)


def test_half_precision_halves_the_bytes() -> None:
    for strategy in RULES:
        whole, half = (run(workload(strategy, wire=wire), cluster(10, 20))[1] for wire in ("float32", "float16"))
        assert sum(e.bytes_up for e in of(RoundEnded, whole)) == 2 * sum(e.bytes_up for e in of(RoundEnded, half)) > 0


def test_a_worker_without_a_round_sits_out_and_comes_back() -> None:
    """More workers than samples in the first increment: some begin late, and nobody waits for them."""
    simulation, events = run(workload("sgwu", partition="udpa", samples=2, epochs=4, batch_size=1), cluster(1, 2, 3))
    assert sum(event.samples for event in of(RoundEnded, events)) == 8
    assert simulation.rounds.ended


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.fewest > 1])
def test_a_rule_for_several_is_refused_one_worker(name: str) -> None:
    with pytest.raises(ClusterError, match="is for 2 workers or more, and there are 1; start more, or choose sgwu"):
        Simulation(workload(name), cluster(10)).run()


def test_the_simulator_brings_no_dask_with_it() -> None:
    code = (
        "import sys, pkgutil, importlib, daskcnn.sim\n"
        "for module in pkgutil.iter_modules(daskcnn.sim.__path__):\n"
        "    importlib.import_module(f'daskcnn.sim.{module.name}')\n"
        "found = {'dask', 'distributed', 'cupy', 'matplotlib'} & {name.split('.')[0] for name in sys.modules}\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
