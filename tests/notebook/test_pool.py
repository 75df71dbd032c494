"""WorkerPool: ranks that stay, their namespaces, errors, deaths and interrupts. Real ranks."""

import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from nvalchemi.notebook import RankError, RankResults, WorkerPool
from nvalchemi.notebook.cell_code import check_code


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(nprocs=2, output="quiet") as pool:
        yield pool


def rank_and_sum() -> tuple[int, float]:
    ranks = torch.tensor(float(torch.distributed.get_rank()))
    torch.distributed.all_reduce(ranks)
    return torch.distributed.get_rank(), ranks.item()


def managed() -> tuple[int, int, str]:
    from nvalchemi.distributed import DistributedManager

    DistributedManager.initialize()
    manager = DistributedManager()
    return manager.rank, manager.world_size, str(manager.device)


def pids(pool: WorkerPool) -> list[int]:
    return [status.pid for status in pool.status()]


def wait_for_end(numbers: list[int], seconds: float = 5.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in numbers if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_function_runs_on_every_rank_over_one_process_group(pool):
    before = pids(pool)
    for _ in range(3):
        results = pool.run(rank_and_sum)
        assert isinstance(results, RankResults) and list(results) == [(0, 1.0), (1, 1.0)]
    assert list(pool.run(managed)) == [(0, 2, "cpu"), (1, 2, "cpu")]
    assert list(pool.run(lambda a, b: a + b, 1, b=2)) == [3, 3]
    assert pids(pool) == before  # the same processes


def test_namespaces_stay_and_belong_to_each_rank(pool):
    pool.execute("import os; mine = int(os.environ['RANK']) * 10")
    pool.execute("mine += 1", ranks=[1])
    pool.push(rate=0.5, weights=torch.arange(3.0))
    assert list(pool.pull("mine")) == [0, 11]
    assert list(pool.pull("rate * mine")) == [0.0, 5.5]
    assert torch.equal(pool.pull("weights").rank0, torch.arange(3.0))
    pool.execute("weights.zero_()", ranks=[0])
    assert [w.sum().item() for w in pool.pull("weights")] == [0.0, 3.0]


def test_what_only_some_ranks_have_is_pulled_from_those(pool):
    pool.execute("alone = 'here'", ranks=[1])
    assert pool.pull("alone", ranks=[1]) == {1: "here"}
    assert pool.pull("alone.upper()", [1]) == {1: "HERE"}
    with pytest.raises(RankError, match="rank 0: NameError: .*alone"):
        pool.pull("alone")
    with pytest.raises(ValueError, match="ranks must be some of 0 to 1: 2 is none"):
        pool.pull("alone", ranks=[2])
    with pytest.raises(TypeError, match=r"for rank 0 write ranks=\[0\]"):
        pool.pull("alone", ranks=0)


def test_large_tensors_come_back_whole(pool):
    results = pool.run(lambda: torch.full((1 << 20,), 7.0))
    assert all(torch.equal(value, torch.full((1 << 20,), 7.0)) for value in results)


def test_an_exception_names_rank_and_line_and_the_ranks_live_on(pool):
    before = pids(pool)
    pool.execute("kept = 1")
    code = "import torch\nif torch.distributed.get_rank() == 1:\n    {}['energy']"
    with pytest.raises(RankError) as caught:
        pool.execute(code, filename="<mine>")
    assert str(caught.value).startswith("rank 1: KeyError: 'energy'")
    assert 'File "<mine>", line 3' in str(caught.value) and "{}['energy']" in str(caught.value)
    assert "rank_pool.py" not in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError) and caught.value.rank == 1
    assert "rank 0: had returned" in caught.value.__notes__
    assert "restarted" not in str(caught.value)
    assert list(pool.pull("kept")) == [1, 1] and pids(pool) == before
    assert list(pool.run(rank_and_sum)) == [(0, 1.0), (1, 1.0)]


def test_what_cannot_be_sent_is_named_on_both_ways(pool, tmp_path):
    with (tmp_path / "open").open("w") as file, pytest.raises(TypeError, match="log"):
        pool.push(log=file)
    with pytest.raises(
        RankError, match="rank [01]: the value could not be sent back.*an open file"
    ):
        pool.run(lambda: open(os.devnull))
    assert len(pool.run(rank_and_sum)) == 2


def test_mistakes_are_refused_before_anything_runs(pool):
    with pytest.raises(TypeError, match="needs a function"):
        pool.run("train")
    with pytest.raises(ValueError, match="ranks must be some of 0 to 1"):
        pool.execute("1", ranks=[2])
    with pytest.raises(ValueError, match="ranks must be some of 0 to 1: it is empty"):
        pool.execute("1", ranks=[])
    with pytest.raises(SyntaxError):
        pool.execute("x = = 1")
    with pytest.raises(SyntaxError) as outside:
        pool.execute("1\nreturn 3")
    assert (outside.value.lineno, outside.value.text) == (2, "return 3")
    with pytest.raises(ValueError, match="needs a name"):
        pool.pull("x = 1")
    with pytest.raises(ValueError, match="output must be"):
        WorkerPool(output="loud")


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda p: p.pull(3), TypeError, "needs a name or an expression as a string: 3"),
        (lambda p: p.pull(""), ValueError, "needs a name or an expression: ''"),
        (lambda p: p.pull("a\0"), ValueError, r"needs a name or an expression: 'a\\x00'"),
        (lambda p: p.pull("\ud800"), ValueError, "needs a name or an expression"),
        (lambda p: p.execute(3), TypeError, r"needs source text: 3; a function is called by run"),
        (lambda p: p.execute(None), TypeError, "needs source text: None"),
        (lambda p: p.execute(b"1"), TypeError, "needs source text: b'1'"),
        (lambda p: p.execute("a\0"), ValueError, "no null character"),
        (lambda p: p.execute("1", filename=3), TypeError, "filename must be a string or None: 3"),
        (lambda p: p.execute("1", ranks=5), TypeError, r"in a list: 5; for rank 0 write ranks=\[0"),
        (lambda p: p.execute("1", ranks="01"), TypeError, "some of 0 to 1 in a list: '01'"),
        (lambda p: p.execute("1", ranks=[0.5]), TypeError, "0 to 1: 0.5 is no integer"),
        (lambda p: p.execute("1", ranks=[True]), TypeError, "0 to 1: True is no integer"),
        (lambda p: p.execute("1", ranks=[0, -1]), ValueError, "0 to 1: -1 is none"),
        (lambda p: p.execute("1", ranks=itertools.count()), ValueError, "0 to 1: 2 is none"),
        (lambda p: p.push(**{"not ident": 1}), ValueError, "a variable can have: 'not ident'"),
        (lambda p: p.push(**{"a.b": 1, "class": 2}), ValueError, "can have: 'a.b', 'class'"),
    ],
)
def test_wrong_types_are_refused_by_a_sentence(pool, call, kind, said):
    with pytest.raises(kind, match=said):
        call(pool)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1\n!ls", r"line 2: '!ls' is IPython's syntax"),
        ("%time f()", "IPython's syntax"),
        ("files = !ls", "IPython's syntax"),
        ("print?", "IPython's syntax"),
        ("await f()", "no event loop"),
        ("async with a:\n    pass", "no event loop"),
    ],
)
def test_code_that_is_no_plain_python_is_refused_by_a_sentence(code, said):
    with pytest.raises(ValueError, match=said):
        check_code(code, "<cell>")


@pytest.mark.parametrize("code", ["5 % 3", "a = 5 %3", "async def f():\n    await g()", "'?'", ""])
def test_plain_python_is_taken(code):
    assert check_code(code, "<cell>") is None


def test_ranks_blocked_by_a_failed_one_are_restarted_and_it_says_so(pool):
    before = pids(pool)
    code = "import torch.distributed as d\nassert d.get_rank(), 'mine'\nd.barrier()"
    with pytest.raises(RankError) as caught:
        pool.execute(code)
    assert str(caught.value).startswith("rank 0: AssertionError: mine")
    assert "The ranks were restarted, because rank 1 waited in" in str(caught.value)
    assert "their namespaces are lost" in str(caught.value)
    assert list(pool.run(rank_and_sum)) == [(0, 1.0), (1, 1.0)]
    assert not set(before) & set(pids(pool))


def test_a_collective_on_some_ranks_only_ends_with_an_error(pool):
    with pytest.raises(RankError, match="rank 0: waits in .* for rank 1, which is idle"):
        pool.execute("import torch.distributed as d; d.barrier()", ranks=[0])
    assert len(pool.run(rank_and_sum)) == 2


def test_collectives_out_of_step_are_found_after_a_failure(pool):
    code = (
        "import torch, torch.distributed as d\n"
        "if d.get_rank():\n    raise ValueError('before its all_reduce')\n"
        "work = d.all_reduce(torch.ones(1), async_op=True)"
    )
    with pytest.raises(RankError, match="rank 1: ValueError") as caught:
        pool.execute(code)
    assert re.search(r"different numbers of collectives: (\d+), (?!\1)", str(caught.value))
    assert list(pool.run(rank_and_sum)) == [(0, 1.0), (1, 1.0)]


def test_a_killed_rank_is_named_during_a_call_and_between_calls(pool):
    with pytest.raises(RankError) as caught:
        pool.execute("import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)")
    assert str(caught.value).startswith("rank 1: killed by SIGKILL (out of memory?)")
    assert "namespaces are lost" in str(caught.value)
    pool.run(rank_and_sum)

    os.kill(pids(pool)[0], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while pool.status()[0].alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool.status()[0].state.startswith("dead: killed by SIGKILL")
    assert not pool.status()[0].alive and pool.status()[1].alive
    with pytest.raises(
        RankError, match="rank 0: killed by SIGKILL.*between two calls; nothing was"
    ):
        pool.execute("never = 1")
    with pytest.raises(RankError, match="name 'never' is not defined"):
        pool.pull("never")


def in_thread(pool: WorkerPool, code: str) -> tuple[threading.Thread, list[BaseException]]:
    """Run code in a thread, and return once all ranks are busy."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            pool.execute(code)
        except BaseException as error:
            errors.append(error)

    pool.run(rank_and_sum)
    thread = threading.Thread(target=call)
    thread.start()
    while not all(s.state.startswith("busy") for s in pool.status()):
        time.sleep(0.02)
    time.sleep(0.3)
    return thread, errors


def test_an_interrupt_leaves_ranks_that_react_as_they_are(pool):
    thread, errors = in_thread(pool, "import time\nbegun = 1\ntime.sleep(1000)")
    before = pids(pool)
    pool.interrupt()
    thread.join(30)
    assert [type(error) for error in errors] == [KeyboardInterrupt]
    assert list(pool.pull("begun")) == [1, 1] and pids(pool) == before


def test_an_interrupt_restarts_ranks_that_sit_in_a_collective(pool, capsys):
    code = "import torch, torch.distributed as d\nd.recv(torch.ones(1), src=1 - d.get_rank())"
    thread, errors = in_thread(pool, code)
    before = pids(pool)
    pool.interrupt()
    thread.join(30)
    assert [type(error) for error in errors] == [KeyboardInterrupt]
    assert "namespaces are lost" in capsys.readouterr().out
    assert list(pool.run(rank_and_sum)) == [(0, 1.0), (1, 1.0)]
    assert wait_for_end(before) == []


def test_ranks_that_swallow_an_interrupt_are_restarted(pool, capsys):
    code = (
        "import time\ndef stay():\n    try:\n        time.sleep(1000)\n    except BaseException:\n"
    )
    thread, errors = in_thread(pool, code + "        time.sleep(1000)\nstay()")
    pool.interrupt()
    thread.join(30)
    assert [type(error) for error in errors] == [KeyboardInterrupt]
    assert "did not react to the interrupt" in capsys.readouterr().out
    assert list(pool.run(rank_and_sum)) == [(0, 1.0), (1, 1.0)]


def test_restart_ends_the_call_of_another_thread(pool):
    thread, errors = in_thread(pool, "import time; time.sleep(1000)")
    pool.restart()
    thread.join(30)
    assert "restart() was called" in str(errors[0]) and isinstance(errors[0], RankError)
    assert len(pool.run(rank_and_sum)) == 2


def test_close_ends_the_call_of_another_thread_and_starts_nothing(monkeypatch):
    pool = WorkerPool(nprocs=1, output="quiet")
    thread, errors = in_thread(pool, "import time; time.sleep(1000)")
    waiting: list[BaseException] = []

    def wait() -> None:
        try:
            pool.execute("1")
        except BaseException as error:
            waiting.append(error)

    second = threading.Thread(target=wait)
    second.start()
    time.sleep(0.3)
    ended = pids(pool)
    monkeypatch.setattr(pool, "_start", lambda: pytest.fail("ranks were started"))
    pool.close()
    thread.join(30)
    second.join(30)
    assert isinstance(errors[0], RankError)
    assert str(errors[0]).startswith("rank 0: close() was called")
    assert "The pool was closed: its ranks were ended." in str(errors[0])
    assert "restarted" not in str(errors[0])
    assert isinstance(waiting[0], ValueError) and "the pool is closed" in str(waiting[0])
    assert wait_for_end(ended) == []


def test_a_stopped_rank_is_told_of_and_goes_on(capfd):
    with WorkerPool(nprocs=2) as pool:
        pool.run(rank_and_sum)
        number = pids(pool)[1]
        os.kill(number, signal.SIGSTOP)
        while not pool.status()[1].state.startswith("stopped"):
            time.sleep(0.01)
        assert pool.status()[1].state.startswith("stopped by a signal (SIGSTOP): kill -CONT")
        assert pool.status()[1].alive and pool.status()[0].state == "idle"

        told = ""
        results: list[list] = []
        thread = threading.Thread(target=lambda: results.append(list(pool.run(rank_and_sum))))
        thread.start()
        deadline = time.monotonic() + 20
        while "stopped by a signal" not in told and time.monotonic() < deadline:
            time.sleep(0.05)
            told += capfd.readouterr().err
        time.sleep(2.5)
        told += capfd.readouterr().err
        assert told.count(f"rank 1 (process {number}) was stopped by a signal") == 1
        assert pool.status()[1].state.startswith("stopped") and thread.is_alive()
        os.kill(number, signal.SIGCONT)
        thread.join(30)
        assert results == [[(0, 1.0), (1, 1.0)]] and pids(pool)[1] == number


def test_a_stopped_rank_is_ended_with_the_pool():
    pool = WorkerPool(nprocs=2, output="quiet")
    pool.run(rank_and_sum)
    ended = pids(pool)
    os.kill(ended[0], signal.SIGSTOP)
    pool.close()
    assert wait_for_end(ended) == []


def forks() -> str:
    if os.fork() == 0:
        return "the child's"
    os.wait()
    return "the rank's"


def forks_and_raises() -> str:
    if os.fork() == 0:
        raise ValueError("only in the child")
    os.wait()
    return "the rank's"


@pytest.mark.parametrize("fn", [forks, forks_and_raises])
def test_children_that_a_function_forks_do_not_answer(pool, fn):
    assert list(pool.run(fn)) == ["the rank's"] * 2
    assert list(pool.run(rank_and_sum)) == [(0, 1.0), (1, 1.0)]


def test_closing_and_forgetting_a_pool_ends_its_ranks():
    with WorkerPool(nprocs=1, output="quiet") as closed:
        assert list(closed.run(lambda: 1)) == [1]
        ended = pids(closed)
    assert wait_for_end(ended) == [] and closed.closed
    with pytest.raises(ValueError, match="the pool is closed"):
        closed.run(rank_and_sum)

    forgotten = WorkerPool(nprocs=1, output="quiet")
    forgotten.run(rank_and_sum)
    ended = pids(forgotten)
    del forgotten
    gc.collect()
    assert wait_for_end(ended) == []


def test_what_is_printed_appears_whole_and_in_order(capsys):
    with WorkerPool(nprocs=2) as pool:
        pool.execute("import sys, os; os.write(1, b'raw\\n'); print('a', 1); print('torn', end='')")
        pool.execute("import sys; print('err', file=sys.stderr); 40 + 2", ranks=[1])
        pool.execute("None")
    lines = capsys.readouterr().out.splitlines()
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert [line.partition("] ")[2] for line in own][:3] == ["raw", "a 1", "torn"]
    assert lines[0].startswith("2 ranks on CPU") and lines[-1] == "[rank 1] 42"


SCRIPT = """
import torch
from nvalchemi.notebook import WorkerPool

class Net(torch.nn.Linear):
    pass

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return i * i

def build():
    global net
    net = Net(1, 1)
    loader = torch.utils.data.DataLoader(Squares(), num_workers=1)
    return [int(batch) for batch in loader]

def weight():
    return net.weight.item()

if __name__ == "__main__":
    pool = WorkerPool(nprocs=2)
    assert list(pool.run(build)) == [[0, 1, 4, 9]] * 2
    assert [type(each) for each in pool.pull("net")] == [Net, Net]
    assert list(pool.run(weight)) == list(pool.pull("net.weight.item()"))
    assert "net" not in globals()
    def weight():
        return "edited"
    assert pool.run(weight).rank0 == "edited"
    large = torch.zeros(1 << 23)
    before = [rank.memory for rank in pool.status()]
    for _ in range(20):
        assert pool.run(lambda: large.sum().item()).rank0 == 0.0
    after = [rank.memory for rank in pool.status()]
    assert all(b - a < 200e6 for a, b in zip(before, after)), (before, after)  # not 20 x 32 MB
    print("pids", *(rank.pid for rank in pool.status()))
"""


def test_functions_of_a_script_find_the_namespace_and_leave_their_globals_there(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    numbers = [int(word) for word in done.stdout.splitlines()[-1].split()[1:]]
    assert len(numbers) == 2 and wait_for_end(numbers) == []  # the script ended, and they with it
