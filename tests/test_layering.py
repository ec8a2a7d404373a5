"""Imports point down the house, and the light commands stay light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import dewconv

ROOT = Path(dewconv.__file__).parent
FOLDERS = ("dew_core", "families", "converters", "parity")
"""Lowest first. A module imports its own folder and those before it; the files at the root import any."""
TOP = len(FOLDERS)
HEAVY = ("jax", "jaxlib", "flax", "torch", "transformers")
TINY = ROOT / "examples" / "tiny-qwen3"


@dataclass(frozen=True)
class Import:
    """One imported module: `at` its module level (1 for a statement that runs on import), `names` taken from it."""

    module: str
    names: tuple[str, ...]
    level: int
    runs: bool
    line: int


def modules() -> list[Path]:
    return sorted([*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))])


def layer(parts: tuple[str, ...]) -> int:
    return FOLDERS.index(parts[0]) if parts and parts[0] in FOLDERS else TOP


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(tree: ast.AST, runs: bool = True) -> Iterator[Import]:
    """Every import of a module; `runs` says whether it runs when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, (), 0, runs, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(name.name for name in node.names)
            yield Import(node.module or "", names, node.level, runs, node.lineno)
        else:
            later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_type_checking(node)
            yield from imports(node, runs and not later)


def faults(source: str, parts: tuple[str, ...]) -> list[str]:
    """What a module at `parts` (("converters", "plan")) may not import, one line each."""
    found = []
    own = layer(parts[:-1])
    for item in imports(ast.parse(source)):
        at = f"{'/'.join(parts)}.py:{item.line}"
        top = item.module.split(".")[0]
        if item.level == 0:
            if top == "dewconv":
                found.append(f"{at}: imports {item.module} absolutely, use a relative import")
            if top in ("torch", "transformers") and (not parts or parts[0] != "parity"):
                found.append(f"{at}: imports {top} outside parity")
            if top in ("jax", "flax") and parts[0] == "families":
                found.append(f"{at}: a family imports {top}")
            if top in ("jax", "flax", "jaxlib") and parts[0] == "converters" and item.runs:
                found.append(f"{at}: imports {top} when it is imported")
            continue
        base = parts[:-1][: len(parts) - item.level]
        target = (*base, *(item.module.split(".") if item.module else ()))
        # `from . import console` names modules; `from .console import say` names what is in one.
        reached = [(*target, name) for name in item.names] if not item.module else [target]
        for path in reached:
            if layer(path[:1]) > own:
                found.append(f"{at}: imports {'.'.join(path)}, which is above it")
        for name in item.names:
            if name.startswith("_") and not name.startswith("__"):
                found.append(f"{at}: imports the private name {name}")
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_down(path: Path) -> None:
    relative = path.relative_to(ROOT).with_suffix("")
    assert faults(path.read_text(), relative.parts) == []


@pytest.mark.parametrize("path", sorted((ROOT / "families").glob("*.py")), ids=lambda path: path.name)
def test_a_family_imports_no_other_family(path: Path) -> None:
    language = {
        "blocks",
        "errors",
        "family",
        "fields",
        "generation_keys",
        "indexers",
        "mixtures",
        "registry",
        "rope",
        "rules",
        "spelling",
        "__init__",
    }
    if path.stem in language:
        own = {item.module for item in imports(ast.parse(path.read_text())) if item.level == 1}
        assert own <= language
        return
    near = {item.module for item in imports(ast.parse(path.read_text())) if item.level == 1}
    families = {other.stem for other in path.parent.glob("*.py")} - language
    assert near & families == set()


@pytest.mark.parametrize(
    ("parts", "line", "said"),
    [
        (("dew_core", "block"), "from ..families.rules import View", "above it"),
        (("families", "qwen3"), "from ..converters import plan", "above it"),
        (("converters", "plan"), "from ..parity.results import Report", "above it"),
        (("converters", "plan"), "from .. import cli", "above it"),
        (("converters", "plan"), "from ..cli import run", "above it"),
        (("converters", "plan"), "def f():\n    import torch", "outside parity"),
        (("cli",), "import transformers.models", "outside parity"),
        (("families", "qwen3"), "import jax.numpy", "a family imports jax"),
        (("converters", "plan"), "import jax", "when it is imported"),
        (("converters", "plan"), "from .banks import _private", "private name"),
        (("cli",), "from dewconv.converters import plan", "absolutely"),
    ],
)
def test_the_check_finds(parts: tuple[str, ...], line: str, said: str) -> None:
    found = faults(line, parts)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (("cli",), "from .parity.verification import verify"),
        (("cli",), "from . import console"),
        (("parity", "verify"), "import torch"),
        (("converters", "loading"), "def f():\n    import jax"),
        (("converters", "loading"), "if TYPE_CHECKING:\n    import jax"),
        (("converters", "plan"), "from ..families.rules import View"),
        (("converters", "plan"), "from .banks import Banks"),
    ],
)
def test_the_check_allows(parts: tuple[str, ...], line: str) -> None:
    assert faults(line, parts) == []


LOADED = f"""
import json, sys
from dewconv.cli import run
code = run(sys.argv[1:])
found = sorted(name for name in {HEAVY!r} if name in sys.modules)
print(json.dumps([code, found]), file=sys.stderr)
"""


def loaded(*arguments: str) -> list[str]:
    """The heavy packages that a command has imported."""
    done = subprocess.run([sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, check=True)
    code, found = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    return found


def test_light_commands_import_nothing_heavy(tmp_path: Path) -> None:
    banks, out = str(tmp_path / "banks"), str(tmp_path / "out")
    assert loaded("--help") == []
    assert loaded("import", "--help") == []
    assert loaded("inspect", str(TINY)) == []
    assert loaded("import", str(TINY), banks, "--unverified") == []
    assert loaded("inspect", banks) == []
    assert loaded("export", banks, out) == []
    assert loaded("diff", str(TINY), banks) == []
    assert loaded("families") == []
    assert loaded("matrix") == []


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = f"import sys, dewconv\nprint([name for name in {(*HEAVY, 'numpy')!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_heavy_check_can_fail() -> None:
    script = "import sys, dewconv\ndewconv.load\nimport dewconv.dew_core.norms\nprint('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
