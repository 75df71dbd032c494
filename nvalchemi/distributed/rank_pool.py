"""The rank's side of a pool: a process that answers one request after another.

Its namespace is that of its ``__main__``, as in a script, so that forked DataLoader workers and
``torch.save`` find the classes of cells. Its process group is made once, before the first request.
"""

from __future__ import annotations

import ast
import ctypes
import linecache
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from nvalchemi.distributed import origins, payload, rank_torch
from nvalchemi.distributed.environment import read_backend, read_device
from nvalchemi.distributed.modules import innermost
from nvalchemi.distributed.rank_end import finish, leave
from nvalchemi.distributed.rank_process import Failure, describe
from nvalchemi.distributed.rendezvous import init_process_group

_IDLE = 0.5  # s; a rank that has waited so long prepares for the first DistributedDataParallel
_OURS = ("nvalchemi.distributed.rank_pool", "nvalchemi.distributed.rank_process")


@dataclass(frozen=True)
class Ready:
    """The first message of a rank: it has met the others. ``device`` is that of its models."""

    device: str


@dataclass(frozen=True)
class Answer:
    """The answer to a request; where all went well, the descriptor of its payload follows."""

    request: int
    failure: Failure | None


def serve(control: Connection, descriptor: int) -> int:
    """Meet the other ranks and answer requests until the parent has no more; return an exit code.

    A request is a number, followed by the descriptor of a payload: (function, args, kwargs, entries
    for linecache). None ends the service.
    """
    os.close(descriptor)
    signal.signal(signal.SIGINT, _on_interrupt)
    bootstrap = sys.modules["__main__"]  # kept: its dictionary would be emptied while it runs
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        rank_torch.take_over()
        device = _meet()
    except BaseException as error:
        control.send(_describe("call", error))
        return 1
    control.send(Ready(device))
    if not control.poll(_IDLE):
        import torch._dynamo  # noqa: F401  # which takes a second, that of the user otherwise
    while (request := control.recv()) is not None:
        _answer(control, request, reduction.recv_handle(control))
    finish()
    del bootstrap
    return 0


def _meet() -> str:
    """Start the process group that lives as long as the rank; DistributedManager adopts it."""
    backend, device = read_backend(), torch.device(read_device() or "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init_process_group(backend, device_id=device if backend == "nccl" else None)
    return str(device)


_is_calling = False


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    if _is_calling:  # between requests there is nothing to interrupt
        raise KeyboardInterrupt


def _answer(control: Connection, request: int, descriptor: int) -> None:
    global _is_calling
    stage, failure, result, pid = "load", None, payload.new_file(), os.getpid()
    try:
        _is_calling = True
        fn, args, kwargs, sources = _load(descriptor)
        linecache.cache.update(sources)
        stage = "call"
        value = _call(fn, args, kwargs)
        if os.getpid() != pid:
            leave(0)  # a child that the function has forked: the rank itself answers
        stage = "return"
        payload.dump_result(value, result)
        _is_calling = False
    except BaseException as error:
        _is_calling = False
        if os.getpid() != pid:
            traceback.print_exc()
            leave(1)
        failure = _describe(stage, error)
    _flush()
    control.send(Answer(request, failure))
    if failure is None:
        reduction.send_handle(control, result, os.getppid())
    os.close(result)
    origins.forget_functions()


def _load(descriptor: int) -> Any:
    try:
        content = payload.load(descriptor)
    finally:
        os.close(descriptor)
    origins.put_into_modules()
    return content


def _call(fn: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function that finds what it did not bring in the namespace, and leaves globals there.

    Its own globals are those that it captured in the parent.
    """
    names = getattr(innermost(fn), "__globals__", {})
    namespace = vars(sys.modules["__main__"])
    is_of_cell = names is not namespace and names.get("__name__") == "__main__"
    if is_of_cell:
        # only what it uses: its globals may live long, and would keep what the user deletes
        for name in set(_used_names(innermost(fn), names)) & namespace.keys():
            names.setdefault(name, namespace[name])
    before = dict(names) if is_of_cell else names
    try:
        return fn(*args, **kwargs)
    except SystemExit as exit:
        if exit.code not in (None, 0):
            raise
    finally:
        if is_of_cell:
            changed = {n: v for n, v in names.items() if n not in before or before[n] is not v}
            namespace.update(changed)


def _used_names(fn: Any, names: dict[str, Any]) -> Iterator[str]:
    """Yield what a function and those that it brought look up by name."""
    for value in [fn, *names.values()]:
        for member in list(vars(value).values()) if isinstance(value, type) else [value]:
            if isinstance(member, FunctionType) and member.__globals__ is names:
                yield from _names_in(member.__code__)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def execute(code: str, filename: str) -> None:
    """Run source text in the namespace and print its last expression, as a cell shows it."""
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    tree = ast.parse(code, filename)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not code.rstrip().endswith(";"):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    namespace = vars(sys.modules["__main__"])
    exec(compile(tree, filename, "exec", dont_inherit=True), namespace)
    if last is not None:
        value = eval(compile(last, filename, "eval", dont_inherit=True), namespace)
        if value is not None:
            print(repr(value))


def pull(expression: str) -> Any:
    """Return what a name, or an expression, is in the namespace."""
    code = compile(expression, "<pulled>", "eval", dont_inherit=True)
    return eval(code, vars(sys.modules["__main__"]))


def push(**values: Any) -> None:
    """Put values into the namespace."""
    vars(sys.modules["__main__"]).update(values)


def count_collectives() -> int | None:
    """Return how many collectives this rank has begun; None if it has no process group any more."""
    if not dist.is_initialized():
        return None
    group: Any = dist.distributed_c10d._get_default_group()  # torch's stubs lack what we call
    return group._get_sequence_number_for_group()


def meet_again() -> None:
    """Take part in a collective, whose result must be right.

    Raises
    ------
    RuntimeError
        If it is not, or if the ranks can not communicate any more.
    """
    device = torch.device("cuda" if "nccl" in str(dist.get_backend_config()) else "cpu")
    ranks = torch.full((1,), float(dist.get_rank()), device=device)
    dist.all_reduce(ranks)
    count = dist.get_world_size()
    if ranks.item() != count * (count - 1) / 2:
        raise RuntimeError("the ranks take part in different collectives")


def _describe(stage: str, error: BaseException) -> Failure:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in _OURS:
        frames = frames.tb_next
    error.__traceback__ = frames
    return describe(stage, error)


def _flush() -> None:
    """Let all that was printed be in the pipes before the answer is."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()  # type: ignore[union-attr]
        except Exception:
            pass  # the user's own stream, or none
    ctypes.CDLL(None).fflush(None)  # what C code printed
