"""How a cell calls each launcher: two CPU ranks, gloo, a function of the notebook where it can."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from faults import FUNCTIONS, ours  # type: ignore[import-not-found]
from kernels import Kernel  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parents[2]
CHAOS = ROOT / "tests" / "chaos"
_PATH = os.pathsep.join(map(str, (ROOT, CHAOS, ROOT / "benchmarks")))


class Name(str):
    """A variable of the notebook, as an argument."""

    def __repr__(self) -> str:
        return str(self)


def _given(args: tuple[object, ...]) -> str:
    return ", ".join(map(repr, args))


@dataclass
class Launcher:
    """One launcher, and the kernel in which it is tried; a new one after each failure."""

    name: str
    setup: str
    call: Callable[..., str]
    python: str = sys.executable
    module: str = "ipykernel_launcher"
    environment: dict[str, str] = field(default_factory=dict)
    kernel: Kernel | None = None

    def get(self) -> Kernel:
        if self.kernel is None:
            self.kernel = Kernel(
                self.python, self.module, quiet=True, PYTHONPATH=_PATH, **self.environment
            )
            self.kernel.check(f"{self.setup}\n{FUNCTIONS}")
        return self.kernel

    def discard(self) -> None:
        """End the kernel and whatever is left of it."""
        kernel, self.kernel = self.kernel, None
        if kernel is not None:
            kernel.close(now=True)


def known(peers: str | None) -> list[Launcher]:
    """Return ours and bare spawn, and the others if the interpreter that has them is named."""
    found = [
        Launcher("nvalchemi", "from nvalchemi.notebook import launch", ours),
        Launcher(
            "bare spawn",
            "from launching import spawned",
            lambda name, *args: f"spawned.run({_given((name, *args))})",
        ),
    ]
    if peers is None:
        return found
    return found + [
        Launcher(
            "accelerate",
            "from accelerate import notebook_launcher",
            lambda name, *args: f"notebook_launcher({name}, {args!r}, num_processes=2)",
            peers,
        ),
        Launcher(
            "Fabric",
            "from lightning.fabric import Fabric",
            lambda name, *args: (
                "Fabric(accelerator='cpu', devices=2, strategy='ddp_notebook')"
                f".launch(lambda fabric: {name}({_given(args)}))"
            ),
            peers,
        ),
        Launcher(
            "torchrunx",
            "import os, torchrunx\nmark = {k: v for k, v in os.environ.items() if 'CHAOS' in k}\n"
            "launcher = torchrunx.Launcher(['localhost'], 2, backend='gloo', extra_env_vars=mark)",
            lambda name, *args: f"launcher.run({_given((Name(name), *args))})",
            peers,
        ),
        Launcher(
            "jupyter-distributed",
            "",
            lambda name, *args: f"{name}({_given(args)})",
            peers,
            "jupyter_distributed.kernel",
            {"JUPYTER_DISTRIBUTED_WORLD_SIZE": "2"},
        ),
    ]
