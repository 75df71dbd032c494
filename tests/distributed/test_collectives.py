"""Collectives without ranks, with stand-in managers, and on two real gloo ranks."""

import functools
from types import SimpleNamespace

import pytest
import torch

from nvalchemi.distributed import collectives, resolve_global_rank, resolve_world_size
from nvalchemi.notebook import launch


def test_a_single_process_needs_no_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (collectives.get_rank(), collectives.get_world_size()) == (0, 1)
    assert (resolve_global_rank(), resolve_world_size(), resolve_global_rank(5)) == (0, 1, 5)
    assert not collectives.is_distributed_initialized()
    assert not collectives.init_distributed()
    tensor = torch.ones(2)
    assert collectives.all_reduce(tensor) is tensor and tensor.tolist() == [1, 1]
    assert collectives.all_gather_objects("x") == ["x"]
    assert collectives.all_reduce_flags(True).tolist() == [1]
    collectives.agree({"anything": object()})
    collectives.barrier()
    collectives.destroy_distributed()


def test_launcher_variables_answer_where_nothing_else_does(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert collectives.get_rank() == resolve_global_rank() == 3
    assert collectives.get_world_size() == resolve_world_size() == 8
    assert collectives.get_local_rank() == 1
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(ValueError, match="RANK must be an integer: 'three'"):
        collectives.get_rank()


def test_any_object_that_knows_its_rank_is_a_manager():
    by_attribute = SimpleNamespace(rank=2, world_size=4, local_rank=1, device="cpu")
    by_method = SimpleNamespace(get_rank=lambda: 2, get_world_size=lambda: 4, initialized=True)
    for manager in (by_attribute, by_method):
        assert (collectives.get_rank(manager), collectives.get_world_size(manager)) == (2, 4)
    assert collectives.get_rank(SimpleNamespace(global_rank=6, rank=2)) == 6
    assert collectives.get_local_rank(by_attribute) == 1
    assert collectives.distributed_device(by_attribute) == torch.device("cpu")
    assert collectives.is_distributed_initialized(by_method)
    assert not collectives.is_distributed_initialized(SimpleNamespace(is_initialized=lambda: 0))


def test_a_manager_is_asked_to_start_with_what_it_takes():
    calls = []
    takes_backend = SimpleNamespace(world_size=2, setup=lambda backend: calls.append(backend))
    takes_nothing = SimpleNamespace(world_size=2, initialize=lambda: calls.append("plain"))
    assert collectives.init_distributed(takes_backend, backend="gloo")
    assert collectives.init_distributed(takes_nothing, backend="gloo")
    assert calls == ["gloo", "plain"]
    # an error inside the start is the manager's, not a reason to call it again
    broken = SimpleNamespace(initialize=functools.partial(int, "x"))
    with pytest.raises(ValueError, match="invalid literal"):
        collectives.init_distributed(broken)


def _on_two_ranks() -> dict:
    from nvalchemi.distributed import collective_device
    from nvalchemi.distributed.collectives import (
        agree,
        all_gather_objects,
        all_reduce,
        all_reduce_flags,
        barrier,
        destroy_distributed,
        init_distributed,
        is_distributed_initialized,
    )

    seen = {"first": init_distributed(), "second": init_distributed()}
    rank = torch.distributed.get_rank()
    seen["up"] = is_distributed_initialized()
    seen["device"] = str(collective_device())
    total = torch.tensor([rank + 1.0])
    seen["same tensor"] = all_reduce(total) is total
    seen["sum"] = total.item()
    seen["max"] = all_reduce(torch.tensor(rank), op=torch.distributed.ReduceOp.MAX).item()
    seen["gathered"] = all_gather_objects({"rank": rank, "ragged": [0] * rank})
    seen["flags"] = all_reduce_flags(rank == 1).tolist()
    barrier()
    agree({"seed": 0, "shapes": ((3, 1), (1,)), "hash": "ab"})
    try:
        agree({"number of steps per epoch": 4 - rank, "seed": 0, **({"extra": 1} if rank else {})})
    except RuntimeError as error:
        seen["disagreement"] = str(error)
    barrier()  # all ranks failed together: communication goes on
    destroy_distributed()
    seen["down"] = not is_distributed_initialized()
    return seen


def test_collectives_on_two_ranks():
    """W19: ranks of unequal length are found before the first collective of the training."""
    first, second = launch(_on_two_ranks, nprocs=2, timeout=100)
    assert first == second
    sentence = first.pop("disagreement")
    assert "number of steps per epoch: 4 on rank 0, 3 on rank 1" in sentence
    assert "extra: nothing on rank 0, 1 on rank 1" in sentence and "seed" not in sentence
    assert first == {
        "first": True,
        "second": False,
        "up": True,
        "device": "cpu",
        "same tensor": True,
        "sum": 3.0,
        "max": 1,
        "flags": [0, 1],
        "gathered": [{"rank": 0, "ragged": []}, {"rank": 1, "ragged": [0]}],
        "down": True,
    }
