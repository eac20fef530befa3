"""Findings of `daskcnn doctor` in a cluster: its workers, what each of them has, and how they reach each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from distributed import Client

from daskcnn.cluster.link.calls import ANSWER, ask_scheduler, ask_workers
from daskcnn.cluster.link.lease_table import Lease, others_of
from daskcnn.cluster.link.leases import in_words, leases_on
from daskcnn.cluster.link.members import Member, advertised, chosen, given_name, missing_members, present, taken_as_cpu
from daskcnn.cluster.run.admission import check_scheduler, require_same, versions_by_value
from daskcnn.doctor.findings import GIB, Finding, failed, gib, in_short
from daskcnn.doctor.worker import Seen, Way, clock_offsets, look, measure_ways
from daskcnn.errors import ClusterError, DataError
from daskcnn.job.tables import Workers
from daskcnn.show.text import plural
from daskcnn.store import open_dataset
from daskcnn.store.foreign.array import array_at

LOOK = 60.0  # seconds within which a worker looks at itself and at the data set
LEAST_MEMORY = 2 * GIB
SLOW = 12.5e6  # bytes a second: a link of 100 Mb/s
SKEW = 1.0  # seconds that a clock may be off before it is mentioned
IDLE = 0.7  # of a worker's threads that must find a core each


@dataclass(frozen=True)
class Wanted:
    """The needs of a job: workers, the path of its data set, and the folder of runs."""

    workers: Workers = field(default_factory=Workers)
    data: str | None = None
    runs: str = "runs"


def examine_cluster(client: Client, wanted: Wanted) -> Iterator[Finding]:
    """Examine the scheduler, every worker that a job may use, and the links between them."""
    address, workers = client.scheduler.address, present(client)
    yield _scheduler(client, len(workers))
    found = advertised(workers)
    answering, fit, unlike = _of_same_versions(client, found)
    leases = _leases(client)
    held = others_of("", leases)
    taken = _taken(answering, held, wanted.workers)
    yield from _of_worth(unlike, taken)
    seen = _look(client, fit, wanted.data)
    # a job leaves out workers whose device cannot be used
    unusable = {m.address for m in fit if m.name in seen and seen[m.name].device_problem}
    yield _workers(address, answering, unusable, wanted.workers, leases)
    yield from _misdeclared(workers, found)
    yield _server(address, answering)
    yield from _in_use(found, leases)
    expected = None
    if wanted.data:
        data = data_here(wanted.data)
        expected = data.facts.get("fingerprint")
        yield data
    for member in fit:
        own = worker_findings(member, workers[member.address], seen.get(member.name), wanted.data, expected)
        yield from _of_worth(((member, each) for each in own), taken)
    yield from sharing(fit, seen)
    able = [member for member in fit if member.name in seen]
    yield from clocks(clock_offsets(client, able))
    free = [member for member in able if member.address not in held]
    ways = measure_ways(client, free) if len(free) > 1 else []
    if ways or len(able) > len(free):
        yield links(ways, len(able) - len(free), {m.name for m in free if m.address not in taken})


def _taken(found: Sequence[Member], held: Collection[str], wanted: Workers) -> set[str]:
    """Return the addresses of the workers that a job would take now; of all where too few are free."""
    free = [m for m in found if m.address not in held]
    if missing_members(free, wanted):
        return {m.address for m in found}
    members = chosen(free, wanted)
    return {m.address for m in (*members.workers, members.server)}


def _of_worth(findings: Iterable[tuple[Member, Finding]], taken: Collection[str]) -> Iterator[Finding]:
    """Yield findings about workers. Those that a job would not take are no reason against it."""
    for member, found in findings:
        if found.ok or member.address in taken:
            yield found
        else:
            yield replace(found, ok=True, seen=f"{found.seen}; a job would not take it now")


def _scheduler(client: Client, workers: int) -> Finding:
    address = client.scheduler.address
    encrypted = "encrypted" if address.startswith("tls") else "not encrypted"
    try:
        check_scheduler(client)
    except ClusterError as error:
        return failed("scheduler", error)
    return Finding("scheduler", True, f"{address}, {encrypted}, {plural(workers, 'worker')}, versions as here")


def _of_same_versions(
    client: Client, found: Sequence[Member]
) -> tuple[list[Member], list[Member], list[tuple[Member, Finding]]]:
    """Return the members that answer, those of them that run our versions, and a finding for each other one."""
    answers = ask_workers(client, versions_by_value(), [m.address for m in found])
    fit, unlike = list[Member](), list[tuple[Member, Finding]]()
    for member in found:
        name = f"worker {member.name}"
        try:
            if member.address in answers.given:
                require_same(f"{name} ({member.address})", answers.given[member.address])
                fit.append(member)
            elif error := answers.failed.get(member.address):
                seen = f"at {member.address}: {in_short(error)}"
                unlike.append((member, Finding(name, False, seen, "start it again")))
            else:
                seen = f"{member.kind} at {member.address}, does not answer within {ANSWER:g} s"
                remedy = "a job leaves it out: is it stopped, or out of memory? Start it again"
                unlike.append((member, Finding(name, True, seen, remedy)))
        except ClusterError as error:
            unlike.append((member, failed(name, error)))
    return [m for m in found if m.address not in answers.silent], fit, unlike


def _look(client: Client, members: Sequence[Member], data: str | None) -> dict[str, Seen]:
    """Return what each worker that answers has, by name. All measure at the same time, as they would train."""
    orders = {m.address: (m.kind, m.threads, data) for m in members}
    answers = ask_workers(client, _look_here, orders, orders, within=LOOK)
    return {m.name: answers.given[m.address] for m in members if m.address in answers.given}


def _look_here(orders: Mapping[str, tuple[str, int, str | None]], dask_worker: Any) -> Seen:
    return look(*orders[dask_worker.address])


def _leases(client: Client) -> Sequence[Lease]:
    """Return the leases of runs; none where the scheduler's process lacks this package, which is a finding already."""
    try:
        found: Sequence[Lease] = ask_scheduler(client, leases_on, within=ANSWER)
    except Exception:
        return ()
    return found


def _in_use(found: Sequence[Member], leases: Sequence[Lease]) -> Iterator[Finding]:
    """Say which run has which workers, and since when."""
    names = {m.address: m.name for m in found}
    runs: dict[str, list[Lease]] = {}
    for lease in leases:
        runs.setdefault(lease.holder.key, []).append(lease)
    for own in runs.values():
        (words,) = in_words(own, names)
        holder = {"run": own[0].holder.run, "by": own[0].holder.by, "since": min(lease.since for lease in own)}
        rows = {lease.worker: {"name": names.get(lease.worker, lease.name), "serves": lease.serves} for lease in own}
        yield Finding("in use", True, words, facts={**holder, "workers": rows})


def _workers(
    address: str, found: list[Member], unusable: set[str], wanted: Workers, leases: Sequence[Lease]
) -> Finding:
    """Check that the workers that a job needs are there, and that one of those it would take can be used."""
    command = f"dask worker {address} --nthreads 1 --resources"
    count = Counter(m.kind for m in found)
    counts = ", ".join(f"{count[kind]} {kind}" for kind in ("cpu", "gpu", "ps"))
    if missing := missing_members(found, wanted):
        more = ", ".join(f"{n} more {kind}" for kind, n in missing.items())
        remedy = "on each machine: " + " or ".join(f"{command} {kind.upper()}=1" for kind in missing)
        return Finding("workers", False, f"{counts}; a job needs {more}", remedy)
    held = others_of("", leases)
    if missing := missing_members([m for m in found if m.address not in held], wanted):
        more = ", ".join(f"{n} {kind}" for kind, n in missing.items())
        remedy = "a job waits until runs that have them end, for cluster.wait (--wait) at most"
        return Finding("workers", True, f"{counts}; {more} too few are free", remedy, {"too_few_free": True})
    addresses = {m.address for m in chosen([m for m in found if m.address not in held], wanted).workers}
    taken = [m for m in found if m.address in addresses]
    out = [m for m in taken if m.address in unusable]
    if not out:
        return Finding("workers", True, counts)
    gpus = sum(m.kind == out[0].kind for m in taken)
    usable = gpus - len(out) or "none"
    seen = f"{counts}; {gpus} {out[0].kind}, of which {usable} can be used: see worker {', '.join(m.name for m in out)}"
    if len(out) == len(taken):
        return Finding("workers", False, seen, f"no worker would be left: mend one, or start others: {command} CPU=1")
    return Finding("workers", True, seen, "a job leaves out those that cannot be used: mend them, or ask for others")


def _misdeclared(workers: Mapping[str, Any], found: list[Member]) -> Iterator[Finding]:
    """Find workers that advertise no resource that a job uses, or more than one kind."""
    ours = {m.address: m for m in found}
    for line in taken_as_cpu(found):
        seen, _, remedy = line.partition("; ")
        yield Finding("resources", True, seen, remedy)
    for address, info in workers.items():
        member = ours.get(address)
        name = f"worker {member.name if member else given_name(info.get('name')) or address}"
        if member is None:
            remedy = "a job does not use it: others advertise CPU or GPU; restart it with --resources CPU=1 (or GPU=1)"
            given = ", ".join(info.get("resources") or ()) or "nothing"
            yield Finding(name, True, f"at {address}, advertises {given}: none of CPU, GPU, PS", remedy)
        elif member.also:
            seen = f"at {address}, advertises {member.declared}: it counts as {member.kind}"
            yield Finding(name, True, seen, "restart it with one of them")


def _server(address: str, found: list[Member]) -> Finding:
    command = f"dask worker {address} --nthreads 1 --resources PS=1"
    none = f"none is set apart: one that trains will hold it ({command} starts one)"
    return Finding("parameter server", True, "one is set apart" if any(m.kind == "ps" for m in found) else none)


def data_here(path: str) -> Finding:
    """Check the data set from this machine, which would be the driver's."""
    try:
        if (array := array_at(path)) is not None:
            words = f"{path}: an array of {array.samples:,} images {array.shape}, {array.dtype}, in place"
            return Finding("data", True, words, facts={"fingerprint": array.digest})
        dataset = open_dataset(path)
    except DataError as error:
        found = failed("data", error)
        return replace(found, remedy=", or ".join(filter(None, (found.remedy, "correct the path (--data)"))))
    images = f"{len(dataset.train):,} + {len(dataset.test):,} images"
    return Finding("data", True, f"{path}: {dataset.name}, {images}", facts={"fingerprint": dataset.fingerprint})


def worker_findings(
    member: Member, info: Mapping[str, Any], seen: Seen | None, data: str | None, expected: str | None
) -> Iterator[Finding]:
    """Judge one worker: a single finding where all is well, else one for each problem."""
    name = f"worker {member.name}"
    if seen is None:
        yield Finding(name, False, f"{member.kind} at {member.address}, does not answer", "start it again")
        return
    problems: list[Finding] = []
    # one that was starting when it was listed has answered since
    if (status := info.get("status", "running")) not in ("running", "init"):
        remedy = "a job would hang: raise its --memory-limit, or restart it" if status == "paused" else "restart it"
        problems.append(Finding(name, False, f"is {status}", remedy))
    problems += [*_threads(name, member, seen), *_memory(name, member, seen)]
    problems += [*_device(name, seen), *_visible(name, seen, data, expected)]
    if all(p.ok for p in problems):
        yield Finding(name, True, _described(member, seen), facts=asdict(seen))
    yield from problems


def _described(member: Member, seen: Seen) -> str:
    g = seen.gpu
    gpu = f", {g.name}, {gib(g.free)} of {gib(g.memory)} GiB free, {g.driver}" if g else ""
    return (
        f"{member.kind} at {member.address}, {plural(member.threads, 'thread')} on {plural(seen.cores, 'core')} "
        f"(got {seen.got_cores:.1f}), {seen.blas or 'BLAS unknown'} with {plural(seen.blas_threads, 'thread')} in "
        f"each, {gib(member.memory_limit)} of {gib(seen.memory)} GiB{gpu}"
    )


def _threads(name: str, member: Member, seen: Seen) -> Iterator[Finding]:
    if seen.blas_threads > 1:
        remedy = "start it with OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_NUM_THREADS=1"
        yield Finding(name, True, f"BLAS takes {seen.blas_threads} threads inside each of its own", remedy)
    if member.kind != "cpu":
        return
    if member.threads > seen.cores:
        remedy = f"start it with --nthreads {seen.cores}: threads without a core slow each other down"
        yield Finding(name, True, f"{plural(member.threads, 'thread')}, but {plural(seen.cores, 'core')}", remedy)
    elif seen.got_cores < IDLE * member.threads:
        fewer = ", or lower --nthreads" if member.threads > 1 else ""
        remedy = f"stop other programs or workers of its machine, raise a limit on its processor time{fewer}"
        yield Finding(name, True, f"its {plural(member.threads, 'thread')} got {seen.got_cores:.1f} cores", remedy)


def _memory(name: str, member: Member, seen: Seen) -> Iterator[Finding]:
    limit = member.memory_limit
    if not limit:
        yield Finding(name, True, "has no memory limit", "give it one (--memory-limit 4GiB): the system may kill it")
    elif limit > seen.memory:
        remedy = f"start it with --memory-limit {gib(int(0.95 * seen.memory))}GiB: the system kills it before Dask sees"
        yield Finding(name, True, f"a limit of {gib(limit)} GiB, but {gib(seen.memory)} GiB of memory", remedy)
    elif limit < LEAST_MEMORY and member.kind != "ps":
        remedy = "raise --memory-limit to 2GiB or more: above 80 % of it Dask pauses the worker"
        yield Finding(name, True, f"a memory limit of {gib(limit)} GiB", remedy)


def _device(name: str, seen: Seen) -> Iterator[Finding]:
    if seen.device_problem:
        yield Finding(name, True, seen.device_problem, "a job leaves it out until then")
    elif seen.gpu and seen.gpu.problem:
        matched = "that driver and CuPy are of one CUDA version, and that CUPY_CACHE_DIR is writable"
        words = f"{seen.gpu.name}, {seen.gpu.driver}: {seen.gpu.problem}"
        yield Finding(name, False, words, f"check nvidia-smi there, {matched}")


def _visible(name: str, seen: Seen, data: str | None, expected: str | None) -> Iterator[Finding]:
    remedy = "give a path on storage that every worker reaches, or copy the data set there"
    if seen.data_problem:
        yield Finding(name, False, seen.data_problem, remedy)
    elif seen.fingerprint and expected and seen.fingerprint != expected:
        yield Finding(name, False, f"{data} holds another data set ({seen.fingerprint[:12]})", remedy)


def sharing(members: Sequence[Member], seen: Mapping[str, Seen]) -> Iterator[Finding]:
    """Find workers of one machine that together want more than it has: cores, memory or a GPU for each."""
    hosts, gpus = defaultdict(list), defaultdict(list)
    for member in members:
        hosts[member.host].append(member)
        if (there := seen.get(member.name)) and there.gpu:
            gpus[there.gpu.bus].append(member.name)
    for bus, names in gpus.items():
        if len(names) > 1:
            remedy = "give each its own: CUDA_VISIBLE_DEVICES=0, =1, … before `dask worker`"
            yield Finding("GPU shared", True, f"{', '.join(names)} compute on one GPU ({bus.split()[-1]})", remedy)
    for host, those in hosts.items():
        known = [seen[m.name] for m in those if m.name in seen]
        if len(known) > 1:
            yield from _host(host, those, max(s.cores for s in known), max(s.memory for s in known))


def _host(host: str, members: list[Member], cores: int, memory: int) -> Iterator[Finding]:
    threads = sum(m.threads for m in members if m.kind == "cpu")
    if threads > cores:
        remedy = "lower --nthreads, one worker with all the cores is best: they slow each other down"
        seen = f"{plural(threads, 'thread')} of its workers on {plural(cores, 'core')}"
        yield Finding(f"host {host}", True, seen, remedy)
    if (limits := sum(m.memory_limit for m in members)) > memory:
        remedy = "lower --memory-limit: together they may take more than there is"
        seen = f"its workers' memory limits add up to {gib(limits)} GiB, and it has {gib(memory)} GiB of memory"
        yield Finding(f"host {host}", True, seen, remedy)


def clocks(offsets: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    """Judge the offsets of clocks. The part that may be the error of the measurement does not count."""
    rows = {name: round(offset, 4) for name, (offset, _) in offsets.items()}
    off = {name: offset for name, (offset, error) in offsets.items() if abs(offset) - error > SKEW}
    if off:
        seen = ", ".join(f"{name} {offset:+.1f} s" for name, offset in off.items())
        remedy = "run a time service (chrony, systemd-timesyncd) there: certificates and times in logs go by clocks"
        yield Finding("clocks", True, f"off from this machine's: {seen}", remedy, rows)
    elif rows:
        worst = max(map(abs, rows.values()))
        yield Finding("clocks", True, f"within {max(worst, 0.001):.3f} s of this machine's", facts=rows)


def links(ways: Sequence[Way], unmeasured: int = 0, spare: Collection[str] = ()) -> Finding:
    """Judge the links between workers: the slowest way, and those that do not work.

    unmeasured: workers that runs have. spare: names of those that a job would not take.
    """
    rows = {"ways": [asdict(way) for way in ways]}
    besides = f"{plural(unmeasured, 'worker')} that runs have: not measured" if unmeasured else ""
    if broken := [way for way in ways if way.problem]:
        return _broken_links(broken, besides, spare, rows)
    if not ways:
        return Finding("links", True, besides, facts=rows)
    slowest, latest = min(ways, key=lambda w: w.bandwidth), max(ways, key=lambda w: w.latency)
    middle = sorted(way.bandwidth for way in ways)[len(ways) // 2]
    seen = (
        f"{len(ways)} ways between workers: {_rate(middle)} in the middle, slowest {slowest.sender} → "
        f"{slowest.receiver} {_rate(slowest.bandwidth)}, at most {1e3 * latest.latency:.1f} ms a message"
    )
    remedy = 'use a cable, a strategy that meets rarely (sgwu, parallel-sgd) or cluster.wire = "float16"'
    seen = "; ".join(filter(None, (seen, besides)))
    return Finding("links", True, seen, remedy if slowest.bandwidth < SLOW else "", rows)


def _broken_links(broken: Sequence[Way], besides: str, spare: Collection[str], rows: Mapping[str, Any]) -> Finding:
    """Return the finding of ways that do not work. A worker that began no task has no receiver."""
    told = [
        f"{way.sender} → {way.receiver}: {way.problem}" if way.receiver else f"{way.sender}: {way.problem}"
        for way in broken[:4]
    ]
    more = [f"and {len(broken) - 4} more"] if len(broken) > 4 else []
    remedy = (
        "workers talk to each other: open their ports (dask worker --worker-port 40000:40100) and give an address "
        "that the others reach (--host, or --contact-address)"
    )
    if not any(way.receiver for way in broken):
        remedy = "wait until what they compute is done, or cancel it"
    ok = all(way.sender in spare or way.receiver in spare for way in broken)
    return Finding("links", ok, "; ".join([*told, *more, *filter(None, [besides])]), remedy, rows)


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e6:,.0f} MB/s"
