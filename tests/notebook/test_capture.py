"""What launch() sends: on real ranks, equal, once for all of them, or refused before any starts."""

from script_runs import run

REFUSED = """
import multiprocessing, threading
from nvalchemi.notebook import launch

class Settings:
    def __init__(self):
        self.stream = open(__file__)

class Net:
    def __init__(self):
        self.layers = [Settings()]

settings = {"log": Settings()}

def work(*args, **kwargs):
    return settings

def inside(*args):
    pass

def refusal(*args, **kwargs):
    try:
        launch(*args, nprocs=2, **kwargs)
    except TypeError as error:
        assert not multiprocessing.active_children()
        return str(error)

file = f"an open file (TextIOWrapper {__file__!r}), which cannot be sent to the ranks; "
file += "open it inside the function"
assert refusal(work) == f"settings['log'].stream is {file}", refusal(work)
assert refusal(inside, 1, Net()) == f"argument 1.layers[0].stream is {file}"
assert refusal(lambda model: 0, model=Net()) == f"argument 'model'.layers[0].stream is {file}"
assert refusal(inside, (x for x in [1])).startswith("argument 0 is a generator, which cannot be")
print("refused")
"""


def test_what_cannot_be_sent_is_refused_before_a_rank_starts(tmp_path):
    assert run(tmp_path, REFUSED).endswith("refused\n")


SHARED = """
import sys
import numpy as np
import torch
from nvalchemi.notebook import launch

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [torch.full((3,), float(i)) for i in range(20_000)]

marked = torch.ones(5_000_000)
marked.note = "kept"
grid = np.ones((3000, 3000))
dates = np.zeros(2_000_000, "M8[s]")
view = memoryview(bytes(30_000_000))
half = torch.ones(10_000_000, dtype=torch.bfloat16)
sparse = torch.ones(4_000_000).to_sparse()

def private():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e3

def work(data, skip):
    before = private()
    total = marked.sum() + grid.sum() + half.float().sum() + sparse._values().sum()
    total = int(total) + sum(bytes(view[:10])) + int(dates[0] == np.datetime64(0, "s"))
    middle = private()
    marked[:1_000_000] += 1  # a copy of one's own, of what is written only
    return total, marked.note, len(data.rows), int(data.rows[5][0]), middle - before

for total, note, count, row, grown in launch(work, Rows(), grid[::2], nprocs=2):
    assert (total, note, count, row) == (28_000_001, "kept", 20_000, 5), total
    assert grown < 60, grown  # of 200 MB; 40 is what float() makes for a moment
assert marked.sum() == 5_000_000

def make():
    big = torch.ones(30_000_000)
    return {"big": big, "view": big[:2]}

first, second = launch(make, nprocs=2)
assert first["big"].sum() == 30_000_000
first["big"][0] = 7
assert first["view"][0] == 7 and second["view"][0] == 1
print("shared")
"""


def test_large_data_lies_in_memory_that_all_ranks_share(tmp_path):
    assert run(tmp_path, SHARED).endswith("shared\n")


WORKERS = """
import dataclasses, enum
import torch
from nvalchemi.notebook import launch

SCALE = 3

class Mode(enum.Enum):
    FAST = 1

@dataclasses.dataclass
class Item:
    x: int
    mode: Mode = Mode.FAST

class Data(torch.utils.data.Dataset):
    def __init__(self, n):
        self.rows = [torch.full((2,), float(i)) for i in range(n)]
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return Item(int(self.rows[index][0]) * SCALE)

class Reversed(Data):
    def __getitem__(self, index):
        return super().__getitem__(len(self) - 1 - index)

def work(data, how):
    found = []
    for dataset in (data, Reversed(4)):
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=2, num_workers=1, collate_fn=lambda items: list(items),
            multiprocessing_context=how,
        )
        for items in loader:
            assert all(type(item) is Item and item.mode is Mode.FAST for item in items)
            found += [item.x for item in items]
    return found

for how in ("fork", "spawn", "forkserver"):
    assert launch(work, Data(4), how, nprocs=1)[0] == [0, 3, 6, 9, 9, 6, 3, 0]
print("loaded")
"""


def test_workers_that_a_rank_starts_in_any_way_know_what_a_cell_defines(tmp_path):
    assert run(tmp_path, WORKERS).endswith("loaded\n")


GENERIC = """
import collections, dataclasses, enum, functools, typing
import pydantic
import torch
from nvalchemi.notebook import launch

T = typing.TypeVar("T")

class Has(typing.Protocol):
    def value(self) -> int: ...

class Box(typing.Generic[T]):
    def __init__(self, x: T):
        self.x = x
    def value(self) -> int:
        return 1

class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()

class Level(enum.IntEnum):
    LOW = 1

Pair = collections.namedtuple("Pair", "a b")

class Config(pydantic.BaseModel):
    rate: float = 0.1

class Unit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
    def forward(self, x):
        return self.inner(x) - self.mean

@functools.lru_cache
def remembered(x):
    return x + 1

@functools.singledispatch
def shown(x):
    return "object"

@shown.register
def _(x: int):
    return "int"

net = Unit()

def work(box, flags, level, pair, config, inside=Box[int]):
    assert type(box) is Box and isinstance(net, Unit)
    assert flags == Flags.A | Flags.B and level is Level.LOW
    assert remembered(1) == 2 and shown(1) == "int" and shown("") == "object"
    kinds = [Has, Box[int], Box, Flags, Level, Pair, Config]
    return box, flags, level, pair, config, net, kinds, inside

sent = (Box(3), Flags.A | Flags.B, Level.LOW, Pair(1, [2]), Config(rate=3))
box, flags, level, pair, config, back, kinds, inside = launch(work, *sent, nprocs=1).rank0
assert type(box) is Box and box.x == 3 and flags == Flags.A | Flags.B and level is Level.LOW
assert type(pair) is Pair and pair.b == [2] and type(config) is Config and config.rate == 3
assert type(back) is Unit and torch.equal(back(torch.ones(2)), net(torch.ones(2)))
assert kinds == [Has, Box[int], Box, Flags, Level, Pair, Config] and inside == Box[int]
print("typed")
"""


def test_classes_of_every_sort_are_the_same_here_there_and_back(tmp_path):
    assert run(tmp_path, GENERIC).endswith("typed\n")


BACK = """
import torch
from nvalchemi.notebook import RankError, launch

def failure(fn):
    try:
        launch(fn, nprocs=1)
    except RankError as error:
        return str(error)

def generator():
    return {"loss": 1.0, "loader": [(x for x in [1])]}

def wrapped():
    torch.distributed.init_process_group("gloo")
    return {"model": torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))}

text = failure(generator)
assert "could not be sent back: TypeError: result['loader'][0] is a generator, which" in text, text
assert "result['model'] is a DistributedDataParallel model" in failure(wrapped)

def loss():
    weight = torch.ones(2, requires_grad=True)
    return (weight * 2).sum()

value = launch(loss, nprocs=1).rank0
assert value.item() == 4 and not value.requires_grad
print("back")
"""


def test_a_value_that_cannot_be_sent_back_is_named(tmp_path):
    assert run(tmp_path, BACK).endswith("back\n")


NAMED = """
import os
import rates, pack.low, other
from nvalchemi.notebook import launch

def edit(module, old, new):
    text = open(module.__file__).read()
    assert old in text
    with open(module.__file__, "w") as file:
        file.write(text.replace(old, new))

def work(rate):
    import other, pack.low, rates
    rates.COUNT += 1
    assert rates.count() == 1 and rates.Rate is type(rate)
    try:
        rates.LOCK
    except AttributeError as error:
        assert "rates.LOCK is a lock" in str(error), error
    return rates.rate(), pack.low.factor(), other.is_rate(rate), rate

edit(rates, "return 1", "return 100")
edit(pack.low, "FACTOR = 2", "FACTOR = 200")
by_value = [rates, "pack"]
rate, factor, is_rate, back = launch(work, rates.Rate(), nprocs=1, by_value=by_value)[0]
assert (rate, factor, is_rate) == (1, 2, True), (rate, factor, is_rate)
assert type(back) is rates.Rate and rates.COUNT == 0
print("named")
"""
RATES = """
import threading
import pack.low
LOCK = threading.Lock()
COUNT = 0
class Rate:
    pass
def count():
    return COUNT
def rate():
    return 1
"""


def test_a_named_module_runs_on_the_ranks_as_it_is_here(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "low.py").write_text("FACTOR = 2\ndef factor():\n    return FACTOR\n")
    other = "from rates import Rate\ndef is_rate(x):\n    return type(x) is Rate\n"
    assert run(tmp_path, NAMED, rates=RATES, other=other).endswith("named\n")


def test_globals_that_only_the_body_of_an_inner_class_uses_travel(tmp_path):
    code = (
        "from nvalchemi.notebook import launch\n"
        "SMALLEST, KIND = 3, 'energy'\n"
        "def work():\n"
        "    class Hook:\n"
        "        frequency = SMALLEST\n"
        "        class Inner:\n"
        "            kind: str = KIND\n"
        "    return Hook.frequency, Hook.Inner.kind\n"
        "print(list(launch(work, nprocs=1, output='quiet')))\n"
    )
    assert run(tmp_path, code) == "[(3, 'energy')]\n"
