"""The family that CONTRIBUTING.md is written around, as a plugin of another distribution."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import dewconv

ROOT = Path(dewconv.__file__).parent
EXAMPLE = ROOT / "docs" / "example_family"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the example as an installed distribution with an entry point."""
    site = tmp_path_factory.mktemp("site")
    (site / "llama_example.py").write_text((EXAMPLE / "llama.py").read_text())
    info = site / "llama_example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llama-example\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dewconv.families]\nllama = llama_example:FAMILY\n")
    return site


def command(plugin: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = (
        f"import sys; sys.path.insert(0, {str(plugin)!r}); from dewconv.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=plugin)


def test_the_guide_names_the_example() -> None:
    assert "docs/example_family/llama.py" in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_plugin_is_listed(plugin: Path) -> None:
    rows = json.loads(command(plugin, "families", "--json").stdout)
    assert {"llama", "qwen3"} <= {row["family"] for row in rows}
    entries = json.loads(command(plugin, "matrix").stdout)
    assert [row["variant"] for row in entries if row["family"] == "llama"] == ["untied", "tied", "llama3"]


@pytest.mark.parametrize("variant", ["untied", "tied", "llama3"])
def test_every_variant_is_equal(plugin: Path, variant: str) -> None:
    done = command(plugin, "verify", "--family", "llama", "--variant", variant, "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["passed"] is True
    assert {check["name"] for check in report["checks"] if check["passed"]} >= {"logits", "layers", "round_trip"}
