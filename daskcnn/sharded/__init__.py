"""A network cut for layer sharding: every convolution's kernels spread over workers (Marques et al.; thesis, ch. 4).

The network becomes *stages*: a convolution, whose kernels are in shards, and the layers behind it up to the next one.
Layers that go by channel run on the shards too, each worker its own channels (`Stage.spread`); what is left runs where
the shards' outputs are put together (`Stage.rest`). `cluster` sends about what travels: outputs of shards, gradients.
"""

from daskcnn.sharded.balance import FREE, ShareSearch, WorkerLink, WorkerLinks
from daskcnn.sharded.channels import of_channels
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.explained import explained
from daskcnn.sharded.passes import (
    ShardResidual,
    added,
    descended,
    descended_alike,
    gradient_vector,
    joined,
    loss_of,
    merged_backward,
    merged_forward,
    shard_backward,
    shard_forward,
)
from daskcnn.sharded.pieces import Edge, Edges, Piece, cut_pieces, join_pieces, weighted_stages
from daskcnn.sharded.plan_parts import (
    ALL,
    Carried,
    Cut,
    Cuts,
    Flow,
    Kernels,
    PlannedTask,
    Taken,
    TaskGroup,
    TaskInput,
    TaskKind,
    WantedEdge,
    WorkerTraffic,
)
from daskcnn.sharded.sizes import eq2_elements, stage_shapes
from daskcnn.sharded.stages import (
    Addend,
    By,
    Share,
    Side,
    Stage,
    added_channels,
    edges_travel_along,
    neighbours,
    samples_first,
    shares_of,
)
from daskcnn.sharded.step_plan import StepPlan
from daskcnn.sharded.traffic import added_traffic, step_bytes, traffic, weight_traffic
from daskcnn.sharded.values import Held, gradients_of, own_addends, put_in_place, summed_up

__all__ = [
    "ALL",
    "FREE",
    "Addend",
    "By",
    "Carried",
    "Cut",
    "Cuts",
    "Edge",
    "Edges",
    "Flow",
    "Held",
    "Kernels",
    "Piece",
    "PlannedTask",
    "ShardResidual",
    "Share",
    "ShareSearch",
    "Side",
    "Stage",
    "StepPlan",
    "Taken",
    "TaskGroup",
    "TaskInput",
    "TaskKind",
    "WantedEdge",
    "WorkerLink",
    "WorkerLinks",
    "WorkerTraffic",
    "added",
    "added_channels",
    "added_traffic",
    "cut_pieces",
    "descended",
    "descended_alike",
    "edges_travel_along",
    "eq2_elements",
    "explained",
    "gradient_vector",
    "gradients_of",
    "join_pieces",
    "joined",
    "loss_of",
    "merged_backward",
    "merged_forward",
    "neighbours",
    "of_channels",
    "own_addends",
    "put_in_place",
    "samples_first",
    "shard_backward",
    "shard_forward",
    "shares_of",
    "stage_shapes",
    "stages_of",
    "step_bytes",
    "summed_up",
    "traffic",
    "weight_traffic",
    "weighted_stages",
]
