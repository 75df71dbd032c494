"""What a cell shows of its ranks: real children, real pipes, terminals, kernels and full disks."""

import io
import os
import re
import select
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from nvalchemi.distributed.output import LineReader
from nvalchemi.notebook import show
from nvalchemi.notebook.show import RankOutput

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_logs(tmp_path, monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield


def _run(code: str, output: RankOutput, rank: int = 0) -> None:
    """Pass on what a child prints, as the parent of a rank does."""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    readers = []
    for name in ("stdout", "stderr"):
        readers.append(
            LineReader(
                os.dup(getattr(child, name).fileno()),
                lambda lines, name=name: output.lines(rank, name, lines),
                lambda text, name=name: output.redraw(rank, name, text),
            )
        )
    while living := [reader for reader in readers if not reader.at_end]:
        for reader in select.select(living, [], [], 0.1)[0]:
            reader.read()
        output.tick()
    for reader in readers:
        reader.close()
    child.communicate()


def test_lines_of_both_streams_are_shown_and_kept(capfd):
    output = RankOutput(2, "stream")
    _run("import sys; print('one'); sys.stderr.write('x' * 1_000_000 + '\\nlast')", output)
    output.lines(1, "stdout", ["two", ""])
    assert output.text(1) == "two\n\n" and output.last_lines() == ["last", ""]
    output.close()
    output.close()
    out, err = capfd.readouterr()
    assert out == "[rank 0] one\n[rank 1] two\n[rank 1] \n"
    log = output.logs[0]
    assert log.read_text() == output.text(0)
    assert sorted(log.read_text().split("\n"), key=len) == ["", "one", "last", "x" * 1_000_000]
    cut, last, end = err.split("\n")
    note = f" ... 990,000 characters are not shown here; all of them are in {log} ... "
    assert cut == f"[rank 0] {'x' * 5000}{note}{'x' * 5000}"
    assert (last, end) == ("[rank 0] last", "")


FLOOD = """
import sys
for i in range(1_000_000):
    sys.stdout.write(f"line {i}\\n")
print("the end")
"""


def test_a_million_lines_are_cut_and_none_is_lost(capfd):
    output = RankOutput(2, "stream")
    before = psutil.Process().memory_info().rss
    _run(FLOOD, output, rank=1)
    output.lines(0, "stdout", ["quiet"])
    assert psutil.Process().memory_info().rss - before < 50e6
    output.close()
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) < 2500 and "[rank 0] quiet" in lines
    assert lines[:1000] == [f"[rank 1] line {i}" for i in range(1000)]  # its half of 2000
    assert lines[-1] == "[rank 1] the end"
    assert lines[-2:-190:-1] == [f"[rank 1] line {999_999 - i}" for i in range(188)]
    shown = {line for line in lines if re.fullmatch(r"\[rank 1\] (line \d+|the end)", line)}
    note = f"[rank 1] ... {1_000_001 - len(shown):,} lines are not shown here; "
    (told,) = [line for line in lines if line.startswith(note)]
    assert told.startswith(f"{note}all of them are in {output.logs[1]}")
    assert output.logs[1].read_text() == "".join(f"line {i}\n" for i in range(10**6)) + "the end\n"


def test_slow_lines_after_a_flood_are_shown_by_tick(capfd):
    output = RankOutput(1, "stream")
    output.lines(0, "stdout", ["a"] * show._LIVE)
    assert capfd.readouterr().out == "[rank 0] a\n" * show._LIVE
    output.lines(0, "stdout", ["b"] * 1000)  # takes what the rate allows at once
    assert "only some of the next lines are shown; all are in" in capfd.readouterr().out
    output.lines(0, "stderr", ["epoch 1"])
    deadline = time.monotonic() + 30
    while "epoch 1" not in (err := capfd.readouterr().err) and time.monotonic() < deadline:
        output.tick()
        time.sleep(0.01)
    assert err == "[rank 0] epoch 1\n"
    output.close()
    told = capfd.readouterr()
    where = f"[rank 0] ... 801 lines are not shown here; all of them are in {output.logs[0]}"
    assert told.out.startswith(f"{where}; the last lines, in order:\n[rank 0] b\n")
    assert told.err == "[rank 0] epoch 1\n"  # behind the lines before it


@pytest.mark.parametrize(
    ("mode", "shown", "hidden"),
    [
        ("rank0", "[rank 0] a\n", "3 lines of rank 1 are in"),
        ("quiet", "", "4 lines of ranks 0, 1 are in"),
    ],
)
def test_hidden_ranks_are_counted(mode, shown, hidden, capfd):
    output = RankOutput(2, mode)
    output.lines(0, "stdout", ["a"])
    output.lines(1, "stderr", ["b", "c", "d"])
    output.redraw(1, "stderr", "50%")
    output.close()
    log = output.logs[1]
    assert capfd.readouterr() == (f"{shown}{hidden} {log if mode == 'rank0' else log.parent}\n", "")
    assert log.read_text() == "b\nc\nd\n"
    silent = RankOutput(2, mode)
    silent.close()
    assert capfd.readouterr() == ("", "")


def test_logs_are_private_and_old_ones_go(tmp_path, monkeypatch):
    first, second = RankOutput(2, "quiet"), RankOutput(1, "quiet")
    assert len(first.logs) == 2 and first.logs[0].parent != second.logs[0].parent
    for path in (first.logs[0].parent.parent, first.logs[0].parent, first.logs[1]):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    first.lines(0, "stdout", ["kept"])
    first.close()
    second.close()
    parent = first.logs[0].parent.parent
    dead = subprocess.Popen(["true"])
    dead.wait()
    ended = parent / f"20200101-000000-{dead.pid}-0"  # of a process that has ended
    foreign = parent / f"20200101-000000-{dead.pid}-1"
    running = parent / f"20200101-000000-{os.getpid()}-0"
    for folder, name in ((ended, "rank0.log"), (foreign, "thesis.txt"), (running, "rank0.log")):
        folder.mkdir()
        (folder / name).write_text("old")
        os.utime(folder / name, (0, 0))
        os.utime(folder, (0, 0))
    (parent / f"20200101-000000-{dead.pid}-2").symlink_to(tmp_path)
    RankOutput(1, "quiet").close()
    assert not ended.exists() and (running / "rank0.log").exists()
    assert (foreign / "thesis.txt").read_text() == "old"
    assert len(list(parent.glob("20200101*"))) == 3 and first.text(0) == "kept\n"


def test_a_folder_that_is_not_ours_is_not_used(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (output := RankOutput(1, "quiet")).close()
    parent = output.logs[0].parent.parent
    parent.rename(tmp_path / "before")
    parent.symlink_to(elsewhere)
    (output := RankOutput(1, "quiet")).close()
    assert not list(elsewhere.iterdir()) and output.logs[0].exists()
    assert stat.S_IMODE(output.logs[0].parent.parent.stat().st_mode) == 0o700


def test_no_place_for_logs_ends_no_training(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
        output = RankOutput(1, "stream")
    output.lines(0, "stdout", [str(i) for i in range(3000)])
    text = output.text(0)
    assert output.logs == () and "the last lines were:]\n2800\n" in text and "2999\n" in text
    output.close()
    out, err = capfd.readouterr()
    assert out.endswith("\n[rank 0] 2999\n") and "; not all of them are in a log" in out
    assert err.startswith("launch(): what the ranks print is in no log file: ")
    assert len(err.splitlines()) == 1


FULL = """
import resource
from nvalchemi.notebook.show import RankOutput
output = RankOutput(2, "stream")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for i in range(5):
    for rank in range(2):
        output.lines(rank, "stdout", [f"{i}" * 99 * (1 + 9 * rank)])
assert len(output.logs[1].read_text()) == 1000  # what still went in
assert output.text(1).endswith("4\\n")
assert "File too large" in output.text(1) and "File" not in output.text(0)
output.close()
"""


def test_a_full_disk_ends_no_training():
    command = [sys.executable, "-c", FULL]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 10
    assert done.stderr.startswith("launch(): the log of rank 1 is incomplete: ")
    assert len(done.stderr.splitlines()) == 1


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_colours_and_one_line_of_bars(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output = RankOutput(2, "stream")
    output.redraw(0, "stderr", "\x1b[32m 45%\x1b[0m|####")
    output.redraw(1, "stderr", "44%" + "#" * 100)
    assert terminal.getvalue() == "\r[rank 0] 45%|####"
    time.sleep(0.3)
    output.tick()
    row = f"\r[rank 0] 45%|#### | [rank 1] 44%{'#' * 16}"
    assert terminal.getvalue().endswith(row)
    assert output.last_lines() == ["45%|####", "44%" + "#" * 100]
    output.lines(0, "stdout", ["a line"])
    wiped = f"\r{' ' * (len(row) - 1)}\r"
    assert terminal.getvalue().endswith(f"{row}{wiped}\x1b[38;5;32m[rank 0]\x1b[0m a line\n")
    time.sleep(0.3)
    output.tick()
    assert terminal.getvalue().endswith(f"a line\n{row}")
    assert output.last_lines()[0] == "45%|#### | a line"
    output.close()
    assert terminal.getvalue().endswith(f"{row}{wiped}")
    monkeypatch.setenv("NO_COLOR", "1")
    output = RankOutput(1, "stream", live=False)
    output.redraw(0, "stderr", "45%")
    output.lines(0, "stdout", ["b"])
    output.close()
    assert terminal.getvalue().endswith(f"{wiped}[rank 0] b\n")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("\x1b[31mred\x1b[0m and plain", "\x1b[31mred\x1b[0m and plain"),
        ("\x1b[31mred", "\x1b[31mred\x1b[0m"),
        ("\x1b[38;2;1;2;3m\x1b[4:3mmuch\x1b[39m", "\x1b[38;2;1;2;3m\x1b[4:3mmuch\x1b[39m\x1b[0m"),
        ("\x1b[1mbold\x1b(B\x1b[m", "\x1b[1mbold\x1b[m"),  # tput sgr0
        ("\x1b[2J\x1b[Hcleared", "cleared"),
        ("\x9b2Jcleared\x85next\x84", "clearednext"),
        ("up\x1b[3A\x1b[10;5Hthere\x1b[K\x1b[?25l", "upthere"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\ end", "link end"),
        ("\x1bPq#0~\x1b\\sixel", "sixel"),
        ("\x1b]0;without an end", "]0;without an end"),
        ("\x1bcreset \x1b7saved\x1b8 \x1b#8", "reset saved "),
        ("\x1b[>4;1mkeys\x1b[!p", "keys"),
        ("\x08\x08bs\x07bell\x0bvt\x0cff\x00\x7f", "bsbellvtff"),
        ("a\ttable\u2028 µÅ✓", "a\ttable\u2028 µÅ✓"),
        ("cut \x1b[3", "cut [3"),
        ("cut \x1b", "cut "),
    ],
)
def test_a_line_keeps_its_colours_and_changes_nothing_around_it(capfd, line, shown):
    output = RankOutput(1, "stream")
    output.lines(0, "stdout", [line])
    output.redraw(0, "stdout", line)
    bar = output.last_lines()[0].partition(" | ")[0]
    assert "\x1b" not in bar and "\x07" not in bar and "\x9b" not in bar
    output.close()
    assert capfd.readouterr().out == f"[rank 0] {shown}\n"
    assert output.text(0) == f"{line}\n"  # the log has what was printed


def test_files_and_pipes_get_neither_colours_nor_bars(capfd):
    output = RankOutput(1, "stream")
    _run("import sys; sys.stderr.write('\\r10%\\r50%'); print(end='\\r100%\\n')", output)
    output.close()
    assert capfd.readouterr() == ("[rank 0] 100%\n", "[rank 0] 50%\n")


CELL = """
import re, sys, time
from nvalchemi.notebook.show import RankOutput
output = RankOutput(2, "stream")
output.lines(0, "stdout", ["first"])
output.lines(1, "stderr", ["second"])
output.lines(0, "stdout", ["third"])
until = time.monotonic() + 3
while time.monotonic() < until:
    output.redraw(0, "stderr", f"{until - time.monotonic():.3f} s")
    time.sleep(0.001)
output.lines(0, "stderr", ["0 s"])
output.close()
"""


def test_a_kernel_shows_colours_in_order_and_few_drawings():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(notebook, timeout=100).execute()
    outputs = notebook.cells[0].outputs
    text = "".join(output.text for output in outputs)
    assert text.startswith(
        "\x1b[38;5;32m[rank 0]\x1b[0m first\n"
        "\x1b[38;5;166m[rank 1]\x1b[0m second\n"
        "\x1b[38;5;32m[rank 0]\x1b[0m third\n"
    )
    assert 3 <= text.count("\r[rank 0] ") <= 13
    # as a front end shows it: the last drawing is wiped before the line
    last = text.split("\n")[-2].split("\r")
    assert last[-2].strip() == "" and last[-1] == "\x1b[38;5;32m[rank 0]\x1b[0m 0 s"


def test_a_stream_that_is_not_utf8_gets_escapes(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output = RankOutput(1, "stream")
    output.lines(0, "stdout", ["loss ✓", "5 Å"])
    output.close()
    assert raw.getvalue() == b"[rank 0] loss \\u2713\n[rank 0] 5 \\xc5\n"
    assert output.text(0) == "loss ✓\n5 Å\n"
