"""A network cut for layer sharding: every convolution's kernels spread over workers (Marques et al.; thesis, ch. 4).

The network becomes *stages* (`stages`, `cutting`): a convolution, whose kernels are divided into shards, and the layers
behind it up to the next one. The shards compute layers that go by channel too (`Stage.spread`). The others are computed
where the shards' outputs are joined (`Stage.rest`). `balance` chooses the shares. `step_plan` describes a step, whose
tasks `passes` computes. `cluster` sends what travels: outputs of shards, and gradients.
"""
