"""The real command on what converters of these families get wrong: spellings, ties, experts, foreign code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cli import as_json, content, dewconv_command, fails, succeeds

import dewconv
from dewconv.families import find
from dewconv.parity import write_checkpoint


def checkpoint(to: Path, family: str, variant: str) -> Path:
    owner = find(family)
    return write_checkpoint(to, owner.variants[variant], owner)


def reconfigured(path: Path, drop: tuple[str, ...] = (), **keys: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in drop} | keys))
    return path


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


class TestRopeSpellings:
    """One base in either place is one model; two bases are refused; each comes back as it was spelled."""

    def test_either_place_gives_the_same_logits(self, tmp_path: Path) -> None:
        old = checkpoint(tmp_path / "old", "qwen3", "untied")
        new = reconfigured(
            checkpoint(tmp_path / "new", "qwen3", "untied"),
            ("rope_theta", "rope_scaling"),
            rope_parameters={"rope_type": "default", "rope_theta": 1000000},
        )
        tokens = np.arange(40)[None]
        logits = []
        for source in (old, new):
            succeeds("import", source, f"{source.name}-banks", "--quiet", cwd=tmp_path)
            succeeds("export", f"{source.name}-banks", f"{source.name}-back", "--quiet", cwd=tmp_path)
            assert content(tmp_path / f"{source.name}-back") == content(source)
            model, variables = dewconv.load(tmp_path / f"{source.name}-banks")
            assert model.rope_theta == 1e6
            logits.append(np.asarray(model.apply(variables, tokens)))
        np.testing.assert_array_equal(*logits)

    def test_two_bases_are_refused(self, tmp_path: Path) -> None:
        source = reconfigured(checkpoint(tmp_path / "both", "qwen3", "untied"), rope_parameters={"rope_theta": 5e5})
        message = fails("import", source, "banks", cwd=tmp_path)
        assert "'rope_theta': found 500000.0 in rope_parameters and 1000000 in rope_theta" in message
        assert not (tmp_path / "banks").exists()


class TestHeads:
    """A tied config: no head, an equal one, a different one; an untied config without one."""

    @pytest.mark.parametrize("variant", ["tied", "tied_copy", "tied_different"])
    def test_each_comes_back_with_its_own_tensors(self, tmp_path: Path, variant: str) -> None:
        source = checkpoint(tmp_path / "source", "qwen3", variant)
        done = succeeds("import", source, "banks", cwd=tmp_path)
        assert ("warning: lm_head.weight differs" in done.stderr) is (variant == "tied_different")
        succeeds("export", "banks", "back", cwd=tmp_path)
        assert content(tmp_path / "back") == content(source)

    def test_an_untied_head_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        source = reconfigured(checkpoint(tmp_path / "source", "qwen3", "tied"), tie_word_embeddings=False)
        message = fails("import", source, "banks", cwd=tmp_path, lines=3)
        assert "tensor lm_head.weight: found nothing, needed shape [131, 24]" in message


class TestSizes:
    """What config.json and the tensors disagree about is refused with both numbers."""

    def test_an_absent_head_dim_is_the_classes(self, tmp_path: Path) -> None:
        """128, and not hidden / heads: 24 / 4 would be a third number, and the tensors have 10."""
        source = reconfigured(checkpoint(tmp_path / "source", "qwen3", "untied"), ("head_dim",))
        document = json.loads(dewconv_command("import", source, "banks", "--json", cwd=tmp_path).stdout)
        findings = {one["what"]: one for one in document["error"]["findings"]}
        query = findings["tensor model.layers.0.self_attn.q_proj.weight"]
        assert (query["found"], query["needed"]) == ("shape [40, 24]", "shape [512, 24]")
        assert findings["tensor model.layers.0.self_attn.q_norm.weight"]["needed"] == "shape [128]"

    def test_a_padded_vocabulary_is_refused(self, tmp_path: Path) -> None:
        def pad(tensors: dict[str, torch.Tensor]) -> None:
            for name in ("model.embed_tokens.weight", "lm_head.weight"):
                tensors[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, 125))

        source = rewritten(checkpoint(tmp_path / "source", "qwen3", "untied"), pad)
        message = fails("import", source, "banks", cwd=tmp_path, lines=4)
        assert "model.embed_tokens.weight: found shape [256, 24], needed shape [131, 24]" in message
        assert "lm_head.weight: found shape [256, 24], needed shape [131, 24]" in message


class TestExperts:
    """Experts that are missing, and two forms in one layer: layer and expert are named."""

    def test_missing_experts_are_listed(self, tmp_path: Path) -> None:
        def drop(tensors: dict[str, torch.Tensor]) -> None:
            for name in [name for name in tensors if ".1.mlp.experts.2." in name or ".1.mlp.experts.4." in name]:
                del tensors[name]

        source = rewritten(checkpoint(tmp_path / "source", "qwen3_moe", "experts"), drop)
        message = fails("import", source, "banks", "--unverified", cwd=tmp_path, lines=5)
        for part in ("gate_proj", "up_proj", "down_proj"):
            assert f"tensor model.layers.1.mlp.experts.{{2, 4}}.{part}.weight: found nothing" in message
        assert "layers.0" not in message
        assert not (tmp_path / "banks").exists()

    def test_two_forms_in_one_layer_and_a_missing_expert_are_told_together(self, tmp_path: Path) -> None:
        fused = load_file(checkpoint(tmp_path / "fused", "qwen3_moe", "fused") / "model.safetensors")

        def mix(tensors: dict[str, torch.Tensor]) -> None:
            tensors["model.layers.1.mlp.experts.gate_up_proj"] = fused["model.layers.1.mlp.experts.gate_up_proj"]
            for name in [name for name in tensors if ".1.mlp.experts.2." in name]:
                del tensors[name]

        source = rewritten(checkpoint(tmp_path / "source", "qwen3_moe", "experts"), mix)
        message = fails("import", source, "banks", "--unverified", cwd=tmp_path, lines=7)
        assert "the experts of layer 1: found one tensor an expert" in message
        assert "fused (model.layers.1.mlp.experts.gate_up_proj)" in message
        assert "model.layers.1.mlp.experts.2.gate_proj.weight" in message

    @pytest.mark.parametrize("where", ["import", "export"])
    def test_a_cast_leaves_the_correction_bias_its_bits(self, tmp_path: Path, where: str) -> None:
        source = checkpoint(tmp_path / "source", "glm4_moe", "bias_seven")
        cast = ("--dtype", "float16")
        succeeds("import", source, "banks", "--unverified", *(cast if where == "import" else ()), cwd=tmp_path)
        succeeds("export", "banks", "back", *(cast if where == "export" else ()), cwd=tmp_path)
        before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "back"))
        names = [name for name in before if name.endswith("e_score_correction_bias")]
        assert names
        for name in names:
            assert before[name].dtype == torch.float32
            assert torch.equal(before[name].view(torch.int32), after[name].view(torch.int32))
        assert after["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.float16


def mutated(tensors: dict[str, torch.Tensor], kind: str) -> None:
    q, gate = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"
    if kind == "rope":
        # Halves dealt to neighbours, as a loader does that takes the other convention.
        heads = tensors[q].reshape(4, 2, 5, 24)
        tensors[q] = heads.transpose(1, 2).reshape(40, 24)
    elif kind == "scale":
        tensors[q] = tensors[q] * 1.001
    else:
        up = gate.replace("gate", "up")
        tensors[gate], tensors[up] = tensors[up], tensors[gate]


@pytest.mark.parametrize("kind", ["rope", "scale", "gate_up"])
def test_verify_fails_on_a_rule_that_is_off(tmp_path: Path, kind: str) -> None:
    source = checkpoint(tmp_path / "source", "qwen3", "biases")
    other = shutil.copytree(source, tmp_path / "other")
    rewritten(other, lambda tensors: mutated(tensors, kind))
    report = as_json(
        "verify", other, "--against", source, "--checks", "logits", "--dtype", "float32", cwd=tmp_path, code=1
    )
    check = report["checks"][0]
    assert report["passed"] is False
    assert check["error"] > 3 * check["bound"]
    assert {"row", "position", "token", "logit"} <= set(check["worst"])
    assert {"mean_error", "top1_agreement", "kl_mean", "kl_max"} <= set(check["figures"])


TRAP = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


def test_remote_code_and_pickles_beside_the_weights_are_told_and_never_run(tmp_path: Path) -> None:
    source = reconfigured(
        checkpoint(tmp_path / "source", "qwen3", "untied"),
        auto_map={"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XModel"},
    )
    for name in ("configuration_x.py", "modeling_x.py"):
        (source / name).write_text(TRAP)
    (source / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    done = succeeds("import", source, "banks", cwd=tmp_path)
    assert "holds pickled weights; the safetensors files are used" in done.stderr
    assert "configuration_x.py, modeling_x.py (code, which is never run" in done.stderr
    report = as_json("verify", source, "--checks", "logits", "--dtype", "float32", cwd=tmp_path)
    assert report["passed"] is True
    succeeds("export", "banks", "back", cwd=tmp_path)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["auto_map"]["AutoConfig"] == "configuration_x.XConfig"
    assert not list(tmp_path.rglob("ran"))
    assert not list((tmp_path / "back").glob("*.py"))


def test_three_ends_of_text_come_back_as_three_and_side_files_are_listed(tmp_path: Path) -> None:
    source = reconfigured(checkpoint(tmp_path / "source", "gemma3", "text"), eos_token_id=1)
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    (source / "tokenizer_config.json").write_text('{"eos_token": "<end_of_turn>"}')
    made = as_json("import", source, "banks", cwd=tmp_path)
    assert set(made["side_files"]) == {"generation_config.json", "tokenizer_config.json", "chat_template.jinja"}
    succeeds("export", "banks", "back", cwd=tmp_path)
    assert content(tmp_path / "back") == content(source)


def test_conversion_runs_where_torch_and_jax_cannot_be_imported(tmp_path: Path) -> None:
    for name in ("torch", "jax", "jaxlib", "flax", "transformers"):
        (tmp_path / "none" / name).mkdir(parents=True)
        (tmp_path / "none" / name / "__init__.py").write_text(f"raise ImportError('{name} is not here')\n")
    env = {"PYTHONPATH": str(tmp_path / "none")}
    source = checkpoint(tmp_path / "source", "glm4_moe", "qk_norm")
    succeeds("inspect", source, cwd=tmp_path, env=env)
    succeeds("import", source, "banks", "--unverified", cwd=tmp_path, env=env)
    succeeds("export", "banks", "back", cwd=tmp_path, env=env)
    succeeds("diff", source, "back", cwd=tmp_path, env=env)
    assert content(tmp_path / "back") == content(source)
    assert "is not here" in dewconv_command("verify", source, cwd=tmp_path, env=env).stderr


@pytest.mark.parametrize(
    ("release", "billions", "runs"),
    [
        ("Qwen__Qwen3-30B-A3B", 30.5, ["layers_0_47"]),
        ("Qwen__Qwen3-235B-A22B-FP8", 235.1, ["layers_0_93"]),
        ("zai-org__GLM-4.5-Air", None, ["layers_0", "layers_1_45"]),
    ],
)
def test_a_release_is_inspected_by_its_config_alone(
    tmp_path: Path, release: str, billions: float | None, runs: list[str]
) -> None:
    shutil.copy(Path(__file__).parent / "data" / "configs" / f"{release}.json", tmp_path / "config.json")
    found = as_json("inspect", tmp_path, cwd=tmp_path)
    assert [run["bank"] for run in found["runs"]] == runs
    assert billions is None or abs(found["parameters"] / (billions * 1e9) - 1) < 0.005
    text = succeeds("inspect", tmp_path, cwd=tmp_path).stdout
    assert f"{found['parameters']:,}" in text
    assert all(run in text for run in runs)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["config.json"]
