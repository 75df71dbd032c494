"""Carry out Binder's steps in a fresh virtual environment and import what the notebooks need.

Run by ``make binder-check``. conda is not needed: torch and torchvision, which conda-forge gives on
Binder, come from pip here, at the versions of constraints.txt; then ``postBuild`` runs as it is.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP_NAMES = {"pytorch-cpu": "torch", "torchvision": "torchvision"}
PROBE = """
import torch, nvalchemi
from importlib.metadata import version
from nvalchemi import data, distributed
print("torch", torch.__version__, "| physicsnemo", version("nvidia-physicsnemo"))
"""


def conda_packages() -> list[str]:
    """Names that environment.yml asks conda for, without python and pip."""
    text = (ROOT / "binder" / "environment.yml").read_text()
    names = re.findall(r"^  - ([a-z][\w-]*)", text.split("dependencies:")[1], flags=re.M)
    return [name for name in names if name not in ("python", "pip")]


def main() -> int:
    """Build the environment under a temporary folder, which goes away again."""
    unknown = [name for name in conda_packages() if name not in PIP_NAMES]
    if unknown:
        print(f"binder/check.py does not know pip's name of {unknown}: add it to PIP_NAMES")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        environment = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}

        def step(title: str, *command: str) -> None:
            print(f"binder-check: {title}", flush=True)
            subprocess.run(command, cwd=ROOT, env=environment, check=True)

        pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt"]
        step("torch, as environment.yml asks", *pip, *(PIP_NAMES[n] for n in conda_packages()))
        before = installed_torch(python)
        step("binder/postBuild", "binder/postBuild")
        step("import", str(python), "-c", PROBE)
        if installed_torch(python) != before:
            print(f"postBuild replaced torch {before} by {installed_torch(python)}")
            return 1
    print("binder-check: passed")
    return 0


def installed_torch(python: Path) -> str:
    """Version of the torch in that environment."""
    code = "from importlib.metadata import version; print(version('torch'))"
    return subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
