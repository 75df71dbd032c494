"""The code in the guides runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize("name", ["sampling.md"])
def test_the_code_of_a_guide_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.S)
    names: dict[str, object] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, name, "exec"), names)
    assert len(blocks) > 1
    printed = capsys.readouterr().out
    assert "1000 of 1000 samples seen" in printed
    assert "320 samples seen, 0 of them again, 0 never" in printed


def test_the_code_of_the_monitoring_guide_runs_as_a_script(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "monitoring.md").read_text(), re.S)
    script = tmp_path / "guide.py"
    script.write_text("\n".join(blocks))
    command = [sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert len(blocks) > 3 and done.returncode == 0, done.stderr
    assert "✔ launch of 2 ranks: done" in done.stdout and "done at step 16 of 16" in done.stdout
    assert (tmp_path / "first.png").stat().st_size and (tmp_path / "parity.png").stat().st_size


def test_the_code_of_the_launching_guide_runs_as_a_script(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "launching.md").read_text(), re.S)
    script = tmp_path / "guide.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200)
    assert len(blocks) > 2 and done.returncode == 0, done.stderr
    assert "[rank 0] hello ranks\n" in done.stdout and "[rank 1] hello ranks\n" in done.stdout
