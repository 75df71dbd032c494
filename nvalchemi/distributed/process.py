"""A spawned process: that of ``torch.multiprocessing``'s spawn context, with differences.

The standard way runs the caller's main module again in each child, which repeats an unguarded
script for ever, and it leaves a tracker process in the caller. Neither happens here, and a child
has variables of its own. Children import this module before they watch their parent: no torch here.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import popen_spawn_posix, reduction, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess, set_spawning_popen
from typing import Any


@dataclass(frozen=True)
class Ends:
    """What a worker holds of its parent; between ``control`` and ``folder`` file descriptors.

    In the worker each descriptor arrives as an object that gives it by ``detach()``.
    """

    control: Connection
    result: Any
    stdout: Any
    stderr: Any
    stacks: Any
    folder: str
    """For what multiprocessing puts into files: removed by whoever outlives the other."""

    def __reduce__(self) -> tuple[Any, ...]:
        descriptors = (self.result, self.stdout, self.stderr, self.stacks)
        return Ends, (self.control, *map(reduction.DupFd, descriptors), self.folder)


@dataclass(frozen=True)
class Task:
    """Where a worker runs what it is given: its parent's place at that moment.

    The descriptor of the payload follows it on the control pipe. A variable that is None is to be
    removed.
    """

    environment: dict[str, str | None]
    directory: str = field(default_factory=os.getcwd)
    path: list[str] = field(default_factory=lambda: list(sys.path))
    argv: list[str] = field(default_factory=lambda: list(sys.argv))
    serves: bool = False
    """Whether it stays for further requests, instead of calling one function."""


class _Popen(popen_spawn_posix.Popen):
    _fds: list[int]

    def _launch(self, process: Any) -> None:
        message = self._message(process)
        for_child, to_child = os.pipe()
        # open as long as this object: its closing tells the child that the parent is gone
        self.finalizer = util.Finalize(self, os.close, [to_child])
        try:
            command = spawn.get_command_line(pipe_handle=for_child)
            # the interpreter itself reads some variables (PYTHONHASHSEED, LD_PRELOAD) as it starts
            self._child = subprocess.Popen(
                [os.fsencode(spawn.get_executable()), *command[1:]],
                env={**os.environ, **process.environment},
                pass_fds=[*self._fds, for_child],
            )
            self.pid = self._child.pid
        finally:
            os.close(for_child)
        self.sentinel = to_child
        with suppress(BrokenPipeError), open(to_child, "wb", closefd=False) as pipe:
            pipe.write(message)  # to one that could not even start: its exit code tells

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            self.returncode = self._child.poll() if flag == os.WNOHANG else self._child.wait()
        return self.returncode

    def _message(self, process: Any) -> bytes:
        """Return what the child reads first: how to prepare (no main module), and the process."""
        preparation = {
            "name": process.name,
            "authkey": process.authkey,
            "sys_path": sys.path.copy(),
            "sys_argv": sys.argv.copy(),
            "dir": os.getcwd(),
        }
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, message)
            reduction.dump(process, message)
        finally:
            set_spawning_popen(None)
        return message.getvalue()


class WorkerProcess(SpawnProcess):
    """A spawn process that neither imports the caller's main module nor needs a tracker."""

    _Popen = staticmethod(_Popen)

    def __init__(self, environment: dict[str, str], **options: Any) -> None:
        super().__init__(**options)
        self.environment = environment  # over this process's own
