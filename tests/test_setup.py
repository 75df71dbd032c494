"""pyproject.toml, constraints.txt, README and docs/dependencies.md say the same."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nvalchemi

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# What `make` installs, and so what constraints.txt must pin; the other extras are a user's choice.
INSTALLED_EXTRAS = ["test", "xtb", "dev", "lab"]
FEATURE_EXTRAS = ["pymatgen", "tensorboard", "wandb", "ray"]
ALL_REQUIREMENTS = [Requirement(r) for r in sum(EXTRAS.values(), PROJECT["dependencies"])]


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): r for r in found}


def pinned_version(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", f"{requirement} must be an exact version"
    return specifier.version


def test_constraints_pin_what_pyproject_asks() -> None:
    asked = PROJECT["dependencies"] + [r for extra in INSTALLED_EXTRAS for r in EXTRAS[extra]]
    for requirement in map(Requirement, asked):
        pin = pins().get(canonicalize_name(requirement.name))
        assert pin is not None, f"constraints.txt has no line for {requirement.name}"
        assert requirement.specifier.contains(pinned_version(pin)), f"{pin} is not {requirement}"


def test_constraints_name_versions_and_no_place() -> None:
    for requirement in pins().values():
        assert requirement.url is None
        assert "+" not in pinned_version(requirement), "a local version fits one index only"


def test_makefile_installs_the_extras_that_are_pinned() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert f"EXTRAS := {','.join(INSTALLED_EXTRAS)}\n" in makefile


def test_version_has_one_source() -> None:
    assert "version" in PROJECT["dynamic"]
    assert version("nvalchemi") == nvalchemi.__version__


@pytest.mark.parametrize("requirement", ALL_REQUIREMENTS, ids=lambda r: r.name)
def test_each_dependency_has_its_line(requirement: Requirement) -> None:
    lines = (ROOT / "docs" / "dependencies.md").read_text().splitlines()
    (line,) = [x for x in lines if x.startswith(f"| `{requirement.name}` |")]
    assert all(len(part.strip()) > 2 for part in line.strip("|").split("|"))


def test_dependencies_lists_nothing_else() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text()
    listed = set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.M))
    assert listed == {r.name for r in ALL_REQUIREMENTS}


def test_packages_that_no_code_uses_yet_are_marked_as_such() -> None:
    files = [*ROOT.glob("nvalchemi/**/*.py"), *ROOT.glob("examples/**/*.py")]
    code = "\n".join(path.read_text() for path in [*files, *ROOT.glob("notebooks/*.ipynb")])
    optional = [r for extra in ("xtb", *FEATURE_EXTRAS) for r in EXTRAS[extra]]
    for name in (Requirement(r).name for r in PROJECT["dependencies"] + optional):
        module = name.removeprefix("nvidia-")
        used = re.search(rf"\b(import|from) {module}\b|find_spec\(.{module}", code) is not None
        text = (ROOT / "docs" / "dependencies.md").read_text()
        (line,) = [x for x in text.splitlines() if x.startswith(f"| `{name}` |")]
        assert ("to come: " in line) != used, f"{name}: used {used}, docs/dependencies.md: {line}"


def tree_files(readme: str) -> list[str]:
    """Paths of the files in README's tree: two blanks of indent a level, folders end in "/"."""
    (tree,) = [b for b in re.findall(r"```text\n(.*?)```", readme, re.S) if "nvalchemi/\n" in b]
    folders: list[str] = []
    files = []
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        if name.endswith("/"):
            folders.append(name)
        else:
            files.append("".join([*folders, name]))
    return files


def test_readme_tree_names_exactly_the_files_of_the_package() -> None:
    listed = [f for f in tree_files((ROOT / "README.md").read_text()) if f.startswith("nvalchemi/")]
    out = subprocess.run(
        ["git", "ls-files", "nvalchemi"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    # The sub-packages' __init__ files only re-export: their folder's line stands for them.
    exist = [f for f in out.split() if f.count("/") == 1 or not f.endswith("/__init__.py")]
    assert sorted(listed) == sorted(exist)


def test_readme_shows_both_commands_in_its_first_screen() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:25])
    assert "make demo" in first_screen
    assert "make test" in first_screen


def test_readme_names_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(((?!https?:|#)[^)]+)\)", readme)
    missing = [link for link in links if not (ROOT / link.split("#")[0]).exists()]
    assert not missing


def test_readme_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("here on") == 2
    assert done.stdout.count("6.0") == 2
