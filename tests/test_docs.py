"""The code in the guides runs as it stands there."""

import re
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
