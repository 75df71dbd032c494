"""Training on two real ranks: exact, checked, and failing together."""

import time
import warnings
from itertools import chain

import pytest
import torch
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import (
    DataLoader,
    ExactEvalSampler,
    InMemoryDataset,
    MultiDataset,
)
from nvalchemi.distributed import DistributedManager
from nvalchemi.models import MLPPotential
from nvalchemi.notebook import RankError, launch
from nvalchemi.training import (
    DDPHook,
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
    ValidationLoop,
    default_training_fn,
)


def structures(number: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return Batch.from_data_list(
        [
            AtomicData(
                atomic_numbers=torch.randint(1, 9, (2 + i % 4,), generator=generator),
                positions=random(2 + i % 4, 3),
                energy=random(1, 1),
                forces=random(2 + i % 4, 3),
            )
            for i in range(number)
        ]
    )


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MLPPotential(hidden_features=8).double()


def strategy(net: nn.Module, hooks: list, **options) -> TrainingStrategy:
    options.setdefault("num_epochs", 3)
    return TrainingStrategy(
        models=net,
        optimizer_configs=OptimizerConfig(
            optimizer_cls=torch.optim.Adam, optimizer_kwargs={"lr": 1e-2}
        ),
        training_fn=default_training_fn,
        hooks=hooks,
        **{"loss_fn": EnergyMSELoss() + ForceMSELoss(), **options},
    )


class Notes:
    """Parameters after each epoch, and the samples of each step."""

    frequency = 1

    def __init__(self):
        self.parameters, self.samples = [], []

    def _runs_on_stage(self, stage):
        return stage in (TrainingStage.AFTER_BATCH, TrainingStage.AFTER_EPOCH)

    def __call__(self, ctx, stage):
        if stage is TrainingStage.AFTER_BATCH:
            self.samples.append(ctx.batch.metadata["index"].tolist())
        else:
            net = ctx.model.module if hasattr(ctx.model, "module") else ctx.model
            self.parameters.append(torch.cat([p.detach().flatten() for p in net.parameters()]))


def train_on_ranks(data, options: dict) -> dict:
    """Train with DDPHook; ranks begin with other parameters, and DDP makes them equal."""
    DistributedManager.initialize()
    manager = DistributedManager()
    notes = Notes()
    loader = DataLoader(data, batch_size=4, shuffle=True)
    sampler = loader.sampler
    net = model(seed=manager.rank)
    training = strategy(
        net,
        [DDPHook(), notes],
        distributed_manager=manager,
        validation_config=ValidationConfig(
            validation_data=DataLoader(InMemoryDataset(structures(7, seed=5)), batch_size=3)
        ),
        **options,
    )
    training.run(loader)
    held_out = InMemoryDataset(structures(7, seed=5))
    exact = ExactEvalSampler(
        held_out, batch_size=3, num_replicas=manager.world_size, rank=manager.rank
    )
    with training:
        loop = ValidationLoop.from_training_strategy(
            training, ValidationConfig(validation_data=DataLoader(held_out, batch_sampler=exact))
        )
        with loop:
            by_exact_sampler = loop.execute()["total_loss"]
    return {
        "notes": notes,
        "summary": training.last_validation,
        "by_exact_sampler": by_exact_sampler,
        "counters": (training.step_count, training.global_step_count, training.epoch_count),
        "restored": loader.sampler is sampler
        and loader.batch_sampler is None
        and training.models["main"] is net,
    }


def train_jointly(
    data, per_rank: list[list[list[int]]], options: dict
) -> tuple[list[torch.Tensor], dict]:
    """One process that trains on what all ranks saw in each step, as one batch."""
    joint = [list(chain(*step)) for step in zip(*per_rank, strict=True)]
    notes = Notes()
    training = strategy(
        model(seed=0),
        [notes],
        num_epochs=None,
        num_steps=len(joint),
        validation_config=ValidationConfig(
            validation_data=DataLoader(InMemoryDataset(structures(7, seed=5)), batch_size=7)
        ),
        **options,
    )

    class Steps(Notes):
        def __call__(self, ctx, stage):
            if stage is TrainingStage.AFTER_BATCH:
                self.parameters.append(
                    torch.cat([p.detach().flatten() for p in ctx.model.parameters()])
                )

    steps = Steps()
    training.register_hook(steps)
    training.run(DataLoader(data, batch_sampler=joint))
    return steps.parameters, training.last_validation


def partly_labelled(number: int) -> Batch:
    batch = structures(number, seed=2)
    batch.forces = torch.where(batch.positions[:, :1] > 0.4, torch.nan, batch.forces)
    return batch


@pytest.mark.parametrize("case", ["one data set", "uneven tail", "unequal labels"])
def test_two_ranks_end_where_one_process_ends_on_the_joint_batches(case: str):
    options = {}
    data = InMemoryDataset(structures(21))
    if case == "uneven tail":  # the last step has four structures on one rank, one on the other
        data = MultiDataset(InMemoryDataset(structures(17)), InMemoryDataset(structures(4, seed=1)))
    if case == "unequal labels":  # denominators count atoms and labels, and differ in every step
        data = InMemoryDataset(partly_labelled(21))
        options["loss_fn"] = EnergyMSELoss(per_atom=True) + ForceMSELoss(
            normalize_by_atom_count=False, ignore_nonfinite=True
        )
    results = launch(train_on_ranks, data, options, nprocs=2)
    notes = [result["notes"] for result in results]
    # after every epoch both ranks hold the same parameters, bit by bit
    assert len(notes[0].parameters) == 3
    for first, second in zip(notes[0].parameters, notes[1].parameters, strict=True):
        assert torch.equal(first, second)
    assert notes[0].samples != notes[1].samples
    after_steps, summary = train_jointly(data, [note.samples for note in notes], options)
    per_epoch = len(notes[0].samples) // 3
    for epoch in range(3):
        alone = after_steps[(epoch + 1) * per_epoch - 1]
        torch.testing.assert_close(notes[0].parameters[epoch], alone, rtol=0, atol=1e-9)
    # the validation of two ranks is that of one, in whatever batches
    for result in results:
        assert result["summary"]["distributed_reduced"]
        assert result["summary"]["total_loss"] == pytest.approx(summary["total_loss"], abs=1e-9)
        assert result["by_exact_sampler"] == pytest.approx(summary["total_loss"], abs=1e-9)
        assert set(result["summary"]["per_component_sample_count"].values()) == {7}
        assert result["counters"] == (3 * per_epoch, 6 * per_epoch, 3)
        assert result["restored"]


class Drifting(nn.Module):
    """Changes a parameter in forward by what its own batch holds."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, batch):
        with torch.no_grad():
            self.scale.mul_(batch.positions.norm())
        sums = batch.positions.new_zeros(batch.num_graphs, 1)
        atomic = batch.positions.pow(2).sum(1, keepdim=True) * self.scale
        return {"energy": sums.index_add(0, batch.batch_idx, atomic)}


class Renormalising(Drifting):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 4, max_norm=1.0)


class FailsOnRankOne(Notes):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def _runs_on_stage(self, stage):
        return stage is TrainingStage.BEFORE_FORWARD

    def __call__(self, ctx, stage):
        if self.rank == 1 and not torch.is_grad_enabled():
            raise KeyError("a label")


def sentences_of_failures() -> dict[str, tuple[str, str, float]]:
    """What this rank is told, by fault; each must come to all ranks, soon."""
    DistributedManager.initialize()
    manager = DistributedManager()
    data = InMemoryDataset(structures(12))
    batches = list(DataLoader(data, batch_size=3))

    def loader(**options):
        return DataLoader(data, batch_size=2, **options)

    def options(**more):
        return {"distributed_manager": manager, "num_epochs": 2, **more}

    def energy_only(net, **more):
        return TrainingStrategy(
            models=net,
            optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.SGD),
            training_fn=default_training_fn,
            loss_fn=EnergyMSELoss(),
            hooks=[DDPHook()],
            **options(**more),
        )

    wide = MLPPotential(hidden_features=4 + manager.rank).double()
    one_rank = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
    validation = ValidationConfig(validation_data=batches, grad_mode="disabled")
    cases = {
        "uneven": lambda: energy_only(model()).run(batches[: 4 - manager.rank]),
        "one replica": lambda: energy_only(model()).run(loader(sampler=one_rank)),
        "one rank fails": lambda: energy_only(model()).run(
            DataLoader(data, batch_sampler=[[0]]) if manager.rank else loader()
        ),
        "shapes": lambda: energy_only(wide).run(loader()),
        "epochs": lambda: energy_only(model(), num_epochs=2 + manager.rank).run(loader()),
        "validation on one rank": lambda: energy_only(
            model(), validation_config=None if manager.rank else validation
        ).run(loader()),
        "random validation": lambda: energy_only(
            model(),
            validation_config=ValidationConfig(
                validation_data=loader(sampler=torch.utils.data.SubsetRandomSampler([0, 1, 2]))
            ),
        ).run(loader()),
        "counters": lambda: energy_only(model(), batch_count=manager.rank).run(loader()),
        "left out": lambda: TrainingStrategy(
            models={"gen": model(), "disc": model()},
            optimizer_configs={
                name: [OptimizerConfig(optimizer_cls=torch.optim.SGD)] for name in ("gen", "disc")
            },
            training_fn=default_training_fn,
            loss_fn=EnergyMSELoss(),
            hooks=[DDPHook(model_keys=("gen",))],
            **options(),
        ).run(loader()),
        "drift": lambda: energy_only(Drifting()).run(loader()),
        "max_norm": lambda: energy_only(Renormalising()).run(loader()),
        "model_keys": lambda: strategy(model(), [DDPHook(model_keys=("other",))], **options()).run(
            loader()
        ),
        "validation": lambda: TrainingStrategy(
            models=MLPPotential(outputs=("energy",)).double(),
            optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.SGD),
            training_fn=default_training_fn,
            loss_fn=EnergyMSELoss(),
            hooks=[DDPHook(), FailsOnRankOne(manager.rank)],
            validation_config=validation,
            **options(),
        ).run(loader()),
    }
    told = {}
    for name, case in cases.items():
        start = time.monotonic()
        try:
            case()
        except Exception as error:
            told[name] = (type(error).__name__, str(error), time.monotonic() - start)
    return told


def test_faults_are_told_to_all_ranks_and_none_waits():
    told = launch(sentences_of_failures, nprocs=2, timeout=240)
    expected = {
        # W19: one rank ran out of batches and the other waited for it in backward
        "uneven": ("batches per epoch: 4 on rank 0, 3 on rank 1",) * 2,
        # W6: kept by the peer, and all ranks trained on the same batches
        "one replica": (
            "built for rank 0 of 1, but this is rank 0 of 2",
            "built for rank 0 of 1, but this is rank 1 of 2",
        ),
        "one rank fails": ("set-up failed on rank 1: ValueError", "batch_sampler"),
        "shapes": ("parameters of main: ",) * 2,
        "epochs": ("num_epochs: 2 on rank 0, 3 on rank 1",) * 2,
        "validation on one rank": ("validation_config: ",) * 2,
        "random validation": ("validation_data must not draw at random (SubsetRandomSampler)",) * 2,
        "counters": ("batch_count: 0 on rank 0, 1 on rank 1",) * 2,
        "left out": ("model_keys leaves out ['disc']",) * 2,
        # W38: the peer trains on with replicas that differ
        "drift": ("come apart by epoch 1: main.scale",) * 2,
        "max_norm": ("main.embedding is an Embedding with max_norm=1.0",) * 2,
        "model_keys": ("unknown model(s) ['other']",) * 2,
        "validation": ("validation failed on rank 1: KeyError: 'a label'", "a label"),
    }
    for rank in (0, 1):
        assert set(told[rank]) == set(expected)
        for name, sentences in expected.items():
            _, text, _ = told[rank][name]
            assert sentences[rank] in text, (name, rank, text)


class Stream(torch.utils.data.IterableDataset):
    """Structures of this rank; rank 0 has two batches more, and nobody knows the length."""

    def __init__(self, rank, world_size):
        self.num_replicas, self.rank = world_size, rank
        self.batches = list(DataLoader(InMemoryDataset(structures(12, seed=rank)), batch_size=2))

    def __iter__(self):
        return iter(self.batches[: 6 - 2 * self.rank])


def train_on_a_stream() -> tuple[int, int, list[str]]:
    DistributedManager.initialize()
    manager = DistributedManager()
    loader = torch.utils.data.DataLoader(Stream(manager.rank, manager.world_size), batch_size=None)
    training = strategy(
        model(), [DDPHook()], distributed_manager=manager, num_epochs=None, num_steps=10
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.run(loader)
    said = [str(w.message) for w in caught if "more batches" in str(w.message)]
    return training.step_count, training.epoch_count, said


def test_ranks_whose_streams_end_apart_end_their_passes_together():
    results = launch(train_on_a_stream, nprocs=2, timeout=120)
    assert [result[:2] for result in results] == [(10, 2), (10, 2)]  # passes of 4, 4 and 2 steps
    assert "ends after 4 steps on all" in results[0][2][0] and not results[1][2]


def test_more_ranks_than_communication_is_an_error(monkeypatch):
    class Manager:
        rank, world_size, device = 0, 2, torch.device("cpu")
        broadcast_buffers = find_unused_parameters = False

        def is_initialized(self):
            return False

    training = strategy(
        model(), [DDPHook(auto_init=False)], distributed_manager=Manager(), num_epochs=1
    )
    with pytest.raises(RuntimeError, match="requires initialized distributed communication"):
        training.run(DataLoader(InMemoryDataset(structures(4)), batch_size=2))


def test_one_rank_is_left_as_it_is():
    data = InMemoryDataset(structures(6))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    sampler, net = loader.sampler, model()
    seen = []

    class Look(Notes):
        def __call__(self, ctx, stage):
            seen.append((ctx.model is net, loader.sampler is sampler, loader.batch_sampler))

    strategy(net, [DDPHook(sampler_kwargs={"seed": 5}), Look()], num_epochs=1).run(loader)
    assert len(seen) == 4 and set(seen) == {(True, True, None)}


def test_a_rank_that_dies_in_the_training_is_named():
    def fn():
        DistributedManager.initialize()
        manager = DistributedManager()

        class Dies(Notes):
            def __call__(self, ctx, stage):
                if manager.rank == 1:
                    raise KeyError("stress")

        strategy(model(), [DDPHook(), Dies()], distributed_manager=manager).run(
            DataLoader(InMemoryDataset(structures(12)), batch_size=2)
        )

    with pytest.raises(RankError, match="^rank 1: KeyError") as caught:
        launch(fn, nprocs=2, timeout=120)
    assert isinstance(caught.value.__cause__, KeyError)
