"""Words of PyTorch, Lightning, Keras, Horovod and Ray for keys of a job and for strategies, with those here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from daskcnn.errors import nearest, or_own

_KEYS = {
    "train.lr": "learning_rate learningrate base_lr init_lr learning_rate_init eta0 step_size",
    "train.epochs": "max_epochs num_epochs n_epochs num_train_epochs max_iter nb_epoch",
    "train.batch_size": "batch per_device_train_batch_size minibatch_size mini_batch_size",
    "train.weight_decay": "l2 wd alpha_l2 decay",
    "train.clip": "gradient_clip_val max_grad_norm clip_norm clipnorm grad_clip",
    "train.schedule": "lr_scheduler lr_schedule",
    "train.early_stopping": "patience early_stop",
    "train.seed": "random_state random_seed",
    "train.loss": "criterion loss_function loss_fn objective",
    "train.partition": "sampler partitioner",
    "cluster.workers": "num_workers n_workers devices num_nodes nnodes nproc_per_node",
    "cluster.scheduler": "master_addr address coordinator_address",
    "run.dir": "default_root_dir log_dir output_dir logdir storage_path",
    "data.validation": "validation_split validation_fraction val_split",
    "model.from": "init pretrained checkpoint ckpt_path init_from weights",
}
_STRATEGIES = {
    "bsp": "ddp allreduce all-reduce all_reduce dp distributed distributeddataparallel mirrored mirroredstrategy "
    "horovod sync synchronous sync-sgd ssgd multiworkermirrored",
    "sgwu": "averaging",
    "local-sgd": "fedavg federated localsgd local_sgd diloco bmuf post-local-sgd",
    "agwu": "async asgd asynchronous parameter-server parameter_server ps hogwild",
    "layer": "model_parallel model-parallel tensor_parallel tensor-parallel tp fsdp deepspeed",
    "easgd": "elastic elastic-averaging",
}
KEYS: Mapping[str, str] = {word: here for here, words in _KEYS.items() for word in words.split()}
"""Keys by words that other programs have for them."""
STRATEGIES: Mapping[str, str] = {word: here for here, words in _STRATEGIES.items() for word in words.split()}
"""Strategies by words that other programs have for them."""


def meant_key(name: str, section: str = "") -> str | None:
    """Return the key that a word stands for, without its section where it was written there; None for other words."""
    here = KEYS.get(name.lower().replace("-", "_"))
    return here and here.removeprefix(f"{section}.")


def meant_strategy(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown strategy."""
    here = STRATEGIES.get(name.lower())
    return f"; did you mean {here!r}?" if here else or_own(nearest(name, known))
