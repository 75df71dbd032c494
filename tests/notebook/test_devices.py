"""lay_out(): what each rank runs on, for any number of GPUs. The GPUs' number is torch's answer."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvalchemi.notebook.devices import PER_LAUNCH, lay_out
from nvalchemi.notebook.threads import _quota, cores

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in (*PER_LAUNCH, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(monkeypatch):
    """Return a function that gives this process so many GPUs, and nccl as CUDA builds have it."""

    def build(gpus: int, nccl: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)

    return build


@pytest.mark.parametrize(
    "gpus, given, devices, backend",
    [
        # nothing said: one rank per GPU, two where there is none
        (0, {}, ["cpu"] * 2, "gloo"),
        (1, {}, ["cuda:0"], "nccl"),
        (2, {}, ["cuda:0", "cuda:1"], "nccl"),
        (8, {}, [f"cuda:{n}" for n in range(8)], "nccl"),
        (0, {"nprocs": 5}, ["cpu"] * 5, "gloo"),
        (8, {"nprocs": 3}, ["cuda:0", "cuda:1", "cuda:2"], "nccl"),
        (8, {"nprocs": np.int64(1)}, ["cuda:0"], "nccl"),
        # the CPU, though there are GPUs
        (2, {"devices": "cpu"}, ["cpu"] * 2, "gloo"),
        (8, {"devices": "cpu"}, ["cpu"] * 2, "gloo"),
        (2, {"devices": "cpu", "nprocs": 4}, ["cpu"] * 4, "gloo"),
        (2, {"devices": "cpu:0", "nprocs": 4}, ["cpu"] * 4, "gloo"),
        (2, {"devices": torch.device("cpu"), "nprocs": 4}, ["cpu"] * 4, "gloo"),
        (2, {"devices": torch.device("cpu:0"), "nprocs": 4}, ["cpu"] * 4, "gloo"),
        (2, {"devices": ["cpu", torch.device("cpu"), "cpu:0"]}, ["cpu"] * 3, "gloo"),
        (0, {"devices": "cpu", "backend": "gloo"}, ["cpu"] * 2, "gloo"),
        (8, {"backend": "gloo"}, ["cpu"] * 2, "gloo"),
        (1, {"backend": "gloo", "nprocs": 4}, ["cpu"] * 4, "gloo"),
        # GPUs
        (2, {"devices": "cuda"}, ["cuda:0", "cuda:1"], "nccl"),
        (8, {"devices": torch.device("cuda"), "nprocs": 2}, ["cuda:0", "cuda:1"], "nccl"),
        (2, {"devices": "cuda", "backend": "gloo"}, ["cuda:0", "cuda:1"], "gloo"),
        (2, {"backend": "nccl"}, ["cuda:0", "cuda:1"], "nccl"),
        (2, {"devices": 1}, ["cuda:1"], "nccl"),
        (2, {"devices": 0, "nprocs": 1}, ["cuda:0"], "nccl"),
        (2, {"devices": "cuda:1"}, ["cuda:1"], "nccl"),
        (2, {"devices": torch.device("cuda:1")}, ["cuda:1"], "nccl"),
        (8, {"devices": [5, 2]}, ["cuda:5", "cuda:2"], "nccl"),
        (8, {"devices": (5, "cuda:2", torch.device("cuda:7"))}, ["cuda:5", "cuda:2", "cuda:7"], ""),
        (8, {"devices": range(4, 8), "nprocs": 4}, ["cuda:4", "cuda:5", "cuda:6", "cuda:7"], ""),
        (8, {"devices": np.array([3, 1])}, ["cuda:3", "cuda:1"], "nccl"),
        # shared on request
        (1, {"devices": [0, 0], "backend": "gloo"}, ["cuda:0", "cuda:0"], "gloo"),
        (2, {"devices": [0, 1, 0], "backend": "gloo"}, ["cuda:0", "cuda:1", "cuda:0"], "gloo"),
    ],
)
def test_which_device_each_rank_gets(machine, gpus, given, devices, backend):
    machine(gpus)
    layout = lay_out(**given)
    assert layout.devices == tuple(devices)
    assert layout.nprocs == len(devices)
    assert layout.backend == (backend or "nccl")


def test_a_torch_without_nccl_speaks_gloo_on_gpus(machine):
    machine(2, nccl=False)
    assert lay_out().backend == "gloo" and lay_out().devices == ("cuda:0", "cuda:1")
    with pytest.raises(ValueError, match="'nccl' is not in this build of torch; use backend='gloo"):
        lay_out(backend="nccl")


@pytest.mark.parametrize(
    "gpus, given, kind, sentence",
    [
        (0, {"nprocs": 0}, ValueError, "nprocs must be at least 1: 0"),
        (0, {"nprocs": -2}, ValueError, "nprocs must be at least 1: -2"),
        (0, {"nprocs": "2"}, TypeError, "nprocs must be an integer or None: '2'"),
        (0, {"nprocs": 2.5}, TypeError, "nprocs must be an integer or None: 2.5"),
        (0, {"nprocs": True}, TypeError, "nprocs must be an integer or None: True"),
        (0, {"backend": "mpi"}, ValueError, "backend must be 'gloo', 'nccl' or None: 'mpi'"),
        (0, {"backend": ""}, ValueError, "backend must be 'gloo', 'nccl' or None: ''"),
        (0, {"backend": 3}, TypeError, "backend must be 'gloo', 'nccl' or None: 3"),
        (0, {"backend": "nccl"}, ValueError, "backend 'nccl' needs one GPU per rank: 0 GPUs found"),
        (2, {"backend": "nccl", "devices": "cpu"}, ValueError, "devices are 'cpu'; leave backend"),
        (0, {"devices": "cuda"}, ValueError, "devices='cuda' needs one GPU per rank: 0 GPUs found"),
        # more ranks than GPUs, with the three remedies
        (1, {"nprocs": 2}, ValueError, "2 ranks, 1 GPU found; use nprocs=1 or fewer"),
        (1, {"nprocs": 2}, ValueError, "train on the CPU with devices='cpu'"),
        (1, {"nprocs": 2}, ValueError, "devices=[0, 0], backend='gloo'"),
        (2, {"nprocs": 3, "backend": "nccl"}, ValueError, "devices=[0, 1, 0], backend='gloo'"),
        (2, {"nprocs": 3, "devices": "cuda"}, ValueError, "each rank needs a GPU of its own: 3"),
        (8, {"nprocs": 99}, ValueError, "devices=[rank % 8 for rank in range(99)]"),
        # unknown and contradicting devices
        (0, {"devices": 0}, ValueError, "must be GPUs that this process sees: [0], 0 GPUs found"),
        (2, {"devices": [0, 2]}, ValueError, "[2], 2 GPUs found; use numbers from 0 to 1"),
        (2, {"devices": [0, 1, 2]}, ValueError, "[2], 2 GPUs found"),
        (2, {"devices": 2}, ValueError, "numbers from 0 to 1; for 2 ranks use nprocs=2"),
        (2, {"devices": "cuda:7"}, ValueError, "[7], 2 GPUs found"),
        (2, {"devices": -1}, ValueError, "devices must be 'cpu', 'cuda', or one CUDA device"),
        (2, {"devices": [0, "cpu"]}, ValueError, "all be 'cpu' or all be GPUs: [0, 'cpu']"),
        (2, {"devices": []}, ValueError, "devices must name a device for each rank: it is empty"),
        (2, {"devices": ["cuda"]}, ValueError, "which GPU each rank gets: 'cuda'; write 'cuda:0'"),
        (2, {"devices": "gpu"}, ValueError, "as in [0, 1] or ['cuda:0', 'cuda:1']: 'gpu'"),
        (2, {"devices": "0,1"}, ValueError, ": '0,1'"),
        (2, {"devices": "cuda:x"}, ValueError, ": 'cuda:x'"),
        (2, {"devices": torch.device("meta")}, ValueError, ": 'meta'"),
        (2, {"devices": True}, TypeError, ": True"),
        (2, {"devices": 1.0}, TypeError, ": 1.0"),
        (2, {"devices": [0, None]}, TypeError, ": None"),
        (2, {"devices": [False, True]}, TypeError, ": False"),
        (2, {"devices": {0, 1}}, TypeError, ": {0, 1}"),
        (2, {"devices": {0: 1}}, TypeError, ": {0: 1}"),
        (2, {"devices": b"cuda"}, TypeError, ": b'cuda'"),
        (2, {"devices": [[0, 1]]}, TypeError, ": [0, 1]"),
        (2, {"devices": 0, "nprocs": 2}, ValueError, "1 named, nprocs 2; use nprocs=1, or name 2"),
        (2, {"devices": [0, 1], "nprocs": 1}, ValueError, "2 named, nprocs 1; use nprocs=2"),
        (
            2,
            {"devices": [0, 0]},
            ValueError,
            "nccl needs a different GPU for each rank: devi",
        ),
        (2, {"devices": [0, 0], "backend": "nccl"}, ValueError, "share them with backend='gloo'"),
        # threads
        (0, {"threads": 0}, ValueError, "threads must be at least 1: 0"),
        (0, {"threads": -1}, ValueError, "threads must be at least 1: -1"),
        (0, {"threads": True}, TypeError, "threads must be an integer or None: True"),
        (0, {"threads": "4"}, TypeError, "threads must be an integer or None: '4'"),
        (0, {"threads": 1.5}, TypeError, "threads must be an integer or None: 1.5"),
        (0, {"threads": 2, "env": {"OMP_NUM_THREADS": "2"}}, ValueError, "must not both set the"),
        (0, {"env": {"OMP_NUM_THREADS": "many"}}, ValueError, "positive integer: 'many' in env"),
        (0, {"env": {"OMP_NUM_THREADS": "٣"}}, ValueError, "positive integer: '٣' in env"),
        (0, {"env": {"OMP_NUM_THREADS": "0"}}, ValueError, "positive integer: '0' in env"),
        (0, {"env": {"OMP_NUM_THREADS": ""}}, ValueError, "positive integer: '' in env"),
        # env
        (0, {"env": [("A", "1")]}, TypeError, "env must be a mapping of names to strings or None"),
        (0, {"env": {"A": 1}}, TypeError, "env must map names to strings: 'A': 1"),
        (0, {"env": {"A": None}}, TypeError, "env must map names to strings: 'A': None"),
        (0, {"env": {1: "A"}}, TypeError, "env must map names to strings: 1: 'A'"),
        (0, {"env": {"A=B": "1"}}, ValueError, "env must hold names without '='"),
        (0, {"env": {"": "1"}}, ValueError, "env must hold names"),
        (0, {"env": {"A": "\0"}}, ValueError, "no null character"),
        (0, {"env": {"A": "\ud800"}}, ValueError, "text that utf-8 can encode: 'A': '\\ud800'"),
        (0, {"env": {"\ud800": "1"}}, ValueError, "text that utf-8 can encode: '\\ud800': '1'"),
        (0, {"env": {"A": "x" * 150_000}}, ValueError, "at most 100,000 bytes for each name: 'A'"),
        # what keeps the interpreter from starting
        (
            0,
            {"env": {"PYTHONHOME": "/none"}},
            ValueError,
            "does not with PYTHONHOME=",
        ),
        (0, {"env": {"PYTHONHASHSEED": "x"}}, ValueError, 'must be "random" or an integer'),
        (0, {"env": {"PYTHONIOENCODING": "none"}}, ValueError, "env must let Python start"),
    ],
)
def test_mistakes_are_refused_with_rule_value_and_remedy(machine, gpus, given, kind, sentence):
    machine(gpus)
    with pytest.raises(kind) as caught:
        lay_out(**given)
    assert sentence in str(caught.value)


def test_env_may_change_how_the_interpreter_starts(machine):
    machine(0)
    own = {"PYTHONPATH": "/none", "PYTHONHASHSEED": "7", "A": "å\udcff"}  # bytes of no encoding
    assert lay_out(env=own).environments()[1].items() >= own.items()


OWN_INTERFACE = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}


@pytest.mark.parametrize("name", sorted(PER_LAUNCH))
def test_env_may_not_set_what_launch_sets(machine, name):
    machine(2)
    if name in OWN_INTERFACE:
        assert lay_out(env={name: "eth7"}).environments()[1][name] == "eth7"
        return
    with pytest.raises(ValueError, match=f"env must not set {name}: launch.. sets it for each"):
        lay_out(env={name: "1"})


def test_the_variables_of_cpu_ranks(machine):
    machine(4)
    first, second = lay_out(devices="cpu", threads=3, env={"MINE": "x"}).environments()
    assert first == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        "OMP_NUM_THREADS": "3",
        "NVALCHEMI_DISTRIBUTED_BACKEND": "gloo",
        "NVALCHEMI_DISTRIBUTED_DEVICE": "cpu",
        "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD": "ENV",
        "CUDA_VISIBLE_DEVICES": "",  # no rank on the CPU makes a CUDA context
        "MINE": "x",
    }
    assert second == {**first, "RANK": "1", "LOCAL_RANK": "1"}
    assert {*first, "MASTER_PORT"} == {*PER_LAUNCH, "OMP_NUM_THREADS", "MINE"}


def _rank_devices(layout) -> list[tuple[str, str]]:
    """What each rank sees, and which of it is its own."""
    names = ("CUDA_VISIBLE_DEVICES", "NVALCHEMI_DISTRIBUTED_DEVICE")
    return [tuple(each[name] for name in names) for each in layout.environments()]


@pytest.mark.parametrize(
    "visible, gpus, devices, expected",
    [
        (None, 8, None, [("0,1,2,3,4,5,6,7", f"cuda:{rank}") for rank in range(8)]),
        (None, 8, [5, 2], [("5,2", "cuda:0"), ("5,2", "cuda:1")]),
        # through what the notebook itself was given
        ("4,5,6", 3, [2, 0], [("6,4", "cuda:0"), ("6,4", "cuda:1")]),
        (" 4 , 5", 2, 1, [("5", "cuda:0")]),
        ("GPU-aa,GPU-bb", 2, "cuda", [("GPU-aa,GPU-bb", "cuda:0"), ("GPU-aa,GPU-bb", "cuda:1")]),
        ("GPU-aa,GPU-bb", 2, [1], [("GPU-bb", "cuda:0")]),
        ("MIG-cc,MIG-dd", 1, None, [("MIG-cc", "cuda:0")]),
        ("3,1,-1,0", 2, [1], [("1", "cuda:0")]),
        # torch found fewer than are named: those at the end are not there
        ("0,1,9", 2, None, [("0,1", "cuda:0"), ("0,1", "cuda:1")]),
    ],
)
def test_ranks_see_their_gpus_in_their_order(
    machine, monkeypatch, visible, gpus, devices, expected
):
    """So cuda:LOCAL_RANK is the rank's own, as under torchrun."""
    machine(gpus)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _rank_devices(lay_out(devices=devices)) == expected


def test_ranks_that_share_see_one_gpu_each(machine, monkeypatch):
    """CUDA refuses a list that names a GPU twice, so "cuda" is the rank's own and no other is."""
    machine(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb")
    layout = lay_out(devices=[1, 0, 1], backend="gloo")
    own = [(name, "cuda:0") for name in ("GPU-bb", "GPU-aa", "GPU-bb")]
    assert _rank_devices(layout) == own
    assert [each["LOCAL_RANK"] for each in layout.environments()] == ["0", "1", "2"]


@pytest.mark.parametrize("now", ["0", "", "-1,0"])
def test_hiding_gpus_after_cuda_started_is_refused(machine, monkeypatch, now):
    machine(2)  # what torch counted when CUDA started
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", now)
    with pytest.raises(ValueError) as caught:
        lay_out()
    rule = f"CUDA_VISIBLE_DEVICES must stay as it was when CUDA started: {now!r} now, but torch"
    assert rule in str(caught.value)
    assert lay_out(devices="cpu").devices == ("cpu", "cpu")


def test_a_refusal_says_that_gpus_are_hidden(machine, monkeypatch):
    machine(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ValueError, match=r"1 GPU found \(CUDA_VISIBLE_DEVICES=3\)"):
        lay_out(nprocs=2)


@pytest.mark.parametrize("name", sorted(OWN_INTERFACE))
def test_the_users_network_interface_stays(machine, monkeypatch, name):
    """Also said to a rank that was started before the user chose."""
    machine(0)
    monkeypatch.setenv(name, "eth0")
    assert lay_out().environments()[0][name] == "eth0"
    assert lay_out(env={name: "eth1"}).environments()[0][name] == "eth1"


@pytest.mark.parametrize(
    "gpus, given, line",
    [
        (0, {"threads": 1}, "2 ranks on CPU, gloo, 1 thread each"),
        (0, {"nprocs": 1, "threads": 1}, "1 rank on CPU, gloo, 1 thread"),
        (4, {"threads": 8}, "4 ranks on cuda:0-3, nccl, 8 threads each"),
        (4, {"threads": 8, "nprocs": 1}, "1 rank on cuda:0, nccl, 8 threads"),
        (4, {"threads": 8, "nprocs": 2}, "2 ranks on cuda:0,1, nccl, 8 threads each"),
        (8, {"threads": 2, "devices": [2, 5, 3]}, "3 ranks on cuda:2,5,3, nccl, 2 threads each"),
        (8, {"threads": 2, "devices": [3, 2, 1]}, "3 ranks on cuda:3,2,1, nccl, 2 threads each"),
        (
            1,
            {"threads": 4, "devices": [0, 0], "backend": "gloo"},
            "2 ranks sharing cuda:0, gloo, 4 threads each",
        ),
        (
            2,
            {"threads": 4, "devices": [0, 1, 0, 1], "backend": "gloo"},
            "4 ranks sharing cuda:0,1, gloo, 4 threads each",
        ),
        (0, {"env": {"OMP_NUM_THREADS": "6"}}, "2 ranks on CPU, gloo, 6 threads each"),
    ],
)
def test_the_line_at_the_start(machine, gpus, given, line):
    machine(gpus)
    assert str(lay_out(**given)) == line


@pytest.mark.parametrize(
    "inherited, given, threads, variable",
    [
        ("5", {}, 5, "5"),
        ("5", {"threads": 2}, 2, "2"),
        ("5", {"env": {"OMP_NUM_THREADS": "3"}}, 3, "3"),
        ("4,2", {}, 4, "4,2"),
        (None, {"threads": np.int32(7)}, 7, "7"),
        (None, {"threads": 60}, 60, "60"),
    ],
)
def test_threads_as_told(machine, monkeypatch, inherited, given, threads, variable):
    machine(0)
    if inherited:
        monkeypatch.setenv("OMP_NUM_THREADS", inherited)
    layout = lay_out(**given)
    assert layout.threads == threads
    assert [each["OMP_NUM_THREADS"] for each in layout.environments()] == [variable] * 2


def test_a_number_of_threads_that_is_none_is_refused_where_it_stands(machine, monkeypatch):
    machine(0)
    monkeypatch.setenv("OMP_NUM_THREADS", "all")
    with pytest.raises(ValueError, match="'all' in this process's environment; correct it there"):
        lay_out()
    assert lay_out(threads=2).threads == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # as good as unset
    assert lay_out(nprocs=1).threads == cores()


@pytest.mark.parametrize("nprocs", [1, 2, 3, 500])
def test_cores_are_shared_out(machine, monkeypatch, nprocs):
    machine(0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)), raising=False)
    monkeypatch.setattr("nvalchemi.notebook.threads._quota", lambda: 7.5)
    assert cores() == 7
    assert lay_out(devices=["cpu"] * nprocs).threads == max(1, 7 // nprocs)


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("nprocs", [65, 1000, 10**9])
def test_more_ranks_than_any_cpu_takes_are_refused_by_their_limit(
    machine, monkeypatch, gpus, nprocs
):
    machine(gpus)
    monkeypatch.setattr("nvalchemi.notebook.threads.cores", lambda: 2)
    with pytest.raises(ValueError) as caught:
        lay_out(nprocs=nprocs, devices="cpu")
    assert f"nprocs must be at most 64 on this CPU: {nprocs}; each" in str(caught.value)
    assert "use nprocs=64 or fewer" in str(caught.value)
    assert (f"devices=['cpu'] * {nprocs}" in str(caught.value)) == (nprocs < 1025)
    assert lay_out(nprocs=64, devices="cpu").nprocs == 64
    assert lay_out(devices=["cpu"] * 65).nprocs == 65  # who writes that means it
    monkeypatch.setattr("nvalchemi.notebook.threads.cores", lambda: 100)
    assert lay_out(nprocs=65, devices="cpu").nprocs == 65


@pytest.mark.parametrize("devices", [range(10**9), itertools.repeat("cpu"), ["cpu"] * 1025])
def test_endless_devices_are_refused(machine, devices):
    machine(2)
    with pytest.raises(ValueError, match="one device for each rank, 1024 at most: there are more"):
        lay_out(devices=devices)


def test_more_threads_than_any_machine_takes_are_refused(machine, monkeypatch):
    machine(0)
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    assert lay_out(threads=128).threads == 128
    with pytest.raises(ValueError, match="threads must be at most 128 on this machine: 129; cores"):
        lay_out(threads=129)
    with pytest.raises(ValueError, match="OMP_NUM_THREADS in env must be at most 128 .*: 1000"):
        lay_out(env={"OMP_NUM_THREADS": "4,1000"})


@pytest.mark.parametrize(
    "groups, files, quota",
    [
        ("0::/", {}, float("inf")),
        ("0::/", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3.0),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "200000 100000"}, 2.0),
        ("0::/host/only", {"cpu.max": "400000 100000"}, 4.0),
        ("0::/../beside", {"cpu.max": "400000 100000"}, 4.0),
        ("0::/", {"cpu.max": "nonsense"}, float("inf")),
        (
            "4:memory:/x\n2:cpu,cpuacct:/x\n0::/",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "250000", "cpu,cpuacct/x/cpu.cfs_period_us": "1e5"},
            float("inf"),
        ),
        (
            "4:memory:/x\n2:cpu,cpuacct:/x\n0::/",
            {
                "cpu,cpuacct/x/cpu.cfs_quota_us": "250000\n",
                "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
    ],
)
def test_the_share_of_time_that_cgroups_allow(tmp_path, groups, files, quota):
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert _quota(tmp_path / "groups", tmp_path / "mount") == quota


def test_no_cgroups_no_limit(tmp_path):
    assert _quota(tmp_path / "none", tmp_path) == float("inf")
    assert cores() >= 1


@given(
    gpus=st.integers(0, 8),
    nprocs=st.none() | st.integers(1, 10),
    devices=st.none() | st.sampled_from(["cpu", "cuda"]) | st.lists(st.integers(0, 8), max_size=9),
    backend=st.sampled_from([None, "gloo", "nccl"]),
)
def test_whatever_is_accepted_is_consistent(gpus, nprocs, devices, backend):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: gpus)
        patch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        try:
            layout = lay_out(nprocs, devices, backend, threads=1)
        except ValueError as error:
            assert ": " in str(error) and len(str(error)) < 400
            return
    assert layout.nprocs == (nprocs or layout.nprocs) >= 1
    assert layout.backend == (backend or layout.backend)
    on_gpus = layout.devices[0] != "cpu"
    if layout.backend == "nccl":
        assert on_gpus and len(set(layout.devices)) == layout.nprocs
    for rank, each in enumerate(layout.environments()):
        assert each["RANK"] == each["LOCAL_RANK"] == str(rank)
        seen = each["CUDA_VISIBLE_DEVICES"]
        assert len(set(seen.split(","))) == len(seen.split(","))
        if on_gpus:  # the rank's name for it leads to the device that was promised
            number = int(each["NVALCHEMI_DISTRIBUTED_DEVICE"].removeprefix("cuda:"))
            assert f"cuda:{seen.split(',')[number]}" == layout.devices[rank]
            assert int(seen.split(",")[number]) < gpus
        else:
            assert (seen, each["NVALCHEMI_DISTRIBUTED_DEVICE"]) == ("", "cpu")


def test_laying_out_starts_no_cuda_and_torch_counts_gpus_late():
    """A process that has imported torch still takes up CUDA_VISIBLE_DEVICES, and gloo's interface.

    torch's own counting runs here as in a build with CUDA, over a driver that says four GPUs.
    """
    code = """
import os, torch, torch.distributed as dist
from nvalchemi.notebook.devices import lay_out
torch.cuda._is_compiled = lambda: True
torch.cuda._raw_device_count_nvml = lambda: 4
def started(*_): raise SystemExit("CUDA was started")
torch.cuda._lazy_init = torch._C._cuda_getDeviceCount = started
counts = []
for visible in ("0,1,2,3", "", "2,3"):
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    counts.append(lay_out(threads=1).devices)
assert counts == [("cuda:0", "cuda:1", "cuda:2", "cuda:3"), ("cpu",) * 2, ("cuda:0", "cuda:1")]
assert not torch.cuda.is_initialized()
os.environ["GLOO_SOCKET_IFNAME"] = "none-such"
try:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
except RuntimeError as error:
    print("late" if "none-such" in str(error) or "find" in str(error) else error, flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "late\n"), done.stderr
