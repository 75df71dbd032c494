"""What no process can hand to another, and what to do instead, in words."""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import dataclass
from typing import Any

_MAKE = "make it inside the function"
_BACK = "return what it was made from, or what it gave"


@dataclass(frozen=True)
class Kind:
    """A sort of object that cannot be sent: its name, and the remedy on the way there and back."""

    what: str
    there: str = _MAKE
    back: str = _BACK


class Refusal(pickle.PicklingError):
    """Raised while pickling at what could be pickled but would arrive as something else."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(f"{kind.what} cannot be sent to another process; {kind.there}")
        self.kind = kind


def describe(obj: Any) -> Kind | None:
    """Return what sort of object this is, if it is of one that is known to be unsendable."""
    kind = type(obj)
    if issubclass(kind, io.IOBase) or kind.__name__ == "_TemporaryFileWrapper":
        return _file(obj)
    for home, names, described in _KINDS:
        module = sys.modules.get(home)  # not imported here: obj is none of its
        if module is None:
            continue
        for name in names.split():
            known = getattr(module, name, None)
            if isinstance(known, type) and issubclass(kind, known):
                return described
    return None


def _file(obj: Any) -> Kind | None:
    if isinstance(obj, (io.StringIO, io.BytesIO)):
        return None
    name = getattr(obj, "name", None)
    shown = f" {name!r}" if isinstance(name, str) else ""
    state = "a closed" if getattr(obj, "closed", False) else "an open"
    what = f"{state} file ({type(obj).__name__}{shown})"
    return Kind(what, "open it inside the function", "return its content, or its name")


_ITERATED = Kind(
    "a generator",
    "pass a list, or the function that makes it",
    "return a list of what it yields",
)
_LOCK = Kind("a lock")
_PROCESS_LOCK = Kind("a lock of multiprocessing")
_QUEUE = Kind("a queue")
_THREAD = Kind("a thread", "start it inside the function")
_POOL = Kind("a pool of workers")
_RUNNING = Kind("something of asyncio that runs here", "run it inside the function")
_COROUTINE = Kind("a coroutine", "pass the function that makes it", "return what it returns")
_PROCESS = Kind("a process that runs", "start it inside the function")
_CONNECTION = Kind("a connection", "open it inside the function")
_DATABASE = Kind(
    "a connection to a database", "open it inside the function", "return the rows, or the file name"
)
_CURSOR = Kind("a database cursor", "open it inside the function", "return the rows")
_GROUP = Kind(
    "a process group of this process",
    "ranks make their own: torch.distributed.init_process_group()",
)
_LOADER = Kind(
    "a running iteration of a DataLoader", "pass the DataLoader", "return what it yields"
)
_NOTEBOOK = Kind("a part of the running notebook", "pass the values that are needed of it")
_WIDGET = Kind("a widget of the notebook", "pass its value", "return its value")
_HANDLE = Kind("an open handle")
_SCRIPTED = Kind("a compiled function", "compile it inside the function")

# (module, names of classes, what it is); the first that fits
_KINDS: tuple[tuple[str, str, Kind], ...] = (
    ("types", "GeneratorType AsyncGeneratorType", _ITERATED),
    ("types", "CoroutineType", _COROUTINE),
    ("_thread", "LockType RLock", _LOCK),
    ("threading", "Event Condition Semaphore Barrier", Kind("an object that threads wait for")),
    ("threading", "Thread", _THREAD),
    ("_thread", "_local", Kind("data of one thread (threading.local)")),
    ("queue", "Queue SimpleQueue", _QUEUE),
    ("concurrent.futures", "Executor", _POOL),
    ("multiprocessing.pool", "Pool", _POOL),
    ("concurrent.futures", "Future", _RUNNING),
    ("asyncio", "AbstractEventLoop Future Queue Lock Event BaseTransport", _RUNNING),
    ("logging", "Handler", Kind("a handler of logging")),
    ("socket", "socket", Kind("a socket", "open it inside the function")),
    ("sqlite3", "Connection", _DATABASE),
    ("sqlite3", "Cursor", _CURSOR),
    ("subprocess", "Popen", _PROCESS),
    ("multiprocessing.process", "BaseProcess", _PROCESS),
    ("multiprocessing.queues", "Queue SimpleQueue", _QUEUE),
    ("multiprocessing.synchronize", "SemLock Condition Event Barrier", _PROCESS_LOCK),
    ("multiprocessing.connection", "_ConnectionBase Listener", _CONNECTION),
    ("multiprocessing.managers", "BaseManager", _PROCESS),
    ("select", "epoll poll kqueue", _HANDLE),
    ("mmap", "mmap", Kind("a mapped file (mmap)", "map it inside the function")),
    ("types", "FrameType TracebackType", Kind("a place in running code")),
    ("weakref", "ReferenceType", Kind("a weak reference", "pass the object itself")),
    ("_contextvars", "ContextVar Context Token", Kind("a variable of the running context")),
    ("torch.distributed", "ProcessGroup Store Work", _GROUP),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter", _LOADER),
    ("torch.jit", "ScriptModule ScriptFunction", _SCRIPTED),
    ("torch.cuda", "Stream Event", Kind("a stream or event of CUDA")),
    ("h5py", "File Group Dataset", Kind("an open HDF5 file", "open it inside the function")),
    ("zmq", "Socket Context", Kind("a socket", "open it inside the function")),
    ("IPython.core.interactiveshell", "InteractiveShell", _NOTEBOOK),
    ("ipykernel.iostream", "OutStream", _NOTEBOOK),
    ("ipywidgets", "Widget", _WIDGET),
    ("tqdm.std", "tqdm", Kind("a progress bar")),
)
