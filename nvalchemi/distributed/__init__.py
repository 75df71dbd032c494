"""Ranks: starting them, finding one's place among them, agreeing between them.

Everything here is resolved on first use, so that ``import nvalchemi.distributed`` costs nothing
and loads neither torch nor PhysicsNeMo.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "DistributedManager": "manager",
    "PhysicsNeMoUninitializedDistributedManagerWarning": "manager",
    "BACKEND_VARIABLE": "environment",
    "collective_device": "collectives",
    "resolve_global_rank": "collectives",
    "resolve_world_size": "collectives",
    "agree": "collectives",
}

__all__ = [
    "DistributedManager",
    "PhysicsNeMoUninitializedDistributedManagerWarning",
    "BACKEND_VARIABLE",
    "agree",
    "collective_device",
    "resolve_global_rank",
    "resolve_world_size",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
