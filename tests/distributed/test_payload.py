"""Objects by value: data of every kind arrives equal, once, and out of reach of others."""

import dataclasses
import fcntl
import functools
import gc
import os
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvalchemi.data import AtomicData, Batch
from nvalchemi.distributed import payload


def back(obj, readers=1):
    """What readers find of what was written, and whether it lies outside the pickle."""
    descriptor = payload.new_file()
    payload.dump_result(obj, descriptor)
    try:
        found = [payload.load(descriptor) for _ in range(readers)]
    finally:
        os.close(descriptor)
    return found[0] if readers == 1 else found


def stream_length(obj):
    descriptor = payload.new_file()
    payload.dump_result(obj, descriptor)
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    os.close(descriptor)
    return length


@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=3),
    st.sampled_from([torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool]),
)
def test_tensors_come_back_equal(shape, dtype):
    tensor = torch.randint(0, 2, shape).to(dtype)
    turned = tensor.t() if tensor.dim() == 2 else tensor
    first, second = back([tensor, turned])
    assert torch.equal(first, tensor) and first.dtype == dtype
    assert torch.equal(second, turned) and second.stride() == turned.stride()


@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=3),
    st.sampled_from(["f8", ">f4", "f2", "i4", "?", "c8", "M8[D]", "U3", "V0", "f4,i8"]),
    st.sampled_from(["C", "F", "steps"]),
)
def test_arrays_come_back_equal(shape, dtype, order):
    array = np.zeros(shape, dtype, order="F" if order == "F" else "C")
    if order == "steps" and shape:
        array = array[::-2]
    found = back(array)
    assert found.dtype == array.dtype and found.shape == array.shape
    assert found.tobytes() == array.tobytes() and type(found) is np.ndarray


def test_sharing_within_one_object_is_kept_and_between_readers_is_not():
    base = torch.arange(6.0)
    module = torch.nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    module.tied = module.weight
    objects = (base, base[2:4], module, np.arange(3), base.untyped_storage())
    first, second = back(objects, readers=2)
    first[0][2] = -1
    first[3][0] = 9
    assert first[1].tolist() == [-1, 3]  # a view stays a view
    assert first[4].data_ptr() == first[0].data_ptr()
    assert second[0].tolist() == base.tolist() == [0, 1, 2, 3, 4, 5]
    assert second[3].tolist() == [0, 1, 2]
    assert type(first[2].weight) is torch.nn.Parameter and first[2].tied is first[2].weight
    assert first[2].weight.requires_grad and not first[2].bias.requires_grad
    assert torch.equal(first[2].weight, module.weight)


class Celsius(torch.Tensor):
    pass


class Own(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_unusual_tensors_are_what_they_were():
    marked = torch.ones(2)
    marked.note = marked[:1]
    conjugate = torch.tensor([1 + 2j]).conj()
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    parameter = torch.nn.Parameter(torch.ones(2))
    (parameter * 3).sum().backward()
    objects = (marked, conjugate, quantized, parameter, torch.ones(2, device="meta"))
    found = back(objects)
    found[0][0] = 5
    assert found[0].note.tolist() == [5]
    assert found[1].tolist() == [1 - 2j]
    assert torch.equal(found[2].dequantize(), quantized.dequantize())
    assert found[3].grad.tolist() == [3, 3] and found[3].is_leaf
    assert found[4].device.type == "meta" and found[4].shape == (2,)
    for tensor in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        assert torch.equal(back(tensor).to_dense(), tensor.to_dense())
        assert back(tensor).layout == tensor.layout
    for kind in (Celsius, Own):
        assert type(back(torch.ones(2).as_subclass(kind))) is kind
    assert back(torch.nn.Buffer(torch.ones(1)))._is_buffer


def test_what_autograd_computed_comes_as_its_value():
    weight = torch.ones(2, requires_grad=True)
    loss = back((weight * 2).sum())
    assert loss.item() == 4 and not loss.requires_grad  # its graph stays where it is


def test_large_data_of_every_kind_stays_out_of_the_pickle():
    flat = torch.zeros(1000, 1000)
    attributes = flat.clone()
    attributes.note = 1
    structured = np.zeros(100_000, [("a", "f4"), ("b", "i8")])
    many = [
        *(flat, flat.t(), flat[::2], flat.to(torch.bfloat16), attributes, flat.to_sparse()),
        torch.zeros(1000, 1000, dtype=torch.complex64).conj(),
        *(structured, np.zeros((1000, 1000))[:, ::2], np.zeros(100_000, "M8[s]")),
        memoryview(bytes(1_000_000)),
        torch.nn.Linear(1000, 1000),
        torch.ones(1000, 1000).as_subclass(Celsius),
    ]
    assert stream_length(many) < 10_000


def test_views_of_memory_stay_views():
    array = np.arange(6, dtype="i4").reshape(2, 3)
    for view in (memoryview(array), memoryview(b"abc"), memoryview(b""), memoryview(b"abcd")[::2]):
        found = back(view)
        assert type(found) is memoryview and found.tolist() == view.tolist()
    assert back(memoryview(b"a")).readonly and not back(memoryview(array)).readonly


def test_mapped_files_are_mapped_again(tmp_path):
    mapped = np.memmap(tmp_path / "rows", "f4", "w+", shape=(1000, 10))
    mapped[:] = np.arange(10_000).reshape(1000, 10)
    for part in (mapped, mapped[3:5], mapped[::-1], mapped[:, 2:4], mapped[7, 3:4], mapped.T):
        found = back(part)
        assert type(found) is np.memmap and np.array_equal(found, part)
    back(mapped)[0, 0] = 77
    assert mapped[0, 0] == 77  # it is the file, as it is here
    later = np.memmap(tmp_path / "rows", "f4", "r", offset=20_000, shape=(10,))
    assert np.array_equal(back(later), later) and not back(later).flags.writeable
    private = np.memmap(tmp_path / "rows", "f4", "c")
    private[5] = -1
    assert back(private)[5] == -1 and mapped[0, 5] == 5
    os.remove(tmp_path / "rows")
    assert np.array_equal(back(later), later)
    assert stream_length(mapped) < 500


def test_structures_and_batches_of_ours_come_back():
    data = [
        AtomicData(atomic_numbers=torch.tensor([6, 8]), positions=torch.randn(2, 3)),
        AtomicData(atomic_numbers=torch.tensor([1]), positions=torch.randn(1, 3)),
    ]
    batch = Batch.from_data_list(data)
    one, many = back((data[0], batch))
    assert torch.equal(one.positions, data[0].positions)
    assert torch.equal(many.positions, batch.positions) and many.num_graphs == 2
    assert torch.equal(many.batch_idx, batch.batch_idx)


@functools.lru_cache(maxsize=3)
def remembered(x):
    return x + 1


def test_a_remembering_function_of_a_cell_goes_as_functions_do():
    @functools.lru_cache(maxsize=2)
    def local(x):
        return x * 2

    assert back(remembered) is remembered  # an import finds it
    assert back(local)(3) == 6 and back(local).cache_parameters()["maxsize"] == 2


@functools.singledispatch
def shown(x):
    return "object"


@shown.register
def _(x: int):
    return "int"


def test_a_function_of_many_types_goes_by_value():
    shown.__module__ = "__main__"
    try:
        found = back(shown)
    finally:
        shown.__module__ = __name__
    assert found(1) == "int" and found("") == "object" and found is not shown


def test_collecting_garbage_goes_on_afterwards():
    assert gc.isenabled()
    back([1])
    with pytest.raises(TypeError):
        payload.dump_result(threading.Lock(), payload.new_file())
    assert gc.isenabled()


@dataclasses.dataclass
class Story:
    parts: dict


def test_a_value_that_cannot_be_sent_back_is_named():
    loader = torch.utils.data.DataLoader([1, 2])
    value = {"loss": 1.0, "story": [Story({"loader": (x for x in loader)})]}
    with pytest.raises(TypeError, match="^result") as caught:
        payload.dump_result(value, payload.new_file())
    assert str(caught.value) == (
        "result['story'][0].parts['loader'] is a generator, which cannot be sent back; return a "
        "list of what it yields"
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_come_back_on_the_cpu():
    base = torch.arange(6.0, device="cuda")
    model = torch.nn.Linear(2, 2).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(base.view(3, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    sparse, story = torch.eye(3, device="cuda").to_sparse(), Story({"x": [base]})
    found = back((base, base[2:4], model, state, sparse, story))
    found[0][2] = -1
    assert found[1].tolist() == [-1, 3] and found[5].parts["x"][0] is found[0]
    assert {p.device.type for p in found[2].parameters()} == {"cpu"}
    assert found[2].weight.grad.device.type == "cpu"
    assert found[3]["state"][0]["exp_avg"].device.type == "cpu"
    assert torch.equal(found[4].to_dense(), torch.eye(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_are_not_sent_to_ranks():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).cuda())
    with pytest.raises(TypeError, match=r"argument 0\[0\]\.weight is a tensor on cuda:0"):
        payload.dump_task(len, (model,), {}, {}, payload.new_file())
    with pytest.raises(TypeError, match=r"^noise is a random number generator on cuda:0"):
        noise = torch.Generator("cuda")
        payload.dump_task(lambda: noise, (), {}, {}, payload.new_file())


OTHER_USER = """
import os, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    os.open(sys.argv[1], os.O_RDONLY)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_nobody_changes_or_opens_what_was_written():
    descriptor = payload.new_file()
    payload.dump_result(torch.ones(4), descriptor)
    assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
    with pytest.raises(PermissionError):
        os.write(descriptor, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    payload.load(descriptor).fill_(2)  # a reader has pages of its own
    assert payload.load(descriptor).tolist() == [1, 1, 1, 1]
    if os.geteuid() == 0:
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        done = subprocess.run(
            [sys.executable, "-c", OTHER_USER, path], capture_output=True, text=True
        )
        assert done.stdout == "PermissionError\n", done.stderr
    os.close(descriptor)


def test_without_such_memory_it_is_a_file_without_a_name(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    descriptor = payload.new_file()
    status = os.fstat(descriptor)
    assert status.st_nlink == 0 and stat.S_IMODE(status.st_mode) == 0o600
    assert not os.listdir(tmp_path)
    payload.dump_result({"x": torch.arange(3)}, descriptor)
    assert payload.load(descriptor)["x"].tolist() == [0, 1, 2]
    os.close(descriptor)
