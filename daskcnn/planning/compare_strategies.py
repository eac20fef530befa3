"""The strategies of a job on a cluster, by their expected seconds: `daskcnn plan JOB --strategies`."""

from __future__ import annotations

from dataclasses import replace

from daskcnn.planning.simulate import Scenario
from daskcnn.ps.wire import bytes_of
from daskcnn.sim.cluster import step_problem
from daskcnn.training.strategy_choice import StrategyChoice, choose
from daskcnn.training.strategy_prices import StepProblem, strategies_of


def compare_strategies(chosen: Scenario) -> StrategyChoice:
    """Return the strategy for the job's network and minibatch on its cluster, whatever strategy the job names."""
    prices = chosen.sharded_prices()
    sharded = () if prices is None else prices.pricers(chosen.staged_rows())
    return choose(problem_of(chosen), (*strategies_of(parts_ways=chosen.job.train.parts_ways), *sharded))


def problem_of(chosen: Scenario) -> StepProblem:
    """Return the step of a job on a simulated cluster, with the costs that a simulation goes by."""
    job = chosen.job
    samples = min(job.train.batch_size, chosen.samples)
    nbytes = bytes_of(job.cluster.wire, chosen.numbers)
    problem = step_problem(chosen.cluster.members(), samples, nbytes, chosen.cluster, job.cluster.ps_shards)
    return replace(problem, epoch=chosen.samples, overlaps=job.cluster.overlap)
