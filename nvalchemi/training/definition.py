"""What a training is made of, checked as a whole before anything runs."""

from collections.abc import Callable
from typing import Any, Self

import torch
from pydantic import AliasChoices, Field, field_validator, model_validator
from torch import nn

from nvalchemi.training.arguments import (
    composed_loss,
    named_models,
    named_optimizer_configs,
    resolve_devices,
    resolve_training_fn,
)
from nvalchemi.training.losses import ComposedLossFunction, assemble_loss_targets
from nvalchemi.training.optimizers import OptimizerConfig
from nvalchemi.training.strict import StrictModel
from nvalchemi.training.validation import ValidationConfig


class _Models(dict[str, nn.Module]):
    """Models by name that remember whether one was given without."""

    def __init__(self, models: dict[str, nn.Module], single: bool) -> None:
        super().__init__(models)
        self.single = single


class TrainingDefinition(StrictModel):
    """Fields of a TrainingStrategy and the rules between them; see there."""

    models: dict[str, nn.Module]
    optimizer_configs: dict[str, list[OptimizerConfig]] = Field(default_factory=dict)
    num_epochs: int | None = Field(default=None, ge=1, strict=True)
    num_steps: int | None = Field(default=None, ge=1, strict=True)
    epoch_step_modifier: float = Field(default=1.0, gt=0)
    hooks: list[Any] = Field(default_factory=list)
    training_fn: Callable[[Any, Any], Any]
    loss_fn: ComposedLossFunction
    loss_target_assembler: Callable[..., Any] = assemble_loss_targets
    devices: list[torch.device] = Field(default_factory=lambda: [torch.device("cpu")])
    distributed_manager: Any = None
    validation_config: ValidationConfig | None = None
    last_validation: dict[str, Any] | None = None
    step_count: int = Field(default=0, ge=0)
    global_step_count: int = Field(default=0, ge=0)
    batch_count: int = Field(default=0, ge=0)
    epoch_count: int = Field(default=0, ge=0, validation_alias=AliasChoices("epoch_count", "epoch"))
    epoch_step_count: int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if "training_fn" not in values or values["training_fn"] is None:
            raise ValueError(
                "training_fn must be provided explicitly: a function (model, batch) -> "
                "predictions, such as nvalchemi.training.default_training_fn"
            )
        single = isinstance(values.get("models"), nn.Module) and not isinstance(
            values["models"], nn.ModuleDict
        )
        values["models"] = named_models(values.get("models"))
        configs = values.get("optimizer_configs", {})
        values["optimizer_configs"] = named_optimizer_configs(configs, single)
        # one model that was given by name is called as (models, batch)
        values["models"] = _Models(values["models"], single)
        return values

    @field_validator("models", mode="wrap")
    @classmethod
    def _keep_models(cls, value: Any, handler: Any) -> dict[str, nn.Module]:
        return value if isinstance(value, _Models) else named_models(value)

    @field_validator("training_fn", mode="before")
    @classmethod
    def _check_training_fn(cls, value: Any) -> Any:
        return resolve_training_fn(value)

    @field_validator("loss_fn", mode="before")
    @classmethod
    def _check_loss(cls, value: Any) -> ComposedLossFunction:
        return composed_loss(value)

    @field_validator("devices", mode="before")
    @classmethod
    def _check_devices(cls, value: Any) -> list[torch.device]:
        return resolve_devices(value)

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        if (self.num_epochs is None) == (self.num_steps is None):
            raise ValueError(
                "Exactly one of num_epochs or num_steps must be set: got "
                f"num_epochs={self.num_epochs}, num_steps={self.num_steps}"
            )
        for name in self.optimizer_configs:
            if name not in self.models:
                raise ValueError(
                    f"optimizer_configs key {name!r} is not present in models: "
                    f"models are {sorted(self.models)}"
                )
        if len(self.devices) not in (1, len(self.models)):
            raise ValueError(
                f"devices must be one, or one for each of the {len(self.models)} models: "
                f"got {len(self.devices)}"
            )
        return self

    def __repr__(self) -> str:
        models = ", ".join(f"{name}: {type(model).__name__}" for name, model in self.models.items())
        length = (
            f"num_epochs={self.num_epochs}"
            if self.num_steps is None
            else f"num_steps={self.num_steps}"
        )
        hooks = ", ".join(type(hook).__name__ for hook in self.hooks)
        return (
            f"{type(self).__name__}({models}; {length}; hooks: {hooks or 'none'}; "
            f"step_count={self.step_count}, epoch_count={self.epoch_count})"
        )

    __str__ = __repr__

    @property
    def single_model_input(self) -> bool:
        """Whether one model was given without a name; training_fn then gets the model itself."""
        return isinstance(self.models, _Models) and self.models.single
