"""The built wheel holds every module and data file, and its command runs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import dewconv

ROOT = Path(dewconv.__file__).parent
PACKAGES = ("dew_core", "families", "converters", "parity")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from what git would hand to a clone, and from files not committed yet."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return next(out.glob("*.whl"))


def expected() -> set[str]:
    """Every module of the packages, and everything in a package that is data."""
    names = {path.name for path in ROOT.glob("*.py")} | {"py.typed"}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            relative = path.relative_to(ROOT)
            if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in relative.parts):
                names.add(relative.as_posix())
    return {f"dewconv/{name}" for name in names}


def test_the_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected()


def test_the_wheel_names_its_license_and_entry_points(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "dewconv = dewconv.__main__:main" in entry_points
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["dewconv.families"]
    for name, value in declared.items():
        assert f"{name} = {value}" in entry_points


def test_the_wheel_runs_from_another_environment(wheel: Path, tmp_path: Path) -> None:
    """The command of the unpacked wheel, with this environment's dependencies and without its dewconv."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    script = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]; "
        f"sys.path.insert(0, {str(site)!r}); "
        "import dewconv; from pathlib import Path; "
        f"assert Path(dewconv.__file__).is_relative_to({str(site)!r}), dewconv.__file__; "
        "from dewconv.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    for arguments in (["--help"], ["families", "--json"], ["inspect", str(ROOT / "examples" / "tiny-qwen3")]):
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_every_package_directory_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(("dewconv", *path.parent.relative_to(ROOT).parts)) for path in expected_inits()}
    assert set(declared) == found


def expected_inits() -> list[Path]:
    return [ROOT / "__init__.py", *(path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py"))]


def test_the_version_is_stated_once_in_two_places() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == dewconv.__version__
