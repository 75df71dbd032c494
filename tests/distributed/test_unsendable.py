"""What cannot be sent is refused with its name and the path to it, in one's own notation."""

import asyncio
import concurrent.futures
import functools
import logging
import multiprocessing
import queue
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import OrderedDict, defaultdict, deque

import ipywidgets
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nvalchemi.distributed import payload
from nvalchemi.distributed.modules import by_value

LOCK = threading.Lock()


def refusal(fn, *args, **kwargs):
    """The sentence with which it is refused; "" if it is not."""
    # as in a notebook: what is defined here is not imported by ranks
    with by_value(take, (sys.modules[__name__],)):
        try:
            payload.dump_task(fn, args, kwargs, {}, payload.new_file())
        except TypeError as error:
            return str(error)
    return ""


def take(*args, **kwargs):
    pass


def helper():
    return LOCK


def uses_helper():
    return helper()


class Record:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def fit(self):
        return self

    def __call__(self):
        return self


class WithState(Record):
    def __getstate__(self):
        return {"inner": {"lock": threading.Lock()}}


class Slotted:
    __slots__ = ("row",)


class OnClass:
    sink = LOCK


class Base:
    def log(self):
        return LOCK


class Derived(Base):
    pass


def with_default(x, guard=LOCK, *, other=None):
    pass


def closure():
    guard = threading.Lock()

    def inner():
        return guard

    def outer():
        return inner()

    return outer


def deep():
    return Record(rows=[1, {"k": (2, LOCK)}])


def slotted():
    obj = Slotted()
    obj.row = LOCK
    return obj


def model():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    net[0].weight.guard = LOCK
    return net


def cycle():
    found = [1]
    found += [found, {"me": found}, LOCK]
    return found


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda: refusal(take, 1, LOCK), "argument 1"),
        (lambda: refusal(take, guard=LOCK), "argument 'guard'"),
        (lambda: refusal(take, settings={"log": [LOCK]}), "argument 'settings'['log'][0]"),
        (lambda: refusal(take, deep()), "argument 0.rows[1]['k'][1]"),
        (lambda: refusal(take, slotted()), "argument 0.row"),
        (lambda: refusal(take, WithState()), "argument 0.__getstate__()['inner']['lock']"),
        (lambda: refusal(take, deque([LOCK])), "argument 0[0]"),
        (lambda: refusal(take, OrderedDict(a=LOCK)), "argument 0['a']"),
        (lambda: refusal(take, defaultdict(list, {3: LOCK})), "argument 0[3]"),
        (lambda: refusal(take, {LOCK}), "argument 0 (an element of it)"),
        (lambda: refusal(take, {LOCK: 1}), "argument 0 (its key <lock>)"),
        (lambda: refusal(take, np.array([1, LOCK])), "argument 0.flat[1]"),
        (lambda: refusal(take, model()), "argument 0[0].weight.guard"),
        (lambda: refusal(take, cycle()), "argument 0[3]"),
        (lambda: refusal(take, OnClass()), "OnClass.sink"),
        (lambda: refusal(take, Derived()), "LOCK (used by Base.log)"),
        (lambda: refusal(helper), "LOCK"),
        (lambda: refusal(uses_helper), "LOCK (used by helper)"),
        (lambda: refusal(closure()), "guard (used by closure.inner)"),
        (lambda: refusal(with_default), "with_default (its default of 'guard')"),
        (lambda: refusal(deep().fit), "self.rows[1]['k'][1]"),
        (lambda: refusal(deep()), "Record(...).rows[1]['k'][1]"),
        (
            lambda: refusal(functools.partial(take, 1, deep())),
            "partial(take).args[1].rows[1]['k'][1]",
        ),
        (lambda: refusal(functools.partial(take, x=LOCK)), "partial(take).keywords['x']"),
        (lambda: refusal(take, functools.partial(take, LOCK)), "argument 0.args[0]"),
        (lambda: refusal(take, deep().fit), "argument 0.__self__.rows[1]['k'][1]"),
    ],
)
def test_the_path_is_what_one_would_write(call, path):
    assert call().partition(" is a lock, which cannot be sent to the ranks; ")[::2] == (
        path,
        "make it inside the function",
    )


def coroutine():
    async def wait():
        pass

    return wait()


def cursor():
    return sqlite3.connect(":memory:").cursor()


def iterator():
    return iter(torch.utils.data.DataLoader([1, 2]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: open(__file__), f"an open file (TextIOWrapper {__file__!r})"),
        (lambda: open(__file__, "rb"), f"an open file (BufferedReader {__file__!r})"),
        (tempfile.NamedTemporaryFile, "an open file (_TemporaryFileWrapper"),
        (lambda: (x for x in [1]), "a generator"),
        (coroutine, "a coroutine"),
        (threading.RLock, "a lock"),
        (threading.Event, "an object that threads wait for"),
        (threading.Thread, "a thread"),
        (threading.local, "data of one thread"),
        (queue.Queue, "a queue"),
        (concurrent.futures.ThreadPoolExecutor, "a pool of workers"),
        (concurrent.futures.Future, "something of asyncio that runs"),
        (asyncio.new_event_loop, "something of asyncio that runs"),
        (socket.socket, "a socket"),
        (lambda: sqlite3.connect(":memory:"), "a connection to a database"),
        (cursor, "a database cursor"),
        (lambda: subprocess.Popen(["true"]), "a process that runs"),
        (multiprocessing.Lock, "a lock of multiprocessing"),
        (multiprocessing.Queue, "a queue"),
        (lambda: multiprocessing.Pipe()[0], "a connection"),
        (lambda: logging.StreamHandler(), "a handler of logging"),
        (sys._getframe, "a place in running code"),
        (lambda: weakref.ref(take), "a weak reference"),
        (torch.distributed.HashStore, "a process group of this process"),
        (iterator, "a running iteration of a DataLoader"),
        (lambda: torch.jit.script(torch.nn.Linear(2, 2)), "a compiled function"),
        (ipywidgets.IntSlider, "a widget of the notebook"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_known_has_a_name_and_a_remedy(make, words):
    text = refusal(take, [make()])
    assert text.startswith(f"argument 0[0] is {words}"), text
    assert ", which cannot be sent to the ranks; " in text and len(text) < 300


def test_a_tensor_on_a_device_stays_here():
    with FakeTensorMode(allow_non_fake_inputs=True):  # has a device that this machine may lack
        net = Record(layers=[torch.ones(2, device="cuda")])
    assert refusal(take, net) == (
        "argument 0.layers[0] is a tensor on cuda:0, which cannot be sent to the ranks; pass it as "
        "it is on the CPU (.cpu()), or make it on the rank's own device"
    )


class Refuses:
    def __reduce__(self):
        raise ValueError("not today")


def test_what_is_not_known_has_its_type_and_the_reason():
    assert refusal(take, {"x": Refuses()}) == (
        "argument 0['x'], a Refuses, cannot be sent to the ranks (ValueError: not today); make it "
        "inside the function, or pass what it is made from"
    ).replace("a Refuses", f"a {__name__}.Refuses")


def test_what_can_be_sent_is_not_refused():
    assert not refusal(take, sys.stdout, sys.stderr, logging.getLogger("x"))
    assert not refusal(take, torch.ones(2, device="meta"), np.zeros(3), Record(x=1))
    assert not refusal(lambda: print(file=sys.stdout))
    assert not refusal(take, torch.utils.data.DataLoader([1, 2]), torch.Generator())


def test_a_chain_without_end_is_refused_in_words():
    link = None
    for _ in range(50_000):
        link = Record(next=link)
    assert "argument 0 cannot be sent to the ranks: it is nested too deeply" in refusal(take, link)
    while link is not None:  # or Python itself would recurse
        link = vars(link).pop("next")


def test_a_search_among_very_many_objects_ends():
    many = [Record(row=[i], text=str(i)) for i in range(100_000)]
    many[70_000].row.append(LOCK)
    assert refusal(take, many).startswith("argument 0[70000].row[1] is a lock")


def nested(levels):
    found = []
    for _ in range(levels):
        found = [found]
    return found


def linked(levels):
    found = None
    for _ in range(levels):
        found = Record(next=found)
    return found


CHAIN = linked(5_000)


def walks():
    return CHAIN


def uses_walks():
    return walks()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: refusal(take, nested(5_000)), "argument 0"),
        (lambda: refusal(take, rows={"k": nested(5_000)}), "argument 'rows'"),
        (lambda: refusal(take, [1, linked(5_000)]), "argument 0"),
        (lambda: refusal(walks), "CHAIN"),
        (lambda: refusal(uses_walks), "CHAIN (used by walks)"),
        (lambda: refusal(linked(5_000).fit), "self"),
        (lambda: refusal(take, lambda: CHAIN), "CHAIN"),
    ],
)
def test_what_is_nested_too_deeply_is_named(call, named):
    told = call()
    assert told.startswith(f"{named} cannot be sent to the ranks: it is nested too deeply; ")
    assert "keep its parts in one list" in told


def test_a_result_that_is_nested_too_deeply_is_named():
    with pytest.raises(TypeError, match="^result cannot be sent back: it is nested too deeply"):
        payload.dump_result({"k": nested(5_000)}, payload.new_file())


def test_what_is_large_is_named():
    grid = torch.zeros(20_000_000)
    table = {"rows": np.zeros(5_000_000), "small": np.zeros(3)}

    def use():
        return grid

    sent = payload.dump_task(use, (table,), {}, {}, payload.new_file())
    assert sent.describe_large() == (
        "launch() sends 120 MB to the ranks: grid (80 MB), argument 0['rows'] (40 MB)"
    )
    assert payload.dump_task(use, (), {}, {}, payload.new_file()).describe_large() is None
    text = bytes(120_000_000)
    sent = payload.dump_task(take, (), {"text": text}, {}, payload.new_file())
    assert sent.describe_large() == "launch() sends argument 'text' (120 MB) to the ranks"
    assert sent.describe_large(pool=True) == "the pool sends argument 'text' (120 MB) to the ranks"
