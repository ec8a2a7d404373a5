"""The real command on what it cannot read: every finding of a kind on one line, and which side it is of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_cli import TINY, dewconv_command, fails, succeeds

from dewconv.families.errors import MOST_LINES, Finding, FindingsError, short_list
from dewconv.families.registry import find
from dewconv.parity import write_checkpoint


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    where = tmp_path_factory.mktemp("written")

    def make(name: str) -> Path:
        if not (where / name).exists():
            family = find(name)
            write_checkpoint(where / name, next(iter(family.variants.values())), family)
        return where / name

    return make


def changed(source: Path, to: Path, without: tuple[str, ...] = (), **changes: Any) -> Path:
    shutil.copytree(source, to)
    config = json.loads((to / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in without} | changes
    (to / "config.json").write_text(json.dumps(config))
    return to


class TestAlikeFindings:
    @pytest.mark.parametrize(
        ("changes", "count", "lines"),
        [
            (
                {"moe_intermediate_size": 17},
                54,
                [
                    "mlp.experts.{0-5}.gate_proj.weight: found shape [18, 24], needed shape [17, 24];",
                    "mlp.experts.{0-5}.up_proj.weight: found shape [18, 24], needed shape [17, 24];",
                    "mlp.experts.{0-5}.down_proj.weight: found shape [24, 18], needed shape [24, 17];",
                ],
            ),
            (
                {"num_experts": 9},
                30,
                [
                    "mlp.gate.weight: found shape [6, 24], needed shape [9, 24];",
                    "mlp.experts.{6-8}.gate_proj.weight: found nothing, needed shape [18, 24];",
                    "mlp.experts.{6-8}.up_proj.weight: found nothing, needed shape [18, 24];",
                    "mlp.experts.{6-8}.down_proj.weight: found nothing, needed shape [24, 18];",
                ],
            ),
        ],
    )
    def test_experts_and_layers_are_one_line(self, written, tmp_path, changes, count, lines) -> None:
        path = changed(written("qwen3_moe"), tmp_path / "moe", **changes)
        said = fails("import", path, "out", "--unverified", cwd=tmp_path, lines=20).splitlines()
        assert said[0] == f"dewconv: {path}: {count} findings"
        assert len(said) == 1 + len(lines)
        for line, wanted in zip(said[1:], lines, strict=True):
            assert line.startswith(f"  tensor model.layers.{{0-2}}.{wanted}")
        document = json.loads(dewconv_command("import", path, "out", "--json", cwd=tmp_path).stdout)
        names = [finding["what"] for finding in document["error"]["findings"]]
        assert len(names) == len(set(names)) == count
        assert not any("alike" in name for name in names)
        looked = dewconv_command("inspect", path, cwd=tmp_path)
        assert looked.stdout.partition("\nproblems\n")[2].splitlines() == said[1:]
        assert len(json.loads(dewconv_command("inspect", path, "--json", cwd=tmp_path).stdout)["problems"]) == count

    def test_a_long_list_is_counted(self) -> None:
        findings = [Finding(f"tensor {chr(97 + i % 26)}{chr(97 + i // 26)}", "one", "two", "mend") for i in range(90)]
        lines = str(FindingsError("x", findings)).splitlines()
        assert len(lines) == 1 + MOST_LINES + 1
        assert lines[-1] == f"  and {90 - MOST_LINES} more findings; --json lists every one"

    def test_what_differs_in_more_than_an_index_stays_apart(self) -> None:
        apart = ["tensor a.1.w: found 1, needed 2; x", "tensor a.1.w: found 1, needed 3; x", "tensor w1: found 1, n; x"]
        assert short_list([*apart, "tensor w2: found 1, n; x"]) == [*apart, "tensor w2: found 1, n; x"]

    def test_indices_are_told_where_they_are_every_combination(self) -> None:
        def lines(*at: tuple[int, int]) -> list[str]:
            return short_list([f"tensor a.{layer}.e.{expert}.w: found 1, needed 2; x" for layer, expert in at])

        every = [(layer, expert) for layer in (0, 1, 2, 5) for expert in (3, 7, 8)]
        assert lines(*every) == ["tensor a.{0-2, 5}.e.{3, 7-8}.w: found 1, needed 2; x"]
        assert lines((1, 2), (1, 4)) == ["tensor a.1.e.{2, 4}.w: found 1, needed 2; x"]
        assert lines((0, 1), (1, 2)) == ["tensor a.0.e.1.w and 1 alike: found 1, needed 2; x"]
        assert lines((0, 1), (0, 1)) == ["tensor a.0.e.1.w: found 1, needed 2; x"]
        odd = "1, 3, 5, 7, 9, 11, 13, …, 99"
        assert lines(*((0, expert) for expert in range(1, 101, 2))) == [
            f"tensor a.0.e.{{{odd}}}.w: found 1, needed 2; x"
        ]

    def test_a_size_left_to_the_class_is_named(self, written, tmp_path) -> None:
        path = changed(written("qwen3"), tmp_path / "sizeless", without=("hidden_size",))
        said = fails("import", path, "out", "--unverified", cwd=tmp_path, lines=20).splitlines()
        assert said[1].startswith("  config.json: found no hidden_size (4096 was taken), needed the sizes")
        assert sum("was taken" in line for line in said) == 1
        other = changed(written("qwen3"), tmp_path / "sized", hidden_size=26)
        assert "was taken" not in fails("import", other, "out", "--unverified", cwd=tmp_path, lines=20)


class TestWhichSideIsMeant:
    def nothing(self, path: Path) -> None:
        (path / "model.safetensors").write_bytes(b"")

    def no_json(self, path: Path) -> None:
        (path / "config.json").write_text("{")

    def an_index_of_nothing(self, path: Path) -> None:
        (path / "model.safetensors").unlink()
        (path / "model.safetensors.index.json").write_text("[]")

    def a_missing_shard(self, path: Path) -> None:
        (path / "model.safetensors").unlink()
        (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')

    @pytest.mark.parametrize("fault", ["nothing", "no_json", "an_index_of_nothing", "a_missing_shard"])
    def test_the_directory_is_named(self, tmp_path, fault) -> None:
        shutil.copytree(TINY, tmp_path / "faulty")
        getattr(self, fault)(tmp_path / "faulty")
        for command in (("diff", TINY, "faulty"), ("diff", "faulty", TINY), ("import", "faulty", "out")):
            assert fails(*command, cwd=tmp_path).startswith("dewconv: faulty: ")

    def test_the_config_of_banks_is_named(self, tmp_path) -> None:
        succeeds("import", TINY, "banks", "--unverified", cwd=tmp_path)
        (tmp_path / "banks" / "source" / "config.json").write_text("{")
        assert "dewconv: banks/source/config.json: is not" in fails("export", "banks", "out", cwd=tmp_path)
        assert "dewconv: banks/source/config.json: is not" in fails("diff", TINY, "banks", cwd=tmp_path)
