"""The browser of these tests: found, or as a script installed where that needs no question."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

# Playwright's own browsers are not used: a distribution's is smaller and gets its updates
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_INSTALL = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"]
REQUIRED = os.environ.get("NVALCHEMI_BROWSER") == "required"
"""Whether tests without a browser fail instead of being skipped."""


def find() -> str | None:
    """Return the program, or None."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def missing() -> str | None:
    """Say in a sentence what the tests lack, or return None."""
    for package in ("playwright", "jupyterlab"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: make test does that"
    if find() is None:
        return "no browser is on the PATH: install Chromium (Debian: apt-get install chromium)"
    return None


def install() -> str | None:
    """Install Debian's Chromium if there is no browser; return a sentence if that cannot be."""
    if find() is not None:
        return None
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if not all(map(shutil.which, [*prefix[:1], "apt-get"])):
        return missing()
    if prefix and subprocess.run([*prefix, "true"], stderr=subprocess.DEVNULL).returncode:
        return missing()  # sudo would ask for a password
    print("Installing Chromium for the browser tests (half a minute)", flush=True)
    quiet = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    subprocess.run([*prefix, "apt-get", "update", "-qq"], **quiet)
    done = subprocess.run([*prefix, *_INSTALL], **quiet)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return missing()
    return None


if __name__ == "__main__":
    problem = install()
    if problem is not None:
        print(f"The browser tests will {'fail' if REQUIRED else 'be skipped'}: {problem}")
    sys.exit(problem is not None and REQUIRED)
