"""OptimizerConfig, and building and stepping optimizers and schedulers."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

from nvalchemi.training.optimizers import (
    OptimizerConfig,
    OptSchedPair,
    setup_optimizers,
    step_lr_schedulers,
    step_metric_schedulers,
    step_optimizers,
    zero_gradients,
)


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def force_error(summary):
    return summary["per_component"]["forces"]


ADAM = OptimizerConfig(optimizer_cls=torch.optim.Adam, optimizer_kwargs={"lr": 0.1})
STEP = OptimizerConfig(
    optimizer_cls="torch.optim.SGD",
    optimizer_kwargs={"lr": 1.0},
    scheduler_cls="torch.optim.lr_scheduler.StepLR",
    scheduler_kwargs={"step_size": 1, "gamma": 0.5},
)


def plateau(adapter=None):
    return OptimizerConfig(
        optimizer_cls=torch.optim.SGD,
        optimizer_kwargs={"lr": 1.0},
        scheduler_cls=ReduceLROnPlateau,
        scheduler_kwargs={"factor": 0.5, "patience": 0},
        scheduler_metric_adapter=adapter,
    )


def test_build():
    optimizer, scheduler = ADAM.build(net().parameters())
    assert type(optimizer) is torch.optim.Adam and scheduler is None
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer, scheduler = STEP.build(net().parameters())
    assert type(optimizer) is torch.optim.SGD and type(scheduler) is StepLR


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"optimizer_cls": torch.optim.Adam, "optimizer_kwargs": {"lrr": 1}},
            r"Invalid optimizer kwargs for Adam: \['lrr'\]; allowed are \['lr', ",
        ),
        (
            {"optimizer_cls": torch.optim.Adam, "optimizer_kwargs": {"params": []}},
            r"Invalid optimizer kwargs for Adam: \['params'\]",
        ),
        ({"optimizer_cls": "torch.optim.Adamm"}, "'torch.optim.Adamm' is not the dotted name"),
        ({"optimizer_cls": "Adam"}, r"'Adam' is not the dotted name .*'torch.optim.AdamW'"),
        ({"optimizer_cls": nn.Linear}, "subclass of Optimizer"),
        ({"optimizer_cls": torch.optim.LBFGS}, "LBFGS needs a closure"),
        (
            {
                "optimizer_cls": torch.optim.SGD,
                "scheduler_cls": StepLR,
                "scheduler_kwargs": {"step_size": 1, "step": 1},
            },
            r"Invalid scheduler kwargs for StepLR: \['step'\]",
        ),
        (
            {"optimizer_cls": torch.optim.SGD, "scheduler_cls": StepLR},
            r"Missing scheduler kwargs for StepLR: \['step_size'\]",
        ),
        (
            {"optimizer_cls": torch.optim.SGD, "scheduler_kwargs": {"gamma": 1}},
            r"scheduler_kwargs need a scheduler_cls: \['gamma'\]",
        ),
        (
            {"optimizer_cls": torch.optim.SGD, "scheduler_metric_adapter": "total_loss"},
            "used by ReduceLROnPlateau only: scheduler_cls is None",
        ),
        ({"optimizer_cls": torch.optim.SGD, "lr": 0.1}, "has no argument 'lr'"),
    ],
)
def test_mistakes_are_told_when_the_config_is_written(fields, message):
    with pytest.raises(ValidationError, match=message):
        OptimizerConfig(**fields)


def test_own_optimizer_with_open_keywords_is_accepted():
    class Open(torch.optim.SGD):
        def __init__(self, params, **kwargs):
            super().__init__(params, **kwargs)

    config = OptimizerConfig(optimizer_cls=Open, optimizer_kwargs={"lr": 0.5})
    assert config.build(net().parameters())[0].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("config", [ADAM, STEP, plateau(), plateau("x"), plateau(force_error)])
def test_spec_round_trip(config):
    assert OptimizerConfig.from_spec(config.to_spec()) == config


def test_spec_of_tuples_and_refusals():
    betas = OptimizerConfig(optimizer_cls=torch.optim.Adam, optimizer_kwargs={"betas": (0.9, 0.95)})
    again = OptimizerConfig.from_spec(betas.to_spec())
    assert again == betas
    optimizer, _ = again.build(net().parameters())
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    milestones = OptimizerConfig(
        optimizer_cls=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.1},
        scheduler_cls=torch.optim.lr_scheduler.MultiStepLR,
        scheduler_kwargs={"milestones": [1, 2]},
    )
    assert OptimizerConfig.from_spec(json.loads(json.dumps(milestones.to_spec()))) == milestones
    tensor = OptimizerConfig(
        optimizer_cls=torch.optim.Adam, optimizer_kwargs={"lr": torch.tensor(0.1)}
    )
    with pytest.raises(ValueError, match="cannot be written as a spec"):
        tensor.to_spec()
    with pytest.raises(ValueError, match="cannot be imported by name"):
        plateau(lambda summary: 1.0).to_spec()


def test_setup_takes_trainable_parameters_only():
    model = net()
    model[0].bias.requires_grad_(False)
    pairs = setup_optimizers({"main": model}, {"main": [ADAM, STEP]})
    assert [len(optimizer.param_groups[0]["params"]) for optimizer, _ in pairs["main"]] == [3, 3]
    allowed = setup_optimizers(
        {"main": model},
        {"main": [ADAM]},
        allowed_parameter_names={"main.0.bias", "main.1.bias"},
    )
    ((optimizer, _),) = allowed["main"]
    assert optimizer.param_groups[0]["params"][0] is model[1].bias
    assert len(optimizer.param_groups[0]["params"]) == 1


def test_setup_takes_one_config_and_refuses_what_is_none():
    ((optimizer, _),) = setup_optimizers({"main": net()}, {"main": ADAM})["main"]
    assert isinstance(optimizer, torch.optim.Adam)
    for wrong in ("adam", 3, [ADAM, "adam"], None):
        with pytest.raises(TypeError, match=r"optimizer_configs\['main'\] must"):
            setup_optimizers({"main": net()}, {"main": wrong})


def test_setup_errors():
    model = net()
    with pytest.raises(ValueError, match=r"\['x'\] are not models; the models are \['main'\]"):
        setup_optimizers({"main": model}, {"x": [ADAM]})
    with pytest.raises(ValueError, match="'main' has an empty list"):
        setup_optimizers({"main": model}, {"main": []})
    with pytest.raises(ValueError, match=r"\['main.2.bias'\] are no parameters.*main\.0\.bias"):
        setup_optimizers({"main": model}, {"main": [ADAM]}, allowed_parameter_names=["main.2.bias"])
    for allowed in (None, []):
        model.requires_grad_(allowed is not None)
        with pytest.raises(ValueError, match="Configured model 'main' has no trainable parameters"):
            setup_optimizers({"main": model}, {"main": [ADAM]}, allowed_parameter_names=allowed)


DDP_NAMES = """
import os
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from nvalchemi.training.optimizers import (
    OptimizerConfig, iter_qualified_named_parameters, setup_optimizers
)

model = nn.ModuleDict({"module": nn.Linear(2, 1)})  # a child of that name must keep it
names = ["main.module.weight", "main.module.bias"]
assert [name for name, _ in iter_qualified_named_parameters({"main": model})] == names
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
wrapped = nn.ModuleDict({"main": DistributedDataParallel(model)})
assert [name for name, _ in iter_qualified_named_parameters(wrapped)] == names
config = OptimizerConfig(optimizer_cls=torch.optim.SGD)
pairs = setup_optimizers(wrapped, {"main": [config]}, allowed_parameter_names=names[:1])
(parameter,) = pairs["main"][0][0].param_groups[0]["params"]
assert parameter is model["module"].weight
print("names hold", flush=True)
os._exit(0)  # gloo and a living DDP model do not end reliably together
"""


def test_filter_names_of_the_bare_model_hold_for_the_ddp_wrapped_one():
    result = subprocess.run(
        [sys.executable, "-c", DDP_NAMES], capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "names hold\n", result.stderr


def test_steps():
    model = net()
    pairs = setup_optimizers({"main": model}, {"main": [STEP]})["main"]
    before = model[0].weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    gradient = model[0].weight.grad.clone()
    step_optimizers(pairs)
    torch.testing.assert_close(model[0].weight, before - gradient)
    assert pairs[0][0].param_groups[0]["lr"] == 1.0
    step_lr_schedulers(pairs)
    assert pairs[0][0].param_groups[0]["lr"] == 0.5
    zero_gradients(pairs)
    assert all(parameter.grad is None for parameter in model.parameters())


def rates(pairs):
    return [optimizer.param_groups[0]["lr"] for optimizer, _ in pairs]


def test_plateau_steps_on_validation_only():
    configs = [STEP, plateau(), plateau("mae"), plateau(force_error)]
    pairs = setup_optimizers({"main": net()}, {"main": configs})["main"]
    step_optimizers(pairs)
    step_lr_schedulers(pairs)
    assert rates(pairs) == [0.5, 1.0, 1.0, 1.0]
    good = {"total_loss": torch.tensor(1.0), "mae": 1.0, "per_component": {"forces": 1.0}}
    assert step_metric_schedulers(pairs, good) is True
    step_metric_schedulers(pairs, good | {"mae": 0.5})
    assert rates(pairs) == [0.5, 0.5, 1.0, 0.5]
    assert step_metric_schedulers(pairs[:1], {}) is False


def test_metric_errors():
    pairs = [plateau("mae").build(net().parameters())]
    with pytest.raises(KeyError, match=r"'mae'.*it has \['total_loss'\]"):
        step_metric_schedulers(pairs, {"total_loss": 1.0})
    with pytest.raises(TypeError, match="must be one number, 'mae' gave dict"):
        step_metric_schedulers(pairs, {"mae": {}})


def test_plain_pair_follows_the_total_loss():
    optimizer = torch.optim.SGD(net().parameters(), lr=1.0)
    pairs = [(optimizer, ReduceLROnPlateau(optimizer, factor=0.5, patience=0))]
    for _ in range(2):
        step_metric_schedulers(pairs, {"total_loss": 1.0})
    assert rates(pairs) == [0.5]


def test_metric_does_not_reach_the_checkpoint():
    pair = plateau(force_error).build(net().parameters())
    assert isinstance(pair, OptSchedPair) and isinstance(pair[1], LRScheduler)
    assert force_error not in pair[1].state_dict().values()
    assert copy.deepcopy(pair).metric is force_error
    assert pickle.loads(pickle.dumps(pair)).metric is force_error
