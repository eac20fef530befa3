"""Traffic of a layer-sharded step: sums over its plan, in numbers and in words.

A stage's outputs go from their makers to all workers of the stages that read them, through home if layers that are not
divided, or the loss, follow. A worker that adds outputs to its own channels needs only these channels, and most often
has them. Backward each of these workers returns its part of the gradient. Every worker loads the network's input
itself. If the last stage's shards send sums, which are few, they send them to each other: every worker computes the
loss, and no gradient comes from home.

The search for the workers' shares of every stage's kernels that make the shortest step, transfers counted.

The seconds of a step are the sum over its stages of the slowest worker's computation and the slowest link's transfers
(Marques et al.'s comm + max conv + comp, with a link for each worker). As a stage's outputs go to every worker that has
kernels of the next one, the search divides one stage after the other anew, for the others as they are, until nothing
changes. It starts from eq. 1's shares for all workers, from those for the fastest few, and from all kernels at home.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from daskcnn.job.tables import FirstConv, KernelShares
from daskcnn.nn import Shape
from daskcnn.partition.proportions import balanced_shards, kernel_shards
from daskcnn.sharded.plan_parts import NOTHING, Kernels, WorkerTraffic
from daskcnn.sharded.stages import Addend, Stage, samples_first, sum_size
from daskcnn.sharded.step_plan import StepPlan


def traffic(plan: StepPlan) -> dict[str, WorkerTraffic]:
    """Numbers a sample that each worker sends and receives within a step: activations and their gradients."""
    everyone = dict.fromkeys((plan.home, *chain(*plan.kernels)), NOTHING)
    return added_traffic([everyone, *(flow.moved for flow in plan.flows)])


def weight_traffic(plan: StepPlan) -> dict[str, WorkerTraffic]:
    """Numbers a step that each worker sends and receives of the previous step's weights and their gradients.

    These are the edges of shards whose layers reach over, and all gradients of a stage by samples.
    """
    everyone = dict.fromkeys(chain(*plan.kernels), NOTHING)
    return added_traffic([everyone, *(stage_weight_traffic(plan, i) for i in range(len(plan.stages)))])


def stage_weight_traffic(plan: StepPlan, i: int) -> dict[str, WorkerTraffic]:
    """The weight traffic of one stage."""
    if flow := plan.weight_gradients(i):
        return flow.moved
    sizes = plan.edge_sizes(i)
    up, down = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0)
    for worker in sizes:
        for edge in plan.edges(i, worker):
            up[edge.neighbour] += sizes[edge.neighbour]
            down[worker] += sizes[edge.neighbour]
    return {worker: WorkerTraffic(up[worker], down[worker]) for worker in sizes}


def added_traffic(some: Iterable[Mapping[str, WorkerTraffic]]) -> dict[str, WorkerTraffic]:
    """The sum of each worker's traffic."""
    found: dict[str, WorkerTraffic] = {}
    for moved in some:
        for worker, (up, down) in moved.items():
            before = found.get(worker, NOTHING)
            found[worker] = WorkerTraffic(before.up + up, before.down + down)
    return found


def explained(plan: StepPlan) -> Iterator[str]:
    """Yield a sentence for each addition in the plan, and for each input that several stages make."""
    for i, stage in enumerate(plan.stages):
        if len(stage.inputs) > 1:
            by = "every worker of it" if stage.conv else plan.home
            yield f"{stage.label}: {by} puts {_names(plan.stages, stage.inputs)} side by side"
        for addend in stage.addends:
            yield f"{stage.label}: {_addition(plan, i, addend)}"


def _addition(plan: StepPlan, i: int, addend: Addend) -> str:
    # messages for this stage alone, not for an earlier one
    flows = (f for f in plan.taken_in(i) if f.stage in addend.inputs and f.stage not in plan.stages[i].inputs)
    travels = sum(moved.down for flow in flows for moved in flow.moved.values())
    cost = f"{travels:,} numbers a sample travel for it" if travels else "nothing travels for it"
    what = _names(plan.stages, addend.inputs) if addend.inputs else "the images"
    return f"{', '.join(plan.kernels[i])} each add their own channels of {what}; {cost}"


def _names(stages: Sequence[Stage], numbers: Sequence[int]) -> str:
    return ", ".join(stages[number].label for number in numbers)


AMONG = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
"""Numbers of the fastest workers to start from, as dividing single stages anew takes no worker out of all stages."""
SPREAD_SHARE = 0.2
"""The part of a stage's seconds that the layers behind its convolution take, if it was not measured."""
ROUNDS = 4
"""The most times that each stage is divided anew. By then the cut has settled, or it alternates."""


@dataclass(frozen=True)
class WorkerLink:
    """A worker's link: bytes a second each way, seconds a message.

    handover: further seconds a message, which the scheduler takes to start a task after one on another worker.
    """

    bandwidth: float = math.inf
    latency: float = 0.0
    handover: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Seconds of a message of this size; 0 for none."""
        return nbytes / self.bandwidth + self.each if nbytes else 0.0

    @property
    def each(self) -> float:
        """Seconds of the smallest message."""
        return self.latency + self.handover

    def faster(self, factor: float) -> WorkerLink:
        """Return a link of a factor more bandwidth and as much less latency."""
        return WorkerLink(self.bandwidth * factor, self.latency / factor, self.handover / factor)


FREE = WorkerLink()


@dataclass(frozen=True)
class WorkerLinks:
    """The measured links by worker; without any, transfers take no time. task: the scheduler's seconds a task."""

    by_worker: Mapping[str, WorkerLink] = field(default_factory=dict)
    task: float = 0.0


@dataclass(frozen=True)
class ShareSearch:
    """The search for the best shares, by these measurements.

    Attributes
    ----------
    compute : by worker and stage, seconds a sample with all kernels, forward and backward
    links : by worker; without any, transfers take no time
    samples, parts : of a minibatch
    itemsize, weight_itemsize : bytes of a number on the wire: of activations and their gradients; of weights and theirs
    rest : seconds a sample of what home does alone
    fixed : the part of `compute` that a shard takes whatever its size (columns of the input, channels computed twice)
    task : seconds that the scheduler takes for each of a step's tasks, one after the other
    apart : by worker, the part of a stage's seconds of layers that home computes alone if they are not spread
    speeds_alone : true for eq. 1's shares
    """

    stages: Sequence[Stage]
    in_shape: Shape
    home: str
    compute: Mapping[str, Mapping[str, float]]
    links: Mapping[str, WorkerLink] = field(default_factory=dict)
    samples: int = 1
    itemsize: int = 4
    rest: float = 0.0
    fixed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    task: float = 0.0
    parts: int = 1
    apart: Mapping[str, float] = field(default_factory=dict)
    weight_itemsize: int = 4
    speeds_alone: bool = False

    def asked_for(self, kernel_shares: KernelShares, first_conv: FirstConv) -> ShareSearch:
        """Return the search that these settings of a job ask for. Raises ValueError as `divided_by`."""
        search = self.by_speeds_alone() if kernel_shares == "speeds" else self
        return search.divided_by(first_conv)

    def by_speeds_alone(self) -> ShareSearch:
        """Return the search by the workers' speeds alone (Marques et al., eq. 1)."""
        return replace(self, links={}, fixed={}, task=0.0, speeds_alone=True)

    def divided_by(self, first: FirstConv) -> ShareSearch:
        """Return the search with the first convolution divided like this; auto: as it makes the shorter step.

        Raises ValueError for samples if they cannot be divided.
        """
        if first == "kernels":
            return self
        try:
            by_samples = replace(self, stages=samples_first(self.stages))
        except ValueError:
            if first == "auto":
                return self
            raise
        both = (self, by_samples) if first == "auto" else (by_samples,)
        return min(both, key=lambda balance: balance.step_seconds(balance.kernels()))

    def kernels(self) -> list[dict[str, int]]:
        """Kernels of each stage by worker, without workers that get none. Equally good shares are cut by eq. 1."""
        return [dict(own) for own in self._best]

    @cached_property
    def _best(self) -> list[dict[str, int]]:
        if self.speeds_alone:
            return self.by_compute
        starts = self._by_speed
        at_home = [{self.home: stage.conv.kernels} if stage.conv else {} for stage in self.stages]
        starts += [(self, at_home), *((self, start) for _, start in starts[1:])]
        found: list[list[dict[str, int]]] = []
        for balance, start in starts:
            found += [cut for cut in balance._improved(start) if cut not in found]
        return min(found, key=self.step_seconds)

    @property
    def roughly(self) -> list[dict[str, int]]:
        """The best of eq. 1's shares for all workers and for the fastest few: near the best shares, in no time."""
        return min((cut for _, cut in self._by_speed), key=self.step_seconds)

    @cached_property
    def _by_speed(self) -> list[tuple[ShareSearch, list[dict[str, int]]]]:
        """Eq. 1's shares for all workers, and for the fastest few, each with the search among these."""
        by_speed = sorted(self.compute, key=lambda w: (w != self.home, sum(self.compute[w].values())))
        fastest = [by_speed[:count] for count in AMONG if count < len(self.compute)]
        among = [replace(self, compute={w: own for w, own in self.compute.items() if w in few}) for few in fastest]
        return [(balance, balance.by_compute) for balance in (self, *among)]

    @cached_property
    def by_compute(self) -> list[dict[str, int]]:
        """Kernels of each stage by the workers' speeds alone (Marques et al., eq. 1)."""
        cut: list[dict[str, int]] = [{} for _ in self.stages]
        for own, stage in zip(cut, self.stages, strict=True):
            if stage.conv:
                seconds = [self._computing(w, stage) for w in self.compute]
                own |= self._given(kernel_shards(stage.conv.kernels, seconds))
        return [cut[self._led.get(i, i)] for i in range(len(cut))]

    @cached_property
    def _led(self) -> dict[int, int]:
        """The leaders of stages whose outputs only one other stage, the leader, reads, to add them.

        If both have the same shares, nothing travels for the addition.
        """
        found: dict[int, int] = {}
        for i, stage in enumerate(self.stages):
            for addend in stage.addends:
                readers = [other for other in self.stages if addend.inputs and addend.inputs[0] in other.consumed]
                if addend.layers is None and len(addend.inputs) == len(readers) == 1:
                    found |= {} if self.stages[addend.inputs[0]].merged else {addend.inputs[0]: i}
        return {i: found.get(leader, leader) for i, leader in found.items()}

    def plan(self, kernels: Kernels) -> StepPlan:
        """The step of this cut."""
        sizes = self.parts, self.samples, self.itemsize, self.weight_itemsize
        return StepPlan.of(self.stages, self.in_shape, kernels, self.home, *sizes)

    def step_seconds(self, kernels: Kernels) -> float:
        """Seconds of a step that is cut like this."""
        plan = self.plan(kernels)
        computing = 0.0
        for i, (stage, own) in enumerate(zip(plan.stages, plan.kernels, strict=True)):
            if own:  # home computes layers alone that could be spread and are not
                alone = self._apart(i, self.home, stage) * self._computing(self.home, stage)
                computing += alone + max(self._part(i, w, stage, n / plan.made[i]) for w, n in own.items())
        scheduling = self.task * plan.task_count if self.task else 0.0
        # all messages of a flow go at once, and a link carries both ways at the same time
        carrying = sum(self._slowest(flow.moved, self.samples * self.itemsize) for flow in plan.flows)
        # of later stages than the first, what is left comes with the step's own messages
        between = self._slowest(stage_weight_traffic(plan, 0), plan.weight_itemsize)
        return self.rest * self.samples + computing + carrying + between + scheduling

    def idle(self, kernels: Kernels) -> dict[tuple[str, str], str]:
        """The reasons why workers get no kernels of layers, by worker and layer."""
        named = [(i, stage.name) for i, stage in enumerate(self.stages) if stage.name]
        without = [(i, w, name) for i, name in named for w in self.compute if w not in kernels[i]]
        if not without:
            return {}
        untold = replace(self, task=0.0)
        unsent = replace(untold, links={})
        eased = {"tasks": untold, "transfers": unsent, "size": replace(unsent, fixed={})}
        given, plan = {what: other.kernels() for what, other in eased.items()}, self.plan(kernels)
        return {
            (w, name): self._reason(i, w, plan, next((what for what in given if w in given[what][i]), "count"))
            for i, w, name in without
        }

    def unused(self, kernels: Kernels) -> dict[str, str]:
        """The reasons why workers get no kernels of any layer: those of the layers that take them the longest."""
        reasons, found = self.idle(kernels), dict[str, str]()
        for worker in self.compute.keys() - {worker for own in kernels for worker in own}:
            _, layer = max((self.compute[worker][name], name) for other, name in reasons if other == worker)
            found[worker] = f"of {layer}, which would take it the longest, {reasons[worker, layer]}"
        return found

    def measured(self, compute: Mapping[str, Mapping[str, float]]) -> ShareSearch:
        """Return the search by other seconds a sample, if given. The fixed part of them changes in proportion."""
        old, new = self.compute, {w: {**own, **compute.get(w, {})} for w, own in self.compute.items()}
        fixed = {w: {n: each * new[w][n] / old[w][n] for n, each in own.items()} for w, own in self.fixed.items()}
        return replace(self, compute=new, fixed=fixed)

    def whole_seconds(self, worker: str, i: int, kernels: Mapping[str, int], seconds: float) -> float:
        """Seconds a sample that the worker would take for a whole stage, if it takes `seconds` for its kernels."""
        stage, part = self.stages[i].spread_for(list(kernels.values())), kernels[worker] / sum(kernels.values())
        whole = self.compute[worker][stage.name or ""]
        return whole * seconds * self.samples / self._part(i, worker, stage, part)

    # --- seconds of a step ---

    def _computing(self, worker: str, stage: Stage) -> float:
        """Seconds of all kernels of the stage."""
        return self.samples * self.compute[worker][stage.name or ""]

    def _regardless(self, worker: str, stage: Stage) -> float:
        """The part of these seconds that a shard takes whatever its size."""
        if stage.by == "samples":
            return 0.0
        return self.samples * self.fixed.get(worker, {}).get(stage.name or "", 0.0)

    def _part(self, i: int, worker: str, stage: Stage, part: float) -> float:
        """Seconds of a worker's part of a stage. stage: as it is spread."""
        regardless = self._regardless(worker, stage)
        seconds = regardless + (self._computing(worker, stage) - regardless) * part
        return (1 - self._apart(i, worker, stage)) * seconds

    def _apart(self, i: int, worker: str, stage: Stage) -> float:
        """The part of a worker's seconds for a stage that its layers take that could be spread and are not."""
        return self.apart.get(worker, SPREAD_SHARE) if stage != self.stages[i] else 0.0

    def _slowest(self, moved: Mapping[str, WorkerTraffic], nbytes: int) -> float:
        """Seconds until the slowest link has carried these numbers of so many bytes."""
        return max((self._link(w).seconds(nbytes * max(own)) for w, own in moved.items()), default=0.0)

    def _link(self, worker: str) -> WorkerLink:
        return self.links.get(worker, FREE)

    def _bytes(self, numbers: float) -> float:
        return numbers * self.samples * self.itemsize

    # --- one stage for the others as they are ---

    def _improved(self, kernels: list[dict[str, int]]) -> Iterator[list[dict[str, int]]]:
        """Yield the cut, then better ones."""
        yield kernels
        for _ in range(ROUNDS):
            before, kernels = kernels, list(kernels)
            for i, stage in enumerate(self.stages):
                if i not in self._led:
                    kernels[i] = self._cut(i, stage, kernels)
                    for led in self._followers(i):
                        kernels[led] = kernels[i]
            if kernels == before:
                return
            yield kernels

    def _cut(self, i: int, stage: Stage, kernels: Kernels) -> dict[str, int]:
        if stage.conv is None:
            return {}
        plan = self.plan(kernels)
        alike = [stage, *(self.stages[led] for led in self._followers(i))]
        regardless = [sum(self._regardless(w, each) for each in alike) for w in self.compute]
        seconds = [
            sum(self._computing(w, each) for each in alike) - least + self._outgoing(i, w, plan)
            for w, least in zip(self.compute, regardless, strict=True)
        ]
        fixed = [self._fixed(i, w, plan) + least for w, least in zip(self.compute, regardless, strict=True)]
        return self._given(balanced_shards(stage.conv.kernels, seconds, fixed))

    def _followers(self, i: int) -> list[int]:
        return [led for led, leader in self._led.items() if leader == i]

    def _given(self, shares: Sequence[int]) -> dict[str, int]:
        return {w: n for w, n in zip(self.compute, shares, strict=True) if n}

    def _outgoing(self, i: int, worker: str, plan: StepPlan) -> float:
        """Seconds on the worker's link of the outputs of all of a stage's kernels, and of their gradients."""
        conv, takers = plan.stages[i].conv, plan.takers[i]
        assert conv is not None, "a stage that is cut has a convolution"
        others = len(takers) - (worker in takers)
        return 2 * self._bytes(others * conv.kernels * plan.channel_sizes[i]) / self._link(worker).bandwidth

    def _fixed(self, i: int, worker: str, plan: StepPlan) -> float:
        """Seconds on the worker's link whatever its share: a stage's inputs, their gradients, sums, latencies."""
        link, takers = self._link(worker), plan.takers[i]
        others, ways = len(takers) - (worker in takers), 1 if i == plan.last and plan.judged_by_all else 2
        sums = self._bytes(others * sum_size(plan.stages[i])) / link.bandwidth
        outputs = ways * (sums + link.each) if others else 0.0
        return 2 * link.seconds(self._bytes(self._missing(i, worker, plan))) + outputs

    def _missing(self, i: int, worker: str, plan: StepPlan) -> int:
        """Numbers a sample of a stage's input that the worker neither has nor gets for an earlier stage."""
        missing = 0
        for source in plan.stages[i].inputs:
            use = plan.uses[source].get(worker)
            if use is not None and use.by[0] < i:
                continue
            if plan.stages[source].merged:
                missing += 0 if worker == self.home else plan.value_sizes[source]
            else:
                missing += plan.channel_sizes[source] * (plan.made[source] - plan.kernels[source].get(worker, 0))
        return missing

    def _reason(self, i: int, worker: str, plan: StepPlan, what: str) -> str:
        """The reason in words why a worker gets no kernels of a stage. what: the cost without which it would."""
        conv, link = self.stages[i].conv, self._link(worker)
        assert conv is not None, "asked for stages with kernels"
        if what == "count":
            return f"{conv.kernels} are few for {len(self.compute)} workers, and others are faster"
        if what == "size":
            least, whole = self._regardless(worker, self.stages[i]), self._computing(worker, self.stages[i])
            return f"a shard of any size would take it {least:.2g} s of the layer's {whole:.2g} s a step"
        if what == "tasks":
            return f"its share is not worth the scheduler's {1e3 * self.task:.2g} ms for each task that it would bring"
        seconds = self._fixed(i, worker, plan) + self._outgoing(i, worker, plan) / len(self.compute)
        return (
            f"its share is not worth what it takes to send, about {seconds:.2g} s a step over its link "
            f"({link.bandwidth / 1e6:.3g} MB/s, {1e3 * link.each:.2g} ms a message)"
        )
