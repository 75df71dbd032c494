"""DDPHook: the rank's device, DistributedDataParallel around what is trained, and its samples."""

import gc
import hashlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, PrivateAttr
from torch import nn
from torch.utils.data import DistributedSampler

from nvalchemi.data.datapipes.multidataset import MultiDataset
from nvalchemi.distributed.collectives import (
    agree,
    all_gather_objects,
    destroy_distributed,
    distributed_device,
    get_rank,
    get_world_size,
    init_distributed,
    is_distributed_initialized,
)
from nvalchemi.training.hooks.even_steps import EvenSteps
from nvalchemi.training.hooks.joint_loss import joint_batch_factors
from nvalchemi.training.hooks.loader_sharding import Place, refuse_other_ranks, shard_loader
from nvalchemi.training.hooks.replicas import check_replicas
from nvalchemi.training.modes import unwrap_model
from nvalchemi.training.stages import TrainingStage
from nvalchemi.training.strict import StrictModel

# Options of MultiDatasetBatchSampler that change what is trained on, not only in which order.
MIXTURE_OPTIONS = frozenset(
    {"weights", "temperature", "samples_per_dataset", "num_batches", "epoch_policy", "replacement"}
)


class DDPHook(StrictModel):
    """Train on all ranks; with one rank it does nothing.

    Before the training it chooses the device of the rank, wraps every model that is optimised in
    ``torch.nn.parallel.DistributedDataParallel`` and gives the loader a distributed sampler. All
    ranks then check that they agree (batches per epoch, parameters, seed, world size) and fail
    together if not. After each epoch they check that their parameters are still the same. At the
    end everything is as before, the loader too.

    Parameters
    ----------
    model_keys : tuple of str, optional
        Models to wrap; all that have an optimizer if not given.
    find_unused_parameters, broadcast_buffers : bool, optional
        As of DistributedDataParallel; None takes the manager's, else False.
    static_graph : bool
        As of DistributedDataParallel.
    process_group : optional
        Instead of the default group.
    backend : str, optional
        For a process group that this hook starts.
    auto_init : bool
        Whether to start one if the launcher's variables ask for it and nobody did.
    sampler_cls : class or factory
        Called as ``sampler_cls(dataset, **kwargs)``. The default is torch's DistributedSampler, and
        for a MultiDataset MultiDatasetBatchSampler. One with a parameter ``batch_size`` makes
        batches, another one single indices.
    sampler_kwargs : dict
        Over the defaults num_replicas, rank, shuffle and drop_last (inferred) and seed=0. A sampler
        that does not know both num_replicas and rank gets these arguments alone.

    Raises
    ------
    KeyError
        For unknown model_keys.
    ValueError
        For a loader that can not be sharded, or a model whose forward changes its parameters.
    RuntimeError
        If there are several ranks and no communication, or ranks do not agree.
    """

    frequency: ClassVar[int] = 1
    stage: ClassVar[TrainingStage] = TrainingStage.SETUP

    model_keys: tuple[str, ...] | None = None
    find_unused_parameters: bool | None = None
    broadcast_buffers: bool | None = None
    static_graph: bool = False
    process_group: Any = None
    backend: str | None = None
    auto_init: bool = True
    sampler_cls: Callable[..., Any] = DistributedSampler
    sampler_kwargs: dict[str, Any] = Field(default_factory=dict)

    _manager: Any = PrivateAttr(default=None)
    _strategy: Any = PrivateAttr(default=None)
    _started: bool = PrivateAttr(default=False)
    _bare: dict[str, nn.Module] = PrivateAttr(default_factory=dict)
    _undo: list[Callable[[], None]] = PrivateAttr(default_factory=list)
    _devices: list[torch.device] | None = PrivateAttr(default=None)

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in (
            TrainingStage.SETUP,
            TrainingStage.AFTER_EPOCH,
            TrainingStage.AFTER_TRAINING,
        )

    @property
    def wrapped_keys(self) -> frozenset[str]:
        """Models that are wrapped now."""
        return frozenset(self._bare)

    @property
    def _world_size(self) -> int:
        return get_world_size(self._manager)

    def prepare_strategy(self, strategy: Any) -> None:
        """Start communication if asked to, and choose the device, before models are moved."""
        self._manager = strategy.distributed_manager
        self._strategy = strategy
        if self.auto_init and init_distributed(self._manager, backend=self.backend):
            self._started = True
        if self._world_size <= 1:
            return
        device = distributed_device(self._manager, prefer_cuda=self.backend != "gloo")
        if device.type == "cuda":
            torch.cuda.set_device(device)
            if self._devices is None:
                self._devices = list(strategy.devices)
            strategy.devices = [device]

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Wrap and shard at SETUP; compare the replicas after an epoch and at the end."""
        if ctx.workflow is None:
            raise RuntimeError("DDPHook needs the strategy: ctx.workflow is None")
        if self._world_size <= 1:
            if stage is TrainingStage.SETUP:
                refuse_other_ranks(ctx.workflow.active_dataloader, world_size=1, rank=0)
                self._warn_of_unused_options(ctx.workflow.active_dataloader)
            return
        if stage is TrainingStage.SETUP:
            self._strategy = strategy = ctx.workflow
            self._fail_together(lambda: self._check_and_shard(strategy))
            # before wrapping: DDP's own check of shapes fails on one rank and hangs on the others
            agree(self._what_must_agree(strategy), self._manager)
            self._wrap(strategy)
            if self.process_group is None:
                strategy._state.joint_factors = joint_batch_factors
        elif self._bare:
            models = {key: self._bare[key] for key in sorted(self._bare)}
            check_replicas(models, ctx.epoch)

    def _warn_of_unused_options(self, loader: Any) -> None:
        """On one rank the loader is left as it is; say which mixture the user asked for in vain."""
        lost = sorted(MIXTURE_OPTIONS & set(self.sampler_kwargs))
        if lost and isinstance(getattr(loader, "dataset", None), MultiDataset):
            warnings.warn(
                f"sampler_kwargs {lost} have no effect on one rank, where the loader is left as it "
                "is; give it batch_sampler=MultiDatasetBatchSampler(dataset, batch_size=..., ...) "
                "to train on the same mixture",
                UserWarning,
                stacklevel=2,
            )

    def _check_and_shard(self, strategy: Any) -> None:
        """All that can fail on one rank alone and needs no other."""
        for key in self._keys(strategy):
            refuse_changing_forward(key, strategy.models[key])
            if not any(p.requires_grad for p in strategy.models[key].parameters()):
                raise ValueError(f"model {key!r} has no trainable parameters: nothing to wrap")
            if not self._flag("broadcast_buffers"):
                warn_of_batch_norm(key, strategy.models[key])
        strategy.active_dataloader = self.prepare_dataloader(strategy.active_dataloader)

    def _fail_together(self, work: Callable[[], None]) -> None:
        """Do what may fail on one rank alone, so that the others do not wait for it for ever."""
        if not is_distributed_initialized(self._manager):
            raise RuntimeError(
                "DDPHook requires initialized distributed communication: the world size is "
                f"{self._world_size}, but there is no process group; call "
                "DistributedManager.initialize() before, or leave auto_init=True"
            )
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        sentences = all_gather_objects(said, self._manager)
        if failure is not None:
            raise failure
        for rank, sentence in enumerate(sentences):
            if sentence is not None:
                raise RuntimeError(f"set-up failed on rank {rank}: {sentence}")

    def _keys(self, strategy: Any) -> tuple[str, ...]:
        keys = self.model_keys
        if keys is None:
            keys = tuple(strategy.optimizer_configs)
        unknown = sorted(set(keys) - set(strategy.models))
        if unknown:
            raise KeyError(
                f"DDPHook model_keys include unknown model(s) {unknown}: "
                f"models are {sorted(strategy.models)}"
            )
        left_out = sorted(set(strategy.optimizer_configs) - set(keys))
        if left_out:
            raise ValueError(
                f"model_keys leaves out {left_out}, which have optimizers: their gradients would "
                "not be reduced, and the ranks would come apart; name them too"
            )
        return keys

    def _flag(self, name: str) -> bool:
        own = getattr(self, name)
        return bool(getattr(self._manager, name, False) if own is None else own)

    def _wrap(self, strategy: Any) -> None:
        self._undo.append(ignore_stride_warning())
        for key in self._keys(strategy):
            model = strategy.models[key]
            if isinstance(model, torch.nn.parallel.DistributedDataParallel):
                continue
            self._bare[key] = model
            strategy.models[key] = torch.nn.parallel.DistributedDataParallel(
                model, **self._ddp_arguments(model)
            )

    def _ddp_arguments(self, model: nn.Module) -> dict[str, Any]:
        arguments: dict[str, Any] = {"static_graph": self.static_graph}
        for name in ("find_unused_parameters", "broadcast_buffers"):
            arguments[name] = self._flag(name)
        # torch 2.13 renamed it, and buffers are made equal at the start in any case since
        known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
        if "forward_sync_buffers" in known:
            arguments["forward_sync_buffers"] = arguments.pop("broadcast_buffers")
        if self.process_group is not None:
            arguments["process_group"] = self.process_group
        device = next(model.parameters()).device
        if device.type == "cuda":
            arguments.update(device_ids=[device.index], output_device=device.index)
        return arguments

    def prepare_dataloader(self, loader: Any) -> Any:
        """Loader of this rank; see `loader_sharding.shard_loader`. None stays None."""
        if loader is None or self._world_size <= 1:
            return loader
        place = Place(
            world_size=self._world_size,
            rank=get_rank(self._manager),
            sampler_cls=self.sampler_cls,
            sampler_kwargs=self.sampler_kwargs,
        )
        with warnings.catch_warnings():
            if place.rank:  # once is enough
                warnings.simplefilter("ignore", UserWarning)
            prepared, undo = shard_loader(loader, place)
        self._undo.append(undo)
        # lengths that nobody knows can not be compared at the start, so ends are at run time
        return EvenSteps(prepared) if _length(prepared) is None else prepared

    def _what_must_agree(self, strategy: Any) -> dict[str, Any]:
        loader = strategy.active_dataloader
        values: dict[str, Any] = {
            "world size": self._world_size,
            "num_epochs": strategy.num_epochs,
            "num_steps": strategy.num_steps,
            "epoch_step_modifier": strategy.epoch_step_modifier,
            "step_count": strategy.step_count,
            "batch_count": strategy.batch_count,
            "epoch_count": strategy.epoch_count,
            "epoch_step_count": strategy.epoch_step_count,
            "validation_config": describe_validation(strategy.validation_config),
            **{
                f"parameters of {key}": describe_parameters(strategy.models[key])
                for key in sorted(self._keys(strategy))
            },
        }
        values["batches per epoch"] = _length(loader)
        batch_sampler = getattr(loader, "batch_sampler", None)
        for sampler in (
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        ):
            seed = getattr(sampler, "seed", None)
            if seed is not None:
                values["seed of the sampler"] = seed
        if hasattr(loader, "dataset") and hasattr(loader.dataset, "__len__"):
            values["samples in the data set"] = len(loader.dataset)
        return values

    def close(self) -> None:
        """Put models, loader and devices back; end the communication that this hook started."""
        strategy, self._strategy = self._strategy, None
        if strategy is not None:
            strategy._state.joint_factors = None
        for key, model in self._bare.items():
            strategy.models[key] = model
        wrapped = bool(self._bare)
        self._bare.clear()
        while self._undo:
            self._undo.pop()()
        if strategy is not None and self._devices is not None:
            strategy.devices, self._devices = self._devices, None
        if wrapped:
            # a wrapper that outlives its process group can hang the process when it is collected
            gc.collect()
        if self._started:
            self._started = False
            destroy_distributed(self._manager)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ignore_stride_warning() -> Callable[[], None]:
    """Silence DDP on gradients of one-row weights; return what lets it speak again.

    A force loss hands over the gradient of a [1, n] weight with strides (1, 1), which is the same
    memory as (n, 1); DDP warns of slow copies that do not happen.
    """
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    entry = warnings.filters[0]

    def undo() -> None:
        if entry in warnings.filters:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]

    return undo


def describe_validation(config: Any) -> str:
    """When a validation is due, which all ranks must do together."""
    if config is None:
        return "none"
    return f"every_n_epochs={config.every_n_epochs}, every_n_steps={config.every_n_steps}"


def warn_of_batch_norm(key: str, model: nn.Module) -> None:
    """Say so when running statistics will differ between the ranks."""
    for name, module in unwrap_model(model).named_modules():
        kept = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        if kept and not isinstance(module, nn.SyncBatchNorm):
            warnings.warn(
                f"{key}.{name} keeps running statistics of this rank's batches alone, so the "
                "models of the ranks differ in evaluation; use "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) or "
                "DDPHook(broadcast_buffers=True)",
                UserWarning,
                stacklevel=2,
            )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def describe_parameters(model: nn.Module) -> str:
    """Number and digest of the parameters: equal where names, shapes, dtypes and order are."""
    parameters = list(unwrap_model(model).named_parameters())
    shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in parameters]
    digest = hashlib.blake2s(repr(shapes).encode(), digest_size=4).hexdigest()
    return f"{sum(p.numel() for _, p in parameters)} numbers in {len(parameters)} ({digest})"


def refuse_changing_forward(key: str, model: nn.Module) -> None:
    """Refuse modules that rewrite their parameters in forward, differently on every rank.

    Raises
    ------
    ValueError
        Naming the module.
    """
    for name, module in unwrap_model(model).named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"{key}.{name} is an {type(module).__name__} with max_norm={module.max_norm}: it "
                "renormalises the rows that a batch uses in every forward, so the parameters of "
                "the ranks come apart. Use max_norm=None, and normalise the output instead"
            )
