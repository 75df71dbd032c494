"""What travels between a worker and its parent: printed lines, and objects by value."""

import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.distributed import payload
from nvalchemi.distributed.output import LineReader


def _lines_of(chunks: list[bytes]) -> list[str]:
    lines: list[str] = []
    out, into = os.pipe()
    reader = LineReader(out, lines.append)
    for chunk in chunks:
        os.write(into, chunk)
        while reader.read():
            pass
    os.close(into)
    reader.close()
    return lines


@given(st.lists(st.text(alphabet="aé\r\n", max_size=6), max_size=8))
def test_lines_do_not_depend_on_how_they_were_written(pieces):
    content = "".join(pieces).encode()
    in_bytes = [content[i : i + 1] for i in range(len(content))]
    assert _lines_of([p.encode() for p in pieces if p]) == _lines_of(in_bytes)


def test_redrawn_lines_are_shown_once():
    assert _lines_of([b"one\ntw", b"o\r\n", b"\r 1%\r", b" 50%", b"\r100%\n", b"tail"]) == [
        "one",
        "two",
        "100%",
        "tail",
    ]
    assert _lines_of([b"\xff\n\n"]) == ["\ufffd", ""]


def _there_and_back(obj: object) -> object:
    descriptor = payload.new_file()
    payload.dump(obj, descriptor)
    try:
        return payload.load(descriptor)
    finally:
        os.close(descriptor)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=3),
    st.sampled_from([torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool]),
)
def test_tensors_come_back_equal(shape, dtype):
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = _there_and_back([tensor, tensor.t() if tensor.dim() == 2 else tensor])
    assert torch.equal(back[0], tensor) and back[0].dtype == dtype
    assert back[1].stride() == (tensor.t() if tensor.dim() == 2 else tensor).stride()


def test_sharing_within_one_object_is_kept_and_between_readers_is_not():
    base = torch.arange(6.0)
    module = torch.nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    module.tied = module.weight
    descriptor = payload.new_file()
    payload.dump((base, base[2:4], module, np.arange(3)), descriptor)
    first, second = payload.load(descriptor), payload.load(descriptor)
    os.close(descriptor)
    first[0][2] = -1
    first[3][0] = 9
    assert first[1].tolist() == [-1, 3]  # a view stays a view
    assert second[0].tolist() == base.tolist() == [0, 1, 2, 3, 4, 5]
    assert second[3].tolist() == [0, 1, 2]
    assert type(first[2].weight) is torch.nn.Parameter and first[2].tied is first[2].weight
    assert first[2].weight.requires_grad and not first[2].bias.requires_grad
    assert torch.equal(first[2].weight, module.weight)


def test_unusual_tensors_travel_the_usual_way():
    marked = torch.ones(2)
    marked.note = "kept"
    complex_conjugate = torch.tensor([1 + 2j]).conj()
    sparse = torch.eye(3).to_sparse()
    back = _there_and_back([marked, complex_conjugate, sparse])
    assert back[0].note == "kept"
    assert back[1].tolist() == [1 - 2j]
    assert torch.equal(back[2].to_dense(), torch.eye(3))


def test_the_variable_that_cannot_travel_is_named():
    lock = threading.Lock()
    assert payload.find_unsendable(lambda: lock, (1, 2), {"good": 3}) == "'lock'"
    assert payload.find_unsendable(len, (1, lock), {}) == "argument 1"
    assert payload.find_unsendable(len, (), {"guard": lock}) == "argument 'guard'"
    assert payload.find_unsendable(len, (1,), {}) is None
    with pytest.raises(TypeError):
        _there_and_back(lock)
