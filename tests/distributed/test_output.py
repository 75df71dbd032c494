"""Printed lines, on their way from a worker to its parent."""

import itertools
import os
import select
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.distributed.output import LineReader


def _lines_of(chunks: list[bytes], drawings: list[str] | None = None) -> list[str]:
    lines: list[str] = []
    out, into = os.pipe()
    reader = LineReader(out, lines.extend, ([] if drawings is None else drawings).append)
    for chunk in chunks:
        os.write(into, chunk)
        while reader.read():
            pass
    os.close(into)
    reader.close()
    return lines


PIECES = st.lists(
    st.sampled_from(["a", "é", "\r", "\n", "\r\n", "\x1b[A", " ", "\x1b["]), max_size=16
)


@settings(deadline=None)
@given(PIECES, st.lists(st.integers(0, 40), max_size=6))
def test_lines_do_not_depend_on_how_they_were_written(pieces, cuts):
    content = "".join(pieces).encode()
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    chunks = [content[i:j] for i, j in itertools.pairwise(edges) if i < j]
    in_bytes = [content[i : i + 1] for i in range(len(content))]
    assert _lines_of(chunks) == _lines_of(in_bytes) == _lines_of([content] if content else [])


@given(st.lists(st.text(alphabet="aé✓ ", max_size=6)))
def test_lines_without_redrawing_come_as_they_are(lines):
    content = "".join(f"{line}\n" for line in lines).encode()
    assert _lines_of([content] if content else []) == lines
    assert _lines_of([content.replace(b"\n", b"\r\n")] if content else []) == lines


def test_redrawn_lines_are_shown_once():
    drawings: list[str] = []
    chunks = [b"one\ntw", b"o\r\n", b"\r 1%\r", b" 50%", b"\r 75\xe2\x96", b"\r100%\n", b"tail"]
    assert _lines_of(chunks, drawings) == ["one", "two", "100%", "tail"]
    assert drawings == [" 1%", " 75"]  # half a character is not drawn
    assert _lines_of([b"\xff\n\n"]) == ["\ufffd", ""]
    assert _lines_of([b"\r 99%\r    \r", b"done\n"]) == ["done"]  # a bar that wipes itself
    assert _lines_of([b"\r 99%\r    \r"]) == []
    assert _lines_of([b"\r 99%"]) == [" 99%"]


TQDM = """
import sys
from tqdm import tqdm
for epoch in tqdm(range(2), desc="epochs", mininterval=0, ascii=True):
    for step in tqdm(range(50), desc="steps", leave=False, mininterval=0, ascii=True):
        pass
print("done", file=sys.stderr)
"""


def test_nested_bars_of_tqdm_print_one_line_per_state_that_lasts():
    pytest.importorskip("tqdm")
    done = subprocess.run([sys.executable, "-c", TQDM], stderr=subprocess.PIPE, check=True)
    assert done.stderr.count(b"\x1b[A") > 100
    drawings: list[str] = []
    lines = _lines_of([done.stderr[i : i + 100] for i in range(0, len(done.stderr), 100)], drawings)
    assert not [line for line in lines if line.startswith("steps")]
    assert lines[-2].startswith("epochs: 100%") and lines[-1] == "done"
    assert len(lines) < 10 and [text for text in drawings if text.startswith("steps:")]


def test_a_line_of_megabytes_is_joined_once():
    text = "xyé" * 1_000_000
    code = "print('xyé' * 1_000_000, end=''); print(); print('end')"
    process = subprocess.Popen([sys.executable, "-X", "utf8", "-c", code], stdout=subprocess.PIPE)
    lines: list[str] = []
    reader = LineReader(os.dup(process.stdout.fileno()), lines.extend, lines.append)
    while not reader.at_end:
        select.select([reader], [], [])
        reader.read()
    reader.close()
    reader.close()
    process.communicate()
    assert lines == [text, "end"]


def test_close_ends_though_something_writes_for_ever():
    process = subprocess.Popen(["yes", "still here"], stdout=subprocess.PIPE)
    lines: list[str] = []
    reader = LineReader(os.dup(process.stdout.fileno()), lines.extend, lines.append)
    select.select([reader], [], [])
    reader.close()
    process.kill()
    process.communicate()
    assert lines and set(lines[:-1]) == {"still here"} and reader.at_end
