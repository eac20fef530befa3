"""Whether every worker can read the files that it is to work on, and write where it is to write, before it begins."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from distributed import Client

from daskcnn.cluster.link.calls import ANSWER, Answers, Check, ask_workers, no_check
from daskcnn.cluster.link.members import advertised, present
from daskcnn.cluster.link.worker_names import given_name
from daskcnn.cluster.run.admission import LOOK_AT_DATA, require_same, unanswering, versions_by_value
from daskcnn.errors import ClusterError

READ = "give a folder on storage that every worker reaches, under the same path"
WRITE = "give an output on storage that every worker can write to, under the same path"


def require_sight(client: Client, source: Path, target: str, check: Check = no_check) -> None:
    """Look whether all workers run the driver's versions, can read a folder, and write to another or to a URL.

    Raises
    ------
    ClusterError : naming a worker that does not or cannot, or does not answer
    """
    there = present(client, check)
    ours = {member.address: member.name for member in advertised(there)}
    names = {a: f"worker {ours.get(a) or given_name(info.get('name'))} ({a})" for a, info in there.items()}
    answers = ask_workers(client, versions_by_value(), names, within=ANSWER, check=check)
    for address, found in _complete(answers, names, ANSWER).given.items():
        require_same(names[address], found)
    answers = ask_workers(client, partial(unseen, source, target), names, within=LOOK_AT_DATA, check=check)
    for address, problem in _complete(answers, names, LOOK_AT_DATA).given.items():
        if problem:
            raise ClusterError(names[address], *problem)


def _complete(answers: Answers, names: dict[str, str], within: float) -> Answers:
    """The answers. Raises ClusterError where one is missing."""
    for address in answers.silent:
        raise ClusterError(unanswering(address, within))
    for address, error in answers.failed.items():
        raise ClusterError(names[address], f"was lost while it was looked at ({error})", "start it again") from error
    return answers


def unseen(source: Path, target: str) -> tuple[str, str] | None:
    """What this process cannot read or write, and the remedy; None where all is well."""
    try:
        with os.scandir(source) as entries:
            next(entries, None)
    except OSError as error:
        return f"cannot read {source} ({error.strerror or error})", READ
    if "://" not in target and not os.access(target, os.W_OK | os.X_OK):
        return f"cannot write beside the output ({target})", WRITE
    return None
