"""Families are found by model_type through entry points, ours and a plugin's by the same route."""

import os
import subprocess
import sys
import textwrap

import pytest

from dewconv.families import ConversionError, families, find, model_types


def test_every_model_type_is_owned():
    assert set(model_types()) >= {"qwen3", "gemma3_text", "gemma3"}
    assert find("gemma3") is find("gemma3_text")
    assert [family.name for family in families()] == sorted({family.name for family in families()})


def test_an_unknown_model_type_is_refused_with_the_nearest():
    with pytest.raises(ConversionError, match="Did you mean qwen3"):
        find("qwen33")


def run(tmp_path, points, code):
    """`code` in a fresh interpreter that sees a plugin distribution with these entry points."""
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dewconv.families]\n" + points)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, check=False
    )


def test_a_plugin_is_found_and_imports_one_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\nfrom dewconv.families.qwen3 import FAMILY as Q\n"
        "FAMILY = replace(Q, name='mine', model_types=('mine',))\n"
    )
    done = run(
        tmp_path,
        "mine = mine:FAMILY\n",
        """
        import sys
        from dewconv.families import find
        assert find("mine").name == "mine"
        assert "dewconv.families.gemma3" not in sys.modules
        assert not {"jax", "torch", "transformers"} & set(sys.modules)
        """,
    )
    assert done.returncode == 0, done.stderr


def test_two_owners_are_refused_naming_both(tmp_path):
    done = run(
        tmp_path,
        "qwen3 = mine:FAMILY\n",
        """
        from dewconv.families import find, ConversionError
        try:
            find("qwen3")
        except ConversionError as error:
            print(error)
        """,
    )
    assert "two owners" in done.stdout
    assert "mine:FAMILY (plugin)" in done.stdout
    assert "dewconv.families.qwen3:FAMILY (dewconv)" in done.stdout


def test_a_broken_plugin_fails_when_asked_for(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    done = run(
        tmp_path,
        "broken = broken:FAMILY\n",
        """
        from dewconv.families import find, ConversionError
        assert find("qwen3").name == "qwen3"
        try:
            find("broken")
        except ConversionError as error:
            print(error)
        """,
    )
    assert "broken:FAMILY" in done.stdout
    assert "no_such_module" in done.stdout
