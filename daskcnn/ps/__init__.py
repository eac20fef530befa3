"""The parameter server and its update rules. No I/O, no clock: events go in, instructions come out."""

from __future__ import annotations

from daskcnn.ps.admm import ADMM
from daskcnn.ps.agwu import AGWU
from daskcnn.ps.auto import Auto
from daskcnn.ps.bsp import BSP
from daskcnn.ps.dc_asgd import DCASGD
from daskcnn.ps.downpour import Downpour
from daskcnn.ps.easgd import EASGD
from daskcnn.ps.gradient_noise import NoiseScale
from daskcnn.ps.local_sgd import LocalSGD
from daskcnn.ps.messages import (
    CenterPart,
    Code,
    Instruction,
    Join,
    Leave,
    Pace,
    Pull,
    Push,
    PushPart,
    Refuse,
    Reply,
    Request,
    RuleState,
    Snapshot,
    Vector,
)
from daskcnn.ps.parallel_sgd import ParallelSGD
from daskcnn.ps.parts_trial import PartsTrial
from daskcnn.ps.rule import AccuracyWeighted, Action, Asynchronous, Local, Merge, UpdateRule, View
from daskcnn.ps.sequencer import Sequencer
from daskcnn.ps.server import ParameterServer
from daskcnn.ps.sgwu import SGWU

RULES: dict[str, type[UpdateRule]] = {
    "sgwu": SGWU,
    "agwu": AGWU,
    "bsp": BSP,
    "easgd": EASGD,
    "downpour": Downpour,
    "dc-asgd": DCASGD,
    "admm": ADMM,
    "parallel-sgd": ParallelSGD,
    "local-sgd": LocalSGD,
    "auto": Auto,
}

__all__ = [
    "BSP",
    "RULES",
    "AccuracyWeighted",
    "Action",
    "Asynchronous",
    "CenterPart",
    "Code",
    "Instruction",
    "Join",
    "Leave",
    "Local",
    "LocalSGD",
    "Merge",
    "NoiseScale",
    "Pace",
    "ParameterServer",
    "PartsTrial",
    "Pull",
    "Push",
    "PushPart",
    "Refuse",
    "Reply",
    "Request",
    "RuleState",
    "Sequencer",
    "Snapshot",
    "UpdateRule",
    "Vector",
    "View",
]
