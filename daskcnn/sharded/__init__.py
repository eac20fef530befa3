"""A network cut for layer sharding: every convolution's kernels spread over workers (Marques et al.; thesis, ch. 4).

The network becomes *stages*: a convolution, whose kernels are in shards, and the layers behind it up to the next one.
Layers that go by channel run on the shards too, each worker its own channels (`Stage.spread`); what is left runs where
the shards' outputs are put together (`Stage.rest`). `cluster` sends about what travels: outputs of shards, gradients.
"""

from daskcnn.sharded.balance import FREE, Balance, Link, Links
from daskcnn.sharded.channels import of_channels
from daskcnn.sharded.passes import (
    Kept,
    added,
    descended,
    descended_alike,
    gradient_vector,
    loss_of,
    merged_backward,
    merged_forward,
    shard_backward,
    shard_forward,
)
from daskcnn.sharded.pieces import Edge, Edges, Piece, cut_pieces, join_pieces
from daskcnn.sharded.stages import (
    By,
    Share,
    Side,
    Stage,
    edges_travel_along,
    neighbours,
    samples_first,
    shares_of,
    stages_of,
)
from daskcnn.sharded.tasks import step_tasks
from daskcnn.sharded.traffic import (
    Kernels,
    Phase,
    Traffic,
    eq2_elements,
    judged_by_all,
    judges,
    phases,
    stage_shapes,
    traffic,
    weight_traffic,
)

__all__ = [
    "FREE",
    "Balance",
    "By",
    "Edge",
    "Edges",
    "Kept",
    "Kernels",
    "Link",
    "Links",
    "Phase",
    "Piece",
    "Share",
    "Side",
    "Stage",
    "Traffic",
    "added",
    "cut_pieces",
    "descended",
    "descended_alike",
    "edges_travel_along",
    "eq2_elements",
    "gradient_vector",
    "join_pieces",
    "judged_by_all",
    "judges",
    "loss_of",
    "merged_backward",
    "merged_forward",
    "neighbours",
    "of_channels",
    "phases",
    "samples_first",
    "shard_backward",
    "shard_forward",
    "shares_of",
    "stage_shapes",
    "stages_of",
    "step_tasks",
    "traffic",
    "weight_traffic",
]
