"""Modules that travel as they are here, and those whose files have changed since their import."""

import importlib
import json
import os
import subprocess
import sys
import types

import pytest

from nvalchemi.distributed import payload
from nvalchemi.distributed.edited import edited_since_import
from nvalchemi.distributed.modules import named_modules


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Write a module beside the notebook, or write it anew, a moment later."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    before = set(sys.modules)
    moment = [1_600_000_000]

    def write(name, text):
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        moment[0] += 10
        os.utime(path, (moment[0], moment[0]))
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_named_modules_are_taken_with_their_submodules(beside):
    beside("parts.__init__", "")
    beside("parts.inner", "")
    beside("alone", "")
    names = ["parts", "parts.inner", "alone"]
    parts, inner, alone = (importlib.import_module(name) for name in names)
    assert named_modules(()) == {}
    assert named_modules(alone) == named_modules("alone") == {"alone": alone}
    assert named_modules([parts, "alone"]) == {"parts": parts, "parts.inner": inner, "alone": alone}
    assert named_modules("parts.inner") == {"parts.inner": inner}
    assert named_modules("__main__") == {}


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (3, TypeError, "by_value must be modules, or their names: 3"),
        ([None], TypeError, "by_value must be modules, or their names: None"),
        ("not_here", ValueError, "no module 'not_here' is imported here"),
        (types.ModuleType("json"), ValueError, "not the one that is imported under this name"),
        (json, ValueError, "'json' is installed or built in"),
        (sys, ValueError, "'sys' is installed or built in"),
        ("torch.nn", ValueError, "'torch.nn' is installed or built in"),
        ("nvalchemi.data", ValueError, "'nvalchemi.data' runs the ranks"),
    ],
)
def test_what_ranks_can_only_import_is_refused(given, error, words):
    importlib.import_module("nvalchemi.data")
    with pytest.raises(error, match=words):
        named_modules(given)


def test_an_edited_module_is_noticed_until_it_is_imported_again(beside):
    beside("rates", "RATE = 1\ndef rate():\n    return RATE\n")
    rates = importlib.import_module("rates")
    assert edited_since_import(["rates", "json", "", "torch.nn"]) == []
    beside("rates", "RATE = 2\ndef rate():\n    return RATE\n")  # a constant of the same length
    assert edited_since_import(["rates"]) == ["rates"]
    subprocess.run([sys.executable, "-c", "import rates"], cwd=os.path.dirname(rates.__file__))
    assert edited_since_import(["rates"]) == ["rates"]  # though a rank has imported it since
    importlib.reload(rates)
    assert edited_since_import(["rates"]) == []
    beside("rates", "RATE = 2\ndef rate():\n    return RATE\n")  # saved, not changed
    assert edited_since_import(["rates"]) == []


def test_the_first_look_sees_earlier_edits(beside):
    beside("early", "RATE = 1\n")
    early = importlib.import_module("early")
    beside("early", "RATE = 2\n")
    assert edited_since_import(["early"]) == ["early"]  # by the bytecode that is kept
    os.remove(early.__cached__)
    beside("early", "RATE = 1\n")
    assert edited_since_import(["early"]) == []


def test_the_first_look_compares_functions_when_another_process_has_imported_the_edit(beside):
    text = "class C:\n    @staticmethod\n    def rate():\n        return 1\n"
    beside("method", text)
    method = importlib.import_module("method")
    beside("method", text.replace("1", "2"))
    subprocess.run([sys.executable, "-c", "import method"], cwd=os.path.dirname(method.__file__))
    assert edited_since_import(["method"]) == ["method"]
    beside("method", "class C:\n    def rate(\n")
    assert edited_since_import(["method"]) == ["method"]
    os.remove(method.__file__)
    assert edited_since_import(["method"]) == []  # it is gone, and goes by value


def test_what_a_module_imports_is_looked_at_too(beside):
    beside("low", "def rate():\n    return 1\n")
    beside("high", "from low import rate\n")
    importlib.import_module("high")
    beside("low", "def rate():\n    return 2\n")
    assert edited_since_import(["high"]) == ["low"]


def test_what_a_function_imports_when_it_runs_is_looked_at(beside):
    def work():
        def inner():
            import inside

            return inside

        return inner

    beside("inside", "def rate():\n    return 1\n")
    importlib.import_module("inside")
    sent = payload.dump_task(work, (), {}, {}, payload.new_file())
    assert sent.describe_edited() is None
    beside("inside", "def rate():\n    return 2\n")
    sent = payload.dump_task(work, (), {}, {}, payload.new_file())
    assert sent.describe_edited() == (
        "edited since it was imported: inside. The ranks run the file as it is now; to run it "
        "here, too, importlib.reload it, or send what is here: launch(by_value=[inside])"
    )
    told = sent.describe_edited(pool=True)
    assert told is not None and "launch" not in told and "restart() of the pool" in told


def test_what_a_named_module_keeps_to_itself_is_not_blamed(beside):
    beside("guarded", "import threading\nLOCK = threading.Lock()\nbig = b'x' * 120_000_000\n")
    guarded = importlib.import_module("guarded")
    modules = named_modules(guarded)
    file = open(os.devnull)
    with pytest.raises(TypeError, match="^file is an open file"):
        payload.dump_task(lambda: (guarded, file), (), {}, {}, payload.new_file(), None, modules)
    file.close()
    sent = payload.dump_task(lambda: guarded, (), {}, {}, payload.new_file(), None, modules)
    assert sent.describe_large() == "launch() sends guarded.big (120 MB) to the ranks"
    with pytest.raises(TypeError, match="^lock is a lock"):
        lock = guarded.LOCK
        payload.dump_task(lambda: lock, (), {}, {}, payload.new_file(), None, modules)
