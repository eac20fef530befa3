"""The coordinator of `strategy = "auto"`: who is left out, and when those come back."""

from __future__ import annotations

from dataclasses import replace

from daskcnn.events import RunContinued, RunEnded, RunPaused, StrategyChosen, WorkerJoined, WorkerLeftOut
from daskcnn.ps import BSP, LocalSGD
from daskcnn.ps.auto import ALONE
from daskcnn.sharded.balance import WorkerLink
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.strategy_prices import PricedStrategy, Pricer
from tests.training.coordinator_shell import Shell
from tests.training.test_coordinator_machine import EPOCHS, SAMPLES, settings_of

FAST, SLOW = WorkerLink(1e9, 1e-5), WorkerLink(1e3, 0.1)


def run(**links: WorkerLink) -> Shell:
    """A run of cpu-0, cpu-1, … with these links, each worker slower than the one before; all rounds are under way."""
    shell = Shell(settings_of(("auto", {}), "idpa"))
    shell.links = {name.replace("_", "-"): link for name, link in links.items()}
    shell.start(*shell.links)
    return shell


def joined(shell: Shell) -> set[str]:
    return {order.replica for order in shell.of(orders.Join)}


def ends_well(shell: Shell) -> None:
    assert shell.finish().status == "done"
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES
    assert not shell.of(RunEnded)  # the recorder's


def test_a_worker_behind_a_slow_link_is_left_out_by_name_before_it_trains() -> None:
    shell = run(cpu_0=FAST, cpu_1=FAST, cpu_2=SLOW)
    ends_well(shell)
    assert joined(shell) == {"cpu-0", "cpu-1"}
    (out,) = shell.of(WorkerLeftOut)
    assert out.worker == "cpu-2"
    assert orders.Dismiss("cpu-2", for_good=True) in shell.orders
    assert len(shell.of(StrategyChosen)) == 1


def test_a_worker_that_comes_later_is_judged_alike() -> None:
    shell = run(cpu_0=FAST, cpu_1=FAST)
    shell.links |= {"far-0": SLOW, "near-0": FAST}  # each as fast as cpu-0
    for worker in ("far-0", "near-0"):
        shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
        shell.answer_to(orders.Calibrate)
    ends_well(shell)
    assert [event.worker for event in shell.of(WorkerLeftOut)] == ["far-0"]
    assert [event.worker for event in shell.of(WorkerJoined)] == ["near-0"]


def test_a_worker_that_was_left_out_goes_on_where_the_others_are_lost() -> None:
    shell = run(cpu_0=SLOW, cpu_1=SLOW)
    shell.answer_to(orders.Join)
    assert joined(shell) == {"cpu-0"}
    shell.server = None
    shell.tell(facts.WorkerGone(("cpu-0",), "power cut", shell.now))
    assert not shell.coordinator.ended
    ends_well(shell)
    assert joined(shell) == {"cpu-0", "cpu-1"}
    assert not shell.of(orders.StartServer)


def test_one_worker_has_no_server_until_another_comes_and_none_of_its_samples_is_trained_on_twice() -> None:
    shell = run(cpu_0=FAST)
    assert [order.rule for order in shell.of(orders.UseRule)] == [ALONE]
    assert not shell.of(orders.StartServer)
    shell.answer_to(orders.Join)
    shell.links["near-0"] = FAST
    shell.tell(facts.WorkerReady("near-0", "cpu", shell.now))
    shell.answer_to(orders.Calibrate)
    ends_well(shell)
    assert [order.rule for order in shell.of(orders.UseRule)] == [ALONE, BSP()]
    assert len(shell.of(orders.StartServer)) == 1
    trained = [order.round.worker for order in shell.of(orders.StartRound)]
    assert trained[0] == "cpu-0"
    assert {*trained[1:]} == {"cpu-0", "near-0"}


def test_where_links_are_slow_workers_make_steps_of_their_own() -> None:
    for parts_ways in (True, False):
        shell = Shell(replace(settings_of(("auto", {}), "idpa"), samples=600, parts_ways=parts_ways))
        shell.links = dict.fromkeys(("cpu-0", "gpu-0"), WorkerLink(1e5, 0.05))  # equally fast
        shell.start(*shell.links)
        (chosen,) = shell.of(StrategyChosen)
        every = chosen.candidates[0].every
        assert (chosen.candidates[0].strategy, every) == (("local-sgd", 3) if parts_ways else ("alone", None))
        assert [order.rule for order in shell.of(orders.UseRule)] == [LocalSGD(every=3) if parts_ways else ALONE]
        assert shell.finish().status == "done"
        assert joined(shell) == ({"cpu-0", "gpu-0"} if parts_ways else {"cpu-0"})


def test_nothing_is_measured_where_all_workers_take_part_anyway() -> None:
    shell = Shell(settings_of(("auto", {}), "udpa"))
    shell.start("cpu-0", "cpu-1")
    assert not shell.of(orders.ProbeServer)
    assert [order.rule for order in shell.of(orders.UseRule)] == [BSP()]
    ends_well(shell)


def test_a_run_whose_last_worker_is_lost_ends_resumably() -> None:
    shell = run(cpu_0=SLOW, cpu_1=SLOW)
    shell.answer_to(orders.Join)
    shell.tell(facts.WorkerGone(("cpu-0",), "power cut", shell.now))
    shell.tell(facts.WorkerGone(("cpu-1",), "power cut", shell.now))
    assert shell.end.status == "lost"


def test_a_worker_lost_while_the_server_is_probed_is_done_without() -> None:
    shell = Shell(settings_of(("auto", {}), "idpa"), probes_at_once=False)
    shell.start("cpu-0", "cpu-1", "cpu-2")
    shell.tell(facts.WorkerGone(("cpu-1",), "power cut", shell.now))
    asked = [order.workers for order in shell.of(orders.ProbeServer)]
    assert asked == [("cpu-0", "cpu-1", "cpu-2"), ("cpu-0", "cpu-2")]
    ends_well(shell)
    assert joined(shell) == {"cpu-0", "cpu-2"}


def test_where_kernels_are_to_be_sharded_the_run_ends_and_says_what_goes_on() -> None:
    class Dear:
        """Prices of sharded kernels, at which nothing else is chosen."""

        def pricers(self, rows: object) -> list[Pricer]:
            return [lambda problem: [PricedStrategy("layer", {"cpu-0": 8, "cpu-1": 8}, 1e-9, 0.0, 8, estimated=True)]]

    shell = Shell(settings_of(("auto", {}), "idpa", sharded=Dear()))
    shell.links = {"cpu-0": FAST, "cpu-1": FAST}
    shell.start(*shell.links)
    assert shell.end == orders.End("turned", None, orders.Turn("layer", 1))
    assert not joined(shell)
    later = Shell(settings_of(("auto", {}), "idpa", sharded=Dear()))
    later.links = {"cpu-0": FAST, "near-0": FAST}
    later.start("cpu-0")
    later.answer_to(orders.Join)
    later.tell(facts.WorkerReady("near-0", "cpu", later.now))
    later.answer_to(orders.Calibrate)
    ends_well(later)  # what has trained goes on as it is


def test_a_worker_that_was_left_out_is_measured_again_beside_the_first_round_and_named_once() -> None:
    shell = run(cpu_0=FAST, cpu_1=FAST, cpu_2=SLOW)
    shell.answer_to(orders.StartServer)
    assert [order.worker for order in shell.of(orders.Calibrate)] == ["cpu-0", "cpu-1", "cpu-2", "cpu-2"]
    shell.answer_to(orders.Calibrate)
    assert [order.workers for order in shell.of(orders.ProbeServer)][1:] == [("cpu-2",)]
    ends_well(shell)
    assert len(shell.of(WorkerLeftOut)) == len(shell.of(StrategyChosen)) == 1
    assert len([order for order in shell.of(orders.Dismiss) if order.worker == "cpu-2"]) >= 2


def changing() -> Shell:
    """A long run of cpu-0 alone. cpu-1 was left out, is measured again, and is to be taken in."""
    shell = Shell(replace(settings_of(("auto", {}), "idpa"), samples=6000, parts_ways=False))
    shell.links = {"cpu-0": FAST, "cpu-1": SLOW}
    shell.start(*shell.links)
    shell.answer_to(orders.Join)
    shell.links["cpu-1"] = FAST
    shell.answer_to(orders.Calibrate)
    return shell


def test_a_change_waits_for_the_round_under_way_and_goes_on_from_its_state() -> None:
    shell = changing()
    assert len(shell.of(StrategyChosen)) == 1  # it is told once it is made
    assert [order.rule for order in shell.of(orders.UseRule)] == [ALONE]
    shell.answer_to(orders.StartRound)
    assert shell.finish().status == "done"
    assert [order.rule for order in shell.of(orders.UseRule)] == [ALONE, BSP()]
    assert [*map(type, shell.orders)].count(orders.StartServer) == 1
    change = shell.of(StrategyChosen)[-1]
    assert change.before is not None
    assert [change.before.strategy, change.candidates[0].strategy] == ["alone", "bsp"]
    assert shell.reported == EPOCHS * 6000


def test_a_change_is_given_up_where_a_worker_that_it_was_made_for_is_lost() -> None:
    shell = changing()
    shell.tell(facts.WorkerGone(("cpu-1",), "power cut", shell.now))
    assert shell.finish().status == "done"
    assert [order.rule for order in shell.of(orders.UseRule)] == [ALONE]
    assert len(shell.of(StrategyChosen)) == 1
    assert shell.reported == EPOCHS * 6000


def test_a_change_for_a_worker_that_is_lost_is_none_for_one_that_comes_back_by_its_name() -> None:
    shell = Shell(replace(settings_of(("auto", {}), "idpa"), samples=6000, parts_ways=False))
    shell.links = dict.fromkeys(("cpu-20", "cpu-21"), WorkerLink(1e9, 1e-4)) | {"cpu-0": SLOW}
    shell.start("cpu-20", "cpu-21")
    shell.answer_to(orders.StartServer)
    for _ in range(2):
        shell.answer_to(orders.Join)
    for _ in range(2):  # it is far faster than both, and is to train alone
        shell.tell(facts.WorkerReady("cpu-0", "cpu", shell.now))
        shell.answer_to(orders.Calibrate)
        shell.tell(facts.WorkerGone(("cpu-0",), "power cut", shell.now))
    assert shell.finish().status == "done"
    assert shell.reported == EPOCHS * 6000


# --- with a range of workers ---


def of_range(*lost: str, asks: int = 0, **links: WorkerLink) -> Shell:
    """A run of two workers or more, once these are lost in the first round."""
    shell = Shell(settings_of(("auto", {}), "idpa", least={"cpu": 2}, wanted={"cpu": 8}, wait=60.0, asks=asks))
    shell.links = {name.replace("_", "-"): link for name, link in links.items()}
    shell.start(*shell.links)
    if any(isinstance(order, orders.StartServer) for order, _ in shell.pending):
        shell.answer_to(orders.StartServer)
    while any(isinstance(order, orders.Join) for order, _ in shell.pending):
        shell.answer_to(orders.Join)
    shell.tell(facts.WorkerGone(lost, "power cut", shell.now))
    return shell


def test_a_run_that_pauses_goes_on_with_a_worker_that_it_leaves_out() -> None:
    """It counts: the run has as many as it asked for, and is faster without this one."""
    shell = of_range("cpu-1", cpu_0=FAST, cpu_1=FAST)
    assert len(shell.of(RunPaused)) == 1
    shell.links["far-2"] = SLOW
    shell.tell(facts.WorkerReady("far-2", "cpu", shell.now))
    shell.answer_to(orders.Calibrate)
    assert [event.worker for event in shell.of(WorkerLeftOut)] == ["far-2"]
    assert len(shell.of(RunContinued)) == 1
    shell.now += 100.0
    ends_well(shell)


def left_out() -> Shell:
    """A run that needs two workers. One trains. The other was left out, and measures itself again."""
    shell = Shell(settings_of(("auto", {}), "idpa", least={"cpu": 2}, wanted={"cpu": 8}, wait=60.0))
    shell.links = {"cpu-0": FAST, "far-1": SLOW}
    for worker in shell.links:
        shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
    for _ in range(3):
        shell.answer_to(orders.Calibrate)
    shell.answer_to(orders.Join)
    assert [event.worker for event in shell.of(WorkerLeftOut)] == ["far-1"]
    assert shell.of(RunPaused) == []
    return shell


def test_a_worker_that_was_left_out_and_is_gone_counts_no_more_and_is_not_measured_again() -> None:
    shell = left_out()
    shell.tell(facts.WorkerGone(("far-1",), "power cut", shell.now))
    assert [event.missing for event in shell.of(RunPaused)] == [{"cpu": 1}]
    while shell.pending:
        shell.answer(0)
    assert len(shell.of(orders.Calibrate)) == 3
    shell.links["cpu-2"] = FAST
    shell.tell(facts.WorkerReady("cpu-2", "cpu", shell.now))
    ends_well(shell)
    assert joined(shell) == {"cpu-0", "cpu-2"}


def test_a_worker_that_was_left_out_and_hangs_as_it_is_measured_again_counts_no_more() -> None:
    shell = left_out()
    for _ in range(5):
        shell.answer_to(orders.StartRound)
        if any(isinstance(order, orders.Calibrate) for order, _ in shell.pending):
            break
    shell.tell(facts.Tick(shell.now + shell.settings.stall_timeout + 1.0))
    assert [event.missing for event in shell.of(RunPaused)] == [{"cpu": 1}]


def test_a_run_that_gave_workers_back_takes_as_many_as_its_least() -> None:
    shell = of_range("cpu-0", asks=8, cpu_0=FAST, cpu_1=SLOW)
    for worker in ("cpu-2", "cpu-3"):
        shell.links[worker] = FAST
        shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
    ends_well(shell)


def test_a_worker_that_was_left_out_goes_on_where_the_last_other_leaves_as_the_run_goes_back() -> None:
    shell = Shell(settings_of(("auto", {}), "idpa", lowers=True))
    shell.links = {"cpu-0": FAST, "cpu-1": SLOW}
    shell.start("cpu-0", "cpu-1")
    shell.answer_to(orders.Calibrate)
    shell.answer_to(orders.Join)
    shell.tell(facts.WorkerLeaving(("cpu-0",), "it is shut down", shell.now))
    shell.tell(facts.OutOfStep(shell.coordinator.life, "twice", shell.now))
    ends_well(shell)


def test_a_run_of_a_range_waits_for_others_where_all_are_lost_before_it_trains() -> None:
    settings = settings_of(("auto", {}), "idpa", least={"cpu": 2}, wanted={"cpu": 8}, wait=60.0)
    shell = Shell(settings, probes_at_once=False)
    shell.start("cpu-0", "cpu-1")
    shell.pending.clear()
    shell.tell(facts.WorkerGone(("cpu-0", "cpu-1"), "power cut", shell.now))
    shell.probes_at_once = True
    for worker in ("cpu-2", "cpu-3"):
        shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
    ends_well(shell)
