"""Scripts of the tests, run by an interpreter of their own."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def run(folder: Path, code: str, **files: str) -> str:
    """Run code as a script beside modules of these names; return what it printed."""
    for name, content in files.items():
        (folder / f"{name}.py").write_text(content)
    script = folder / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
