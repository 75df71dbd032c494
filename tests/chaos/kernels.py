"""A real Jupyter kernel as its front end sees it: cells, their output, stop, restart, kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from uuid import uuid4

import zmq
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import KernelManager
from traces import MARKER, end, marked


class _OnePython(KernelSpecManager):
    """Knows one kernel: a module of an interpreter."""

    python, module = sys.executable, "ipykernel_launcher"

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command = [self.python, "-m", self.module, "-f", "{connection_file}"]
        # a kernel that forwards interrupts to others takes them as messages
        mode = "signal" if self.module == "ipykernel_launcher" else "message"
        return KernelSpec(
            argv=command, display_name=kernel_name, language="python", interrupt_mode=mode
        )


@dataclass
class Cell:
    """What came of a cell; ``replied`` is the time of its reply, as of ``time.time``."""

    sent: float
    message: str
    status: str = ""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    text: str = ""
    result: str = ""
    messages: int = 0
    replied: float = 0.0
    idle: bool = False

    @property
    def plain(self) -> str:
        """The text without colours."""
        return re.sub(r"\x1b\[[\d;]*m", "", self.text)

    @property
    def seconds(self) -> float:
        return self.replied - self.sent


class Kernel:
    """A kernel whose processes carry a mark in their environment, which every child inherits."""

    def __init__(
        self,
        python: str = sys.executable,
        module: str = "ipykernel_launcher",
        quiet: bool = False,
        **environment: str,
    ) -> None:
        self.mark = uuid4().hex
        specs = _OnePython()
        specs.python, specs.module = python, module
        self.manager = KernelManager(kernel_spec_manager=specs, kernel_name="python3")
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment, MARKER: self.mark}
        # what a kernel prints while it is restarted or killed would bury the progress of the trials
        streams = {"stderr": subprocess.DEVNULL} if quiet else {}
        self.manager.start_kernel(env=self._environment, **streams)
        self._connect()

    def _connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=100)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid

    def send(self, code: str) -> Cell:
        return Cell(time.time(), self.client.execute(code))

    def wait(self, cell: Cell, timeout: float = 120) -> Cell:
        """Wait for the reply and for all output; TimeoutError if they do not come."""
        deadline = time.monotonic() + timeout
        while not (cell.status and cell.idle):
            if time.monotonic() > deadline:
                raise TimeoutError(f"a cell has run for {timeout:g} s; it said {cell.text[-500:]}")
            self.read(cell, 0.1)
        return cell

    def read(self, cell: Cell, seconds: float) -> None:
        """Take what has come of a cell, waiting for it up to ``seconds``."""
        channels = {c.socket: c for c in (self.client.shell_channel, self.client.iopub_channel)}
        poller = zmq.Poller()
        for socket in channels:
            poller.register(socket, zmq.POLLIN)
        for socket, _ in poller.poll(seconds * 1000):
            message = channels[socket].get_msg(timeout=1)
            if message["parent_header"].get("msg_id") == cell.message:
                _take(cell, message["msg_type"], message["content"])

    def run(self, code: str, timeout: float = 120) -> Cell:
        cell = self.wait(self.send(code), timeout)
        while cell.status == "aborted":  # what comes just after an error goes with the queue
            cell = self.wait(self.send(code), timeout)
        return cell

    def check(self, code: str, timeout: float = 120) -> Cell:
        """Run a cell that must not fail."""
        cell = self.run(code, timeout)
        assert cell.status == "ok", f"{code}\n{cell.ename}: {cell.evalue}\n{cell.text[-2000:]}"
        return cell

    def interrupt(self) -> None:
        """As the Stop button does: SIGINT to the kernel's process group."""
        self.manager.interrupt_kernel()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def restart(self) -> None:
        """As the button does: an interrupt, a request to end, and force if that does not help."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=False, env=self._environment)

    def connect_again(self) -> None:
        self._connect()

    def close(self, now: bool = False) -> list[int]:
        """End the kernel, as closing a notebook does, or by force if ``now``.

        Returns which of its processes outlived it by two seconds; they are killed.
        """
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=now)
        deadline = time.monotonic() + 2
        while (left := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        end(left)
        return left


def _take(cell: Cell, kind: str, content: dict) -> None:
    cell.messages += 1
    if kind == "execute_reply":
        cell.replied = time.time()
        cell.status = content["status"]
        cell.ename, cell.evalue = content.get("ename", ""), content.get("evalue", "")
        cell.traceback = "\n".join(content.get("traceback", []))
    elif kind == "stream":
        cell.text += content["text"]
    elif kind == "execute_result":
        cell.result += content["data"].get("text/plain", "")
    elif kind == "status" and content["execution_state"] == "idle":
        cell.idle = True
