"""What a cell defines, in processes that a rank spawns: DataLoader workers, for one.

A forked child has all that its rank has. A spawned one, or one of a fork server, gets its process
object by plain pickle, which sends classes and functions by name: a cell's, and those that the
function defines, it could not find. On a rank they travel by value there, too, and what belongs to
a module is put into it in the child, so that it can go back by name.
"""

from __future__ import annotations

import sys
from collections import ChainMap
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import _ConnectionBase
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch

from nvalchemi.distributed import origins
from nvalchemi.distributed.modules import by_value_here
from nvalchemi.distributed.pickling import Pickler

_LEFT_ALONE = (
    *(torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage, np.ndarray),
    _ConnectionBase,
)


def take_over() -> None:
    """On a rank: let children that it starts know what its parent sent by value."""
    reduction.dump = _dump  # both ways of starting a child look it up there


def _dump(obj: Any, file: Any, protocol: int | None = None) -> None:
    with by_value_here(origins.modules_of_arrived()):
        _ChildPickler(file).dump(obj)


class _ChildPickler(Pickler):
    """Definitions go as they go to ranks, tensors and descriptors as to any child."""

    dispatch_table = ChainMap(
        reduction.ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
        cloudpickle.Pickler.dispatch_table,
    )

    def __init__(self, file: Any) -> None:
        super().__init__(file, marker=_Placer())

    def _reducer_of(self, kind: type) -> Callable[[Any], Any] | None:
        return None if issubclass(kind, _LEFT_ALONE) else super()._reducer_of(kind)

    def _mark_of(self, obj: Any) -> None:
        return None  # marks are between a rank and its parent


class _Placer(origins.Marker):
    """Puts what goes by value into its module in the child."""

    def mark(self, obj: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        make, arguments, *rest = reduced
        home, name = getattr(obj, "__module__", None) or "", getattr(obj, "__qualname__", "")
        if home not in sys.modules or vars(sys.modules[home]).get(name) is not obj:
            return reduced
        return _arrive, (home, name, make, arguments), *rest


def _arrive(home: str, name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    obj = make(*arguments)
    module = sys.modules.get(home) or sys.modules.setdefault(home, ModuleType(home))
    setattr(module, name, obj)
    return obj
