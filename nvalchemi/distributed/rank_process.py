"""The life of one worker process: from its first instruction to os._exit.

Nothing heavy is imported before the rank watches its parent: a kernel killed meanwhile would leave
it behind.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import io
import linecache
import multiprocessing
import multiprocessing.connection
import multiprocessing.reduction
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nvalchemi.distributed.process import Ends, Task
from nvalchemi.distributed.rank_end import finish, leave, note_open_files
from nvalchemi.distributed.rank_group import kill_group

STACK_SIGNAL = int(getattr(signal, "SIGRTMIN", signal.SIGURG)) + 5 * hasattr(signal, "SIGRTMIN")
"""A rank that gets it writes its Python stack, also while C++ holds the GIL.

Only for a rank that does not answer otherwise: under a thread that runs Python it may crash (seen
once in 4,000 times). Nobody else is known to use this signal.
"""

MEETS_OTHERS = "with a process group\n"
"""What a rank that has one writes above its stack."""

_LONGEST = 20_000  # characters of an error: several screens; a notebook stores it
_EXPIRY = 3600.0  # s; how long a rank that was spawned ahead holds its memory for a task
_HEAD_START = 0.5  # s; for the cell that has just ended: importing takes all of a core
_running = False


def is_worker() -> bool:
    """Return whether this process is a worker, or is still being started as one's child."""
    return _running or getattr(multiprocessing.current_process(), "_inheriting", False)


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank, in plain strings, so that it can always be sent.

    ``stage`` is "load" (the function could not be unpickled), "call" or "return" (its value could
    not be pickled); ``time`` is that of ``time.monotonic``, comparable between the ranks.
    """

    stage: str
    summary: str
    traceback: str
    time: float
    exception: bytes | None = None


def live(
    ends: Ends, parent_pid: int, dies_with_thread: bool, start_method: str, ahead: bool
) -> None:
    """Wait for a task, run it as a rank, and leave; never returns."""
    global _running
    _running = True
    stacks = ends.stacks.detach()
    _live_and_die_with(parent_pid, dies_with_thread, stacks, ends.folder)
    # DataLoaders and managers would leave folders of their own when they are killed
    multiprocessing.current_process()._config["tempdir"] = ends.folder  # type: ignore[attr-defined]
    _take_output(ends.stdout.detach(), ends.stderr.detach())
    _show_stack_on_signal(stacks)
    # as under torchrun: spawned DataLoader workers could not find the classes of a cell
    multiprocessing.set_start_method(start_method, force=True)
    if ahead and not ends.control.poll(_HEAD_START):
        with suppress(Exception):  # who needs it meets the error again, and then it is told
            _import_what_most_functions_need()
    control, result = ends.control, ends.result.detach()
    with suppress(EOFError):
        if not ahead or control.poll(_EXPIRY):
            task = control.recv()
            descriptor = multiprocessing.reduction.recv_handle(control)
            leave(_serve(control, task, descriptor) if task.serves
                  else _work(control, task, descriptor, result))  # fmt: skip
    leave(0)


def _live_and_die_with(parent_pid: int, dies_with_thread: bool, stacks: int, folder: str) -> None:
    os.setsid()  # a group of its own: ended with all that it started, and no Ctrl-C of the terminal
    if dies_with_thread:
        _die_with_parent()
    if os.getppid() != parent_pid:
        os._exit(1)
    os.register_at_fork(before=_note_forking_thread, after_in_child=_die_with_rank)
    threading.Thread(
        target=_watch_parent, args=(stacks, folder), name="watch-parent", daemon=True
    ).start()


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent's thread ends, whatever it is blocked in."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


_forked_by_main_thread = False


def _note_forking_thread() -> None:
    global _forked_by_main_thread
    _forked_by_main_thread = threading.current_thread() is threading.main_thread()


def _die_with_rank() -> None:
    # Linux means the thread that forked: another one than the main thread may end long before
    if _forked_by_main_thread:
        _die_with_parent()


def _watch_parent(stacks: int, folder: str) -> None:
    """Kill this process and all that it started when the parent is gone (its pipe closes).

    Meanwhile tell the parent where the main thread stands, when it asks for that.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.sentinel not in multiprocessing.connection.wait([parent.sentinel, stacks]):
        with suppress(OSError):
            if not os.read(stacks, 1):
                break
            os.write(stacks, _main_stack().encode())
    shutil.rmtree(folder, ignore_errors=True)
    kill_group(os.getpid())


def _main_stack() -> str:
    """Return the main thread's stack as faulthandler would write it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = [(f.f_code, line) for f, line in traceback.walk_stack(frame)]
    lines = [f'  File "{c.co_filename}", line {line} in {c.co_name}' for c, line in calls]
    # absent while torch is being imported
    has_group = getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)
    met = MEETS_OTHERS if has_group() else ""
    return "\n".join([f"{met}Current thread 0x0 (most recent call first):", *lines, ""])


def _take_output(stdout: int, stderr: int) -> None:
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = open(descriptor, "wb", buffering=0, closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), "utf-8", errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = sys.__stdin__ = _NoInput()  # type: ignore[misc, assignment]
    faulthandler.enable()  # a crash in C code shows the Python lines that led to it


class _NoInput(io.TextIOBase):
    """Stands for standard input, which the parent's front end has and ranks can not share."""

    def readable(self) -> bool:
        return True

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        raise EOFError("a rank has no standard input: pass what it needs as an argument")

    read = readline  # type: ignore[assignment]


def _show_stack_on_signal(descriptor: int) -> None:
    faulthandler.register(STACK_SIGNAL, open(descriptor, "wb"), all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACK_SIGNAL})


def _import_what_most_functions_need() -> None:
    for name in (
        "torch._dynamo",  # the first DistributedDataParallel imports it, for a second
        "torch.nn.parallel",
        "torch.optim",
        "nvalchemi.distributed.payload",
        "nvalchemi.distributed.rank_torch",
    ):
        importlib.import_module(name)


def _reset_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def _work(control: Any, task: Task, descriptor: int, result: int) -> int:
    """Load, call and answer; return the exit code."""
    stage, pid = "load", os.getpid()
    try:
        _reset_signals()  # here, so that an early Ctrl-C is an answer and no traceback
        take_place(task)
        fn, args, kwargs = _load(descriptor)
        note_open_files()
        control.send("calling")
        stage = "call"
        value = _call(fn, args, kwargs)
        if os.getpid() != pid:
            return 0  # a child that the function has forked: the rank itself answers
        finish()
        stage = "return"
        _send(value, result)
    except BaseException as error:
        if os.getpid() != pid:
            traceback.print_exc()
            return 1
        control.send(describe(stage, error))
        with suppress(BaseException):
            finish()  # as long as the parent lets it
        return 1
    control.send("returned")
    return 0


def _serve(control: Any, task: Task, descriptor: int) -> int:
    from nvalchemi.distributed import rank_pool

    _reset_signals()
    take_place(task)
    return rank_pool.serve(control, descriptor)


def take_place(task: Task) -> None:
    """Go where the parent was when it gave the task, with its variables and import path."""
    for name, value in task.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.chdir(task.directory)
    sys.path[:] = task.path
    sys.argv[:] = task.argv


def _load(task: int) -> tuple[Any, tuple, dict[str, Any]]:
    from nvalchemi.distributed import origins, payload, rank_torch

    rank_torch.take_over()  # before the function arrives: it may hold torch's functions
    fn, args, kwargs, sources = payload.load(task)
    linecache.cache.update(sources)
    origins.put_into_modules()
    return fn, args, kwargs


def _call(fn: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    try:
        return fn(*args, **kwargs)
    except SystemExit as exit:
        if exit.code in (None, 0):
            return None
        raise


def _send(value: Any, result: int) -> None:
    from nvalchemi.distributed import payload

    payload.dump_result(value, result)


def describe(stage: str, error: BaseException) -> Failure:
    """Return the failure that an exception is, with the user's frames of its traceback."""
    moment = time.monotonic()
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") == __name__:
        frames = frames.tb_next  # the user's frames, not ours
    error.__traceback__ = frames
    # a value that cannot be sent is the user's, but the frames are pickle's
    try:
        text = "" if stage == "return" else "".join(traceback.format_exception(error))
        told = traceback.format_exception_only(error)
        # of a SyntaxError the place comes first
        summary = (told[-1] if isinstance(error, SyntaxError) else "".join(told)).strip()
    except Exception as trouble:  # such as of a SyntaxError whose line number is a string
        text = "".join(traceback.format_tb(frames))
        summary = f"{type(error).__qualname__} (which cannot be shown: {trouble!r})"
    return Failure(stage, _sendable(summary), _sendable(text), moment, _pickle_exception(error))


def _sendable(text: str) -> str:
    """Return a text that every front end can show, its middle cut if it is very long."""
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]} ... {len(text) - 2 * half:,} characters ... {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def _pickle_exception(error: BaseException) -> bytes | None:
    try:
        from nvalchemi.distributed import payload

        content = payload.dumps(error)
        pickle.loads(content)  # some exceptions pickle well and cannot be made again
    except Exception:
        return None
    return content
