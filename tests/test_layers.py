"""The architecture, held by the syntax trees: one-way imports, small files, a light start."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "nvalchemi"
# A module may import from its own layer and from those before it.
LAYERS = ["distributed", "data", "models", "hooks", "training", "sharding", "notebook"]
# Names that scripts written for the peer import from an earlier layer: resolved on first use only.
LAZY_ALIASES = {"nvalchemi.hooks": ("nvalchemi.training.context",)}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import, also inside functions and by ``import_module``."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                above = parents[: len(parents) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield node.lineno, base
            # `from nvalchemi import data` names the module only in its list of names.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def forbidden_imports(source: str, module: str, is_package: bool) -> list[str]:
    """Imports in ``source`` that point to a later layer, as "line: name"."""
    own = layer_of(module)
    found = []
    for line, name in imported_modules(ast.parse(source), module, is_package):
        if name.split(".")[0] != "nvalchemi":
            continue
        target = layer_of(name)
        if target not in LAYERS:  # nvalchemi itself, or a name of its __init__
            continue
        if name.startswith(LAZY_ALIASES.get(module, ("-",))):
            continue
        if own is None or LAYERS.index(target) > LAYERS.index(own):
            found.append(f"{line}: {name}")
    return sorted(set(found))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_only_to_earlier_layers(path: Path) -> None:
    module = module_name(path)
    assert layer_of(module) in [None, *LAYERS], f"{module} belongs to no layer: add it to LAYERS"
    found = forbidden_imports(path.read_text(), module, path.name == "__init__.py")
    assert not found, f"{module} may import only from itself and earlier layers of {LAYERS}"


@pytest.mark.parametrize(
    "line",
    [
        "from nvalchemi.training import TrainingStrategy",
        "import nvalchemi.notebook.launch",
        "from nvalchemi import training",
        "from ..training.hooks import DDPHook",
        "from .. import sharding",
        "def f():\n    import nvalchemi.notebook",
        "import importlib\nimportlib.import_module('nvalchemi.notebook')",
    ],
)
def test_the_check_itself_sees_each_way_to_import(line: str) -> None:
    assert forbidden_imports(line, "nvalchemi.data.batch", is_package=False)


def test_the_check_itself_allows_earlier_layers() -> None:
    source = "import torch\nfrom nvalchemi import __version__\nfrom nvalchemi.data import Batch\n"
    assert forbidden_imports(source, "nvalchemi.training.strategy", is_package=False) == []


def test_readme_and_contributing_name_the_layers_that_exist() -> None:
    assert not [layer for layer in LAYERS if not (PACKAGE / layer / "__init__.py").exists()]
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (PACKAGE.parent / name).read_text()
        sentence = text.partition("Imports point one way:")[2].partition(";")[0]
        assert re.findall(r"`(\w+)`", sentence) == LAYERS, name


def test_import_nvalchemi_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, nvalchemi; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", LAZY_ALIASES)
def test_lazy_aliases_load_nothing_by_themselves(module: str) -> None:
    later = LAYERS[LAYERS.index(str(layer_of(module))) + 1 :]
    code = f"import sys, {module}; print([n for n in sys.modules if n.startswith('nvalchemi.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert module in done.stdout
    assert not [layer for layer in later if f"'nvalchemi.{layer}" in done.stdout]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_and_functions_stay_small(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 400, "this file has two subjects: split it"
    long = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
            if lines > 60:
                long.append(f"{node.name}: {lines} lines")
    assert not long, "a function has at most 60 lines without its docstring"


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def test_no_module_is_named_after_nothing() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    names = [p for p in PACKAGE.rglob("*") if p.stem.strip("_") in vague and p.suffix != ".pyc"]
    assert not names, "a name goes where its data comes from"
