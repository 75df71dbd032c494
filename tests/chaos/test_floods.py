"""Output by the million: the cell returns, its first and last lines are there, and all is kept."""

import re
from pathlib import Path

import trials

LINES = """
def flood():
    for number in range({lines}):
        print("line", number)
launch(flood, nprocs=2)
"""
STDERR = """
import os, sys
def flood():
    sys.stderr.write("x" * 1_000_000)
    sys.stderr.write("\\n")
    os.write(2, b"y" * 1_000_000 + b"\\n")
    return "through"
print(list(launch(flood, nprocs=2, timeout=60)))
"""


def test_a_million_lines_neither_freeze_nor_lose_the_last(kernels):
    lines = 1_000_000 if trials.is_full() else 100_000

    def trial(number: int) -> float:
        cell = kernels.get().check(LINES.format(lines=lines), timeout=300)
        assert re.search(r"^\[rank \d\] line 0\n", cell.plain, re.M)
        for rank in (0, 1):  # a traceback or a table stands in the last lines
            for last in range(lines - 20, lines):
                assert f"[rank {rank}] line {last}\n" in cell.plain
        shown = len(cell.plain.splitlines())
        assert shown < 20_000, f"{shown} lines are shown: a notebook freezes over them"
        logs = sorted(set(re.findall(r"/\S+/rank\d\.log\b", cell.plain)))
        kept = [Path(log).read_text().count("\n") for log in logs]
        assert kept == [lines, lines]
        return cell.seconds

    trials.run(f"{lines:,} lines printed by each rank", trial, short=1, share=0.05)


def test_a_megabyte_on_stderr_does_not_block(kernels):
    def trial(number: int) -> float:
        cell = kernels.get().check(STDERR)
        assert "['through', 'through']\n" in cell.plain
        return cell.seconds

    trials.run("2 MB on stderr, in two lines, from each rank", trial, short=1, share=0.05)
