"""launch() keeps classes and functions what they are: here, on the ranks, and back here."""

from script_runs import run

BACK = """
import dataclasses, enum
from typing import NamedTuple
from nvalchemi.notebook import RankError, launch

RATE = 1

class Settings:
    scale, log = 1, []
    def value(self):
        return RATE * self.scale

class Slotted:
    __slots__ = ("a",)
    def __init__(self):
        self.a = 1

@dataclasses.dataclass(slots=True)
class Point:
    x: int = 1

class Pair(NamedTuple):
    x: int = 1

class Colour(enum.Enum):
    RED = 1

class Divergence(Exception):
    pass

def helper():
    return RATE

def counter():
    n = 0
    def count():
        nonlocal n
        n += 1
        return n
    return count

def work(settings, count):
    Settings.scale = 7
    Settings.log.append("rank")
    count()
    class Local:
        __slots__ = ("b",)
    local = Local()
    local.b = 2
    return settings, Slotted(), Point(3), Pair(4), Colour.RED, Settings, helper, count, local

def diverge():
    Settings.scale = 7
    raise Divergence(Settings())

settings, method, log, count = Settings(), Settings.value, Settings.log, counter()
back, slotted, point, pair, colour, kind, function, counted, local = launch(
    work, settings, count, nprocs=2
)[1]
assert Settings.value is method and method.__globals__ is globals()
assert Settings.scale == 1 and Settings.log is log == []
assert type(back) is Settings and kind is Settings and function is helper
RATE = 10
assert back.value() == Settings().value() == helper() == 10
assert type(slotted) is Slotted and slotted.a == 1 and not hasattr(slotted, "__dict__")
assert type(point) is Point and point == Point(3) and type(pair) is Pair and pair.x == 4
assert colour is Colour.RED and local.b == 2
assert counted() == 2 and count() == 1  # a closure carries its state, and only its own

try:
    launch(diverge, nprocs=1)
except RankError as error:
    assert type(error.__cause__) is Divergence
    assert type(error.__cause__.args[0]) is Settings
assert Settings.value is method and Settings.scale == 1
print("same")
"""


def test_what_comes_back_does_not_rewrite_the_classes_here(tmp_path):
    assert run(tmp_path, BACK).splitlines()[-1] == "same"


THERE = """
import io
import torch
from nvalchemi.notebook import launch

class Net(torch.nn.Module):
    pass

class Note:
    def __init__(self, x):
        self.x = x

class Trainer:
    def __call__(self, net):
        import torch.distributed as dist
        torch.save(net, io.BytesIO())
        dist.init_process_group("gloo")
        notes = [None] * 2
        dist.all_gather_object(notes, Note(dist.get_rank()))
        return [note.x for note in notes]

assert list(launch(Trainer(), Net(), nprocs=2)) == [[0, 1]] * 2
print("pickled")
"""


def test_ranks_can_pickle_what_reached_them_as_argument_or_object(tmp_path):
    assert run(tmp_path, THERE).splitlines()[-1] == "pickled"


MODELS = """
import io
import torch
SEEN = {}
class Net(torch.nn.Module):
    pass
class Stop(Exception):
    pass
def train():
    import helper
    SEEN["train"] = True
    torch.save(Net(), io.BytesIO())
    try:
        helper.stop()
    except Stop:
        return helper.is_net(Net()), helper.seen()
"""
HELPER = """
import models
def is_net(net):
    return isinstance(net, models.Net)
def stop():
    raise models.Stop()
def seen():
    return dict(models.SEEN)
"""
LOOSE = """
import sys, types
import models, helper
from nvalchemi.notebook import launch
assert launch(models.train, nprocs=1)[0] == (True, {"train": True})

made = types.ModuleType("made")  # no rank can import this one
sys.modules["made"] = made
exec(
    "class C: pass\\ndef work(): import pickle; return pickle.loads(pickle.dumps(C()))", vars(made)
)
assert type(launch(made.work, nprocs=1)[0]) is made.C
print("one module")
"""


def test_a_module_beside_the_script_exists_once_on_a_rank(tmp_path):
    assert run(tmp_path, LOOSE, models=MODELS, helper=HELPER).splitlines()[-1] == "one module"


STARTING = """
from nvalchemi.notebook import launch
class C:
    pass
def work():
    import pickle
    return pickle.loads(pickle.dumps(C()))
assert type(launch(work, nprocs=1)[0]) is C
print("once")
"""


def test_a_module_that_launches_while_it_is_imported_is_not_run_again(tmp_path):
    assert run(tmp_path, "import starting", starting=STARTING).splitlines()[-1] == "once"
