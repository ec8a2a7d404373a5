"""DeepSeek V3 and Kimi K2: what their configs say, every switch there and back, YaRN's two corrections apart."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dewconv.converters.exporting import export_checkpoint
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.quantisation import codec_of
from dewconv.converters.source import open_source
from dewconv.dew_core.records import MLA
from dewconv.dew_core.rope import yarn_amplitude, yarn_softmax_correction
from dewconv.families import find
from dewconv.families.errors import FindingsError
from dewconv.families.family import Variant
from dewconv.parity.candidate import build_candidate, reference_run
from dewconv.parity.fixtures import write_checkpoint
from dewconv.parity.gates import close_config
from dewconv.parity.round_trip import compare_sources

FAMILY = find("deepseek_v3")
TINY = FAMILY.variants["untied"].config


def read(**changes):
    return FAMILY.read({key: value for key, value in {**TINY, **changes}.items() if value is not ...})[0]


def test_kimi_k2_is_the_same_family():
    assert find("kimi_k2") is FAMILY
    config = FAMILY.variants["kimi_k2"].config
    fields, _ = FAMILY.read(config)
    assert config["model_type"] == "kimi_k2"
    assert fields.yarn is not None
    assert (fields.yarn.beta_fast, fields.yarn.beta_slow) == (1.0, 1.0)
    assert FAMILY.read({**config, "model_type": "deepseek_v3"})[0] == fields


def test_unset_keys_take_the_class_defaults():
    """`DeepseekV3Config`'s, which are the release's own."""
    fields, notices = FAMILY.read({"model_type": "deepseek_v3"})
    released, _ = FAMILY.read(
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "kv_lora_rank": 512,
            "n_group": 8,
            "n_routed_experts": 256,
            "num_attention_heads": 128,
            "num_hidden_layers": 61,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rope_interleave": True,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
            "v_head_dim": 128,
        }
    )
    assert fields == released
    assert fields.mixer == MLA()
    assert fields.mixture.layers == tuple(range(3, 61))
    assert notices == ()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"q_lora_rank": None}, lambda d: d.mixer.q_lora_rank is None),
        ({"rope_interleave": False}, lambda d: not d.rope_interleave),
        ({"rope_interleave": ...}, lambda d: d.rope_interleave),
        ({"first_k_dense_replace": 0}, lambda d: d.mixture.layers == (0, 1, 2)),
        ({"first_k_dense_replace": 9}, lambda d: d.mixture.layers == ()),
        ({"n_shared_experts": None}, lambda d: d.mixture.shared_features == 0),
        ({"n_shared_experts": 0}, lambda d: d.mixture.shared_features == 0),
        ({"n_shared_experts": 2}, lambda d: d.mixture.shared_features == 36),
        ({"head_dim": 192}, lambda d: d.head_features == 48),
        ({"num_key_value_heads": None}, lambda d: d.kv_heads == 4),
        ({"rms_norm_eps": 1e-5}, lambda d: d.mixer.latent_norm_eps == 1e-6 and d.norm_eps == 1e-5),
    ],
)
def test_switches(changes, found):
    fields = read(**changes)
    assert found(fields)
    assert FAMILY.read(FAMILY.write(fields))[0] == fields


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_layer_freq", 2),
        ("scoring_func", "softmax"),
        ("topk_method", "group_limited_greedy"),
        ("num_key_value_heads", 2),
        ("qk_head_dim", 47),
        ("qk_rope_head_dim", 15),
        ("kv_lora_rank", 0),
        ("n_group", 4),
        ("topk_group", 2),
        ("num_experts_per_tok", 7),
        ("n_shared_experts", -1),
        ("index_topk", 2048),
    ],
)
def test_what_cannot_be_computed_is_refused_by_key(key, value):
    with pytest.raises(FindingsError, match=key):
        read(**{key: value})


@pytest.mark.parametrize("q_lora_rank", [None, 36])
@pytest.mark.parametrize(
    ("first_dense", "shared", "bias", "depths"),
    [(0, None, True, None), (1, 0, False, 1), (5, 2, True, 0), (2, 1, 0, 3)],
)
def test_every_switch_goes_there_and_back(tmp_path, q_lora_rank, first_dense, shared, bias, depths):
    """naming 56. transformers has no class without shared experts: theirs are left out of the file."""
    config = {
        **TINY,
        "q_lora_rank": q_lora_rank,
        "first_k_dense_replace": first_dense,
        "n_shared_experts": shared or 1,
        "attention_bias": bool(bias),
        "num_nextn_predict_layers": depths or 0,
    }
    path = write_checkpoint(tmp_path / "source", Variant(config, "", depths=depths or 0), FAMILY)
    stated = {**config, "n_shared_experts": shared, "num_nextn_predict_layers": depths}
    (path / "config.json").write_text(json.dumps(stated))
    if not shared:
        for file in path.glob("*.safetensors"):
            kept = {name: one for name, one in load_file(file).items() if "shared_experts" not in name}
            save_file(kept, file, metadata={"format": "pt"})
        for index in path.glob("*.index.json"):
            table = json.loads(index.read_text())
            table["weight_map"] = {k: v for k, v in table["weight_map"].items() if "shared_experts" not in k}
            table["metadata"] = {}
            index.write_text(json.dumps(table))
    banks = import_checkpoint(open_source(path), tmp_path / "banks")
    export_checkpoint(banks, tmp_path / "back")
    assert list(compare_sources(open_source(path), open_source(tmp_path / "back"))) == []
    names = set(open_source(path).tensors)
    assert ("model.layers.0.self_attn.q_proj.weight" in names) is (q_lora_rank is None)
    assert {name.split(".")[2] for name in banks.manifest.carried} == {str(3 + depth) for depth in range(depths or 0)}


V3 = json.loads((Path(__file__).parents[1] / "data" / "configs" / "deepseek-ai__DeepSeek-V3.json").read_text())


def test_r1_and_v31_are_the_same_decoder():
    """R1's config is V3's in every field of the architecture; V3.1's quantisation record adds the form of its scales,
    which are float32 as before."""
    fields, notices = FAMILY.read(V3)
    later = {**V3, "quantization_config": {**V3["quantization_config"], "scale_fmt": "ue8m0"}}
    assert later != V3
    assert close_config(FAMILY, later) == []
    assert FAMILY.read(later) == (fields, notices)
    assert codec_of(later) == codec_of(V3)
    assert codec_of(V3).name == "fp8"
    assert notices == ()


def test_scores_a_thousandth_apart_choose_the_same_expert(tmp_path):
    """router-dtype 44: in a bfloat16 file two experts' rows are equal and their float32 biases 1e-3 apart. bfloat16
    scores would tie, and the first of the two would be taken."""
    spec = replace(
        FAMILY.variants["bias_seven"], config={**FAMILY.variants["bias_seven"].config, "num_experts_per_tok": 1}
    )
    path = write_checkpoint(tmp_path / "source", spec, FAMILY)
    held = load_file(path / "model.safetensors")
    for layer in (1, 2):
        stem = f"model.layers.{layer}.mlp.gate."
        held[stem + "weight"][4] = held[stem + "weight"][1]
        bias = held[stem + "e_score_correction_bias"]
        bias.copy_(torch.tensor([3.0, 7.0, 3.0, 3.0, 7.001, 3.0]))
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})
    run = reference_run(path, dtype="bfloat16")
    buffers = [buffer for name, buffer in run.torch.model.named_buffers() if "inv_freq" in name]
    assert buffers
    assert all(buffer.dtype == torch.float32 for buffer in buffers)
    ours = build_candidate(run, run.fields, run.statements).forward(run.probe.tokens, streams=True)
    for layer, theirs in run.forward.routed.items():
        assert (theirs.experts == 4).all()
        assert (ours.routed[layer].experts == 4).all()
        low = torch.from_numpy(theirs.logits).sigmoid().bfloat16() + torch.from_numpy(theirs.bias).bfloat16()
        assert torch.equal(low[..., 1], low[..., 4])


def m(scale, factor=40):
    return 0.1 * scale * math.log(factor) + 1


@pytest.mark.parametrize(
    ("variant", "amplitude", "correction"),
    [
        ("yarn_1_1", 1.0, m(1.0) ** 2),
        ("yarn_707", 1.0, m(0.707) ** 2),
        ("yarn_1_half", m(1.0) / m(0.5), m(0.5) ** 2),
        ("yarn_1_0", m(1.0), 1.0),
    ],
)
def test_yarn_corrects_twice(tmp_path, variant, amplitude, correction):
    """rope 3. A first token has one key to attend, so that neither correction shows at position 0: a reader that
    forgets one agrees there and nowhere else."""
    spec = FAMILY.variants[variant]
    reference = reference_run(write_checkpoint(tmp_path / variant, spec, FAMILY), shortest=spec.length)
    fields = reference.fields
    assert yarn_amplitude(fields.yarn) == pytest.approx(amplitude)
    assert yarn_softmax_correction(fields.yarn) == pytest.approx(correction)
    plain = fields.mixer.head_dim**-0.5

    def errors(candidate):
        logits = build_candidate(reference, candidate, reference.statements).forward(reference.probe.tokens).logits
        found = np.abs(logits - reference.forward.logits).max((0, 2)) / reference.logits_bound
        return found[0], found[1:]

    first, later = errors(fields)
    assert first < 1
    assert later.max() < 1
    wrong = fields.replace(attention_scale=plain)
    if correction == 1.0:
        wrong = fields.replace(attention_scale=plain * m(1.0) ** 2)
    first, later = errors(wrong)
    assert first < 1
    assert later.min() > 10
    if amplitude != 1.0:
        first, later = errors(fields.replace(yarn=replace(fields.yarn, attention_factor=1.0), attention_scale=None))
        assert first < 1
        assert later.min() > 10
