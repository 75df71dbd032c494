"""A JupyterLab server on a free port of this machine, with settings and folders of its own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat

_START = 120  # s; a few on a machine that has nothing else to do
_SETTINGS = {
    # the theme is the browser's wish, which each page has its own of
    "apputils-extension/themes": {"adaptive-theme": True},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # every cell is in the page, also one that has been scrolled out of sight
    "notebook-extension/tracker": {"windowingMode": "none"},
    "docmanager-extension/plugin": {"autosave": False},
}


class Lab:
    """A running server, started by this object, with its files under ``base``."""

    def __init__(self, base: Path) -> None:
        self._folder = base / "notebooks"
        self._token = secrets.token_hex(16)
        self._runtime = base / "runtime"
        for folder in (self._folder, self._runtime):
            folder.mkdir()
        for name, setting in _SETTINGS.items():
            path = base / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(setting))
        with open(base / "server.log", "wb") as log:
            self._process = subprocess.Popen(
                self._command(), env=_environment(base), stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._url = self._wait_for_url(base / "server.log")
        except BaseException:
            self.close()
            raise

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
            "--ServerApp.ip=127.0.0.1",
            "--ServerApp.port=0",
            f"--ServerApp.root_dir={self._folder}",
            f"--IdentityProvider.token={self._token}",
            "--LabApp.extension_manager=readonly",
        ]

    def _wait_for_url(self, log: Path) -> str:
        """The server says in a file of its own where it listens, once it does."""
        deadline = time.monotonic() + _START
        said = self._runtime / f"jpserver-{self._process.pid}.json"
        while time.monotonic() < deadline and self._process.poll() is None:
            if said.exists() and (text := said.read_text()).endswith("}"):
                return str(json.loads(text)["url"])
            time.sleep(0.05)
        raise RuntimeError(f"JupyterLab has not started: {log.read_text()[-2000:]}")

    def open(self, name: str, cells: list[str]) -> str:
        """Write a notebook of code cells and return the address of its page."""
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        )
        nbformat.write(notebook, self._folder / name)
        return f"{self._url}doc/tree/{name}?reset&token={self._token}"

    def end_kernels(self) -> None:
        """End all kernels, as a user's "Shut Down All" does."""
        for kernel in json.loads(self._ask("GET", "api/kernels")):
            self._ask("DELETE", f"api/kernels/{kernel['id']}")

    def _ask(self, method: str, path: str) -> bytes:
        headers = {"Authorization": f"token {self._token}"}
        request = urllib.request.Request(f"{self._url}{path}", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.read()

    def close(self) -> None:
        """End the server, which ends its kernels."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment(base: Path) -> dict[str, str]:
    """Nothing of the user's own is read or written."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    return {
        **kept,
        "HOME": str(base),
        "IPYTHONDIR": str(base / "ipython"),
        "JUPYTER_CONFIG_DIR": str(base / "config"),
        "JUPYTER_DATA_DIR": str(base / "data"),
        "JUPYTER_RUNTIME_DIR": str(base / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(base / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(base / "workspaces"),
    }
