"""``torch.distributed`` on a rank of ``launch``: started again and destroyed without a hang."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from nvalchemi.distributed.rendezvous import init_process_group, note_launcher

_destroy = dist.destroy_process_group
_kept: list[Any] = []  # groups whose destructors must not run before os._exit


@functools.wraps(_destroy)
def destroy_process_group(group: Any = None) -> None:
    """Destroy as torch does, but for the objects, whose destructors may hang or abort.

    Without these no pause as in ``settle`` is needed; os._exit frees what they hold.
    """
    _kept.append(group or dist.group.WORLD)
    _destroy(group)


def take_over() -> None:
    """Put these two in the place of torch's own, under each name that torch has for them."""
    note_launcher()  # this process may have been there before its launch was
    ours: tuple[Callable[..., None], ...] = (init_process_group, destroy_process_group)
    for module in [m for name, m in sys.modules.items() if name.startswith("torch.distributed")]:
        for function in ours:
            name = function.__name__
            if vars(module).get(name) is function.__wrapped__:  # type: ignore[attr-defined]
                setattr(module, name, function)
