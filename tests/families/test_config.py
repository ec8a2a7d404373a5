"""config.json <-> decoder fields: every key claimed, every spelling read, everything rewritten equal."""

import copy
import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from dewconv.dew_core.fields import DecoderFields
from dewconv.dew_core.layers import layer_plan
from dewconv.dew_core.records import RopeScaling, YarnScaling
from dewconv.families import FindingsError, families, find

QWEN3, GEMMA3 = find("qwen3"), find("gemma3_text")
VARIANTS = [(family, name) for family in families() for name in family.variants]
CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def qwen(**changes):
    return {**QWEN3.variants["untied"].config, **changes}


def gemma(**changes):
    return {**GEMMA3.variants["text"].config, **changes}


def less(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def findings(family, config):
    with pytest.raises(FindingsError) as caught:
        family.read(config)
    return [finding.what for finding in caught.value.findings]


@pytest.mark.parametrize(("family", "name"), VARIANTS, ids=lambda v: getattr(v, "name", v))
def test_a_variant_reads_and_is_rewritten_equal(family, name):
    config = dict(family.variants[name].config)
    before = copy.deepcopy(config)
    fields, _ = family.read(config)
    assert config == before
    assert family.rewrite(config, fields) == config
    assert list(family.rewrite(config, fields)) == list(config)
    assert family.read(family.write(fields))[0] == fields
    assert DecoderFields.from_json(json.loads(json.dumps(fields.to_json()))) == fields


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_a_released_config_closes(path):
    config = json.loads(path.read_text())
    family = find(config["model_type"])
    fields, notices = family.read(config)
    assert family.rewrite(config, fields) == config
    assert family.read(family.write(fields))[0] == fields
    said = "YaRN" if family.name == "olmo3" else None
    assert len(notices) == (0 if said is None else 1)
    assert said is None or said in notices[0]


def test_an_unknown_key_is_refused_by_name():
    assert findings(QWEN3, qwen(surprise_gate=True, logit_bias=0.5)) == [
        "config key 'surprise_gate'",
        "config key 'logit_bias'",
    ]


def test_all_findings_come_together():
    found = findings(QWEN3, qwen(hidden_size=True, head_dim=0, rms_norm_eps=float("nan"), hidden_act="relu", extra=1))
    assert found == [
        f"config key {key!r}" for key in ("hidden_size", "head_dim", "rms_norm_eps", "hidden_act", "extra")
    ]


@pytest.mark.parametrize("value", [True, 0, -3, 2.5, "24", None, float("inf")])
def test_a_size_is_a_whole_number(value):
    assert findings(QWEN3, qwen(vocab_size=value)) == ["config key 'vocab_size'"]


def test_another_model_type_is_refused():
    assert findings(QWEN3, qwen(model_type="qwen3_5")) == ["config key 'model_type'"]
    wrapper = dict(GEMMA3.variants["wrapper_hub"].config)
    assert findings(QWEN3, wrapper)[0] == "config key 'model_type'"
    assert findings(GEMMA3, {**wrapper, "text_config": {**wrapper["text_config"], "model_type": "gemma3n_text"}}) == [
        "config key 'model_type'"
    ]


# rope


def theta(fields, kind=None):
    plan = layer_plan(fields)
    return plan.kinds[kind or plan.specs[0].layer_type].rope_theta


def test_rope_theta_in_either_place_is_one_value():
    top = QWEN3.read(qwen(rope_theta=1e6))[0]
    inside = QWEN3.read(less(qwen(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}), "rope_theta"))[0]
    both = QWEN3.read(qwen(rope_parameters={"rope_theta": 1e6}, rope_theta=1e6))[0]
    assert top == inside == both
    assert theta(top) == 1e6


def test_conflicting_rope_spellings_are_refused():
    assert findings(QWEN3, qwen(rope_parameters={"rope_theta": 5e5}, rope_theta=1e6)) == ["config key 'rope_theta'"]
    assert findings(QWEN3, qwen(rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 2.0})) == [
        "config key 'rope type'"
    ]


def test_the_default_base_is_the_config_class():
    assert theta(QWEN3.read(less(qwen(), "rope_theta", "rope_scaling"))[0]) == 10000.0
    bare = GEMMA3.read(less(gemma(), "rope_theta", "rope_local_base_freq", "rope_scaling"))[0]
    assert theta(bare, "full_attention") == 1e6
    assert theta(bare, "sliding_attention") == 1e4


def test_gemmas_spellings_of_rope_are_one():
    """rope_theta and rope_local_base_freq beside rope_scaling; rope_parameters by layer type; either with `type`."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = gemma(rope_theta=5e5, rope_local_base_freq=5e3, rope_scaling=scaling)
    older = {**old, "rope_scaling": {"type": "linear", "factor": 8.0}}
    new = {
        **less(old, "rope_theta", "rope_local_base_freq", "rope_scaling"),
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    }
    read = [GEMMA3.read(config)[0] for config in (old, older, new)]
    assert read[0] == read[1] == read[2]
    assert (theta(read[0], "full_attention"), theta(read[0], "sliding_attention")) == (5e5, 5e3)
    assert findings(GEMMA3, {**new, "rope_theta": 1e6}) == ["config key 'rope_theta'"]
    assert findings(GEMMA3, {**new, "rope_local_base_freq": 1e4}) == ["config key 'rope_theta'"]


def test_unknown_rope_types_and_members_are_refused_by_name():
    assert findings(QWEN3, qwen(rope_scaling={"type": "dynamic", "factor": 2.0})) == [
        "config key 'rope_parameters.rope_type'"
    ]
    assert findings(QWEN3, qwen(rope_scaling={"type": "linear", "factor": 2.0, "beta_fast": 3})) == [
        "config key 'rope_parameters.beta_fast'"
    ]
    assert findings(QWEN3, qwen(rope_scaling={"type": "linear"})) == ["config key 'rope_parameters.factor'"]
    assert findings(QWEN3, qwen(rope_scaling="linear")) == ["config key 'rope_scaling'"]


def test_yarn_defaults_and_fallbacks():
    fields = QWEN3.read(qwen(rope_scaling={"type": "yarn", "factor": 4.0}, max_position_embeddings=64))[0]
    assert fields.yarn == YarnScaling(4.0, 64)
    ratio = QWEN3.read(
        qwen(
            rope_scaling={"type": "yarn", "factor": None, "original_max_position_embeddings": 16},
            max_position_embeddings=64,
        )
    )[0]
    assert ratio.yarn == YarnScaling(4.0, 16)
    stated = QWEN3.read(
        qwen(
            rope_scaling={
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 1.0,
                "truncate": False,
            }
        )
    )[0]
    assert stated.yarn == YarnScaling(8.0, 16, attention_factor=1.0, truncate=False)


def test_gemma_scales_the_full_layers_only():
    fields = GEMMA3.read(gemma(rope_scaling={"rope_type": "linear", "factor": 8.0}))[0]
    kinds = layer_plan(fields).kinds
    assert kinds["full_attention"].rope_scaling == RopeScaling("linear", 8.0)
    assert kinds["sliding_attention"].rope_scaling is None
    absent = layer_plan(GEMMA3.read(gemma())[0]).kinds
    assert absent["full_attention"].rope_scaling is None


def test_gemma_refuses_flat_rope_parameters_and_a_nested_truncate():
    bare = less(gemma(), "rope_theta", "rope_local_base_freq", "rope_scaling")
    assert findings(GEMMA3, {**bare, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}) == [
        "config key 'rope_parameters'"
    ]
    yarn = {"rope_type": "yarn", "factor": 4.0, "truncate": False}
    assert findings(GEMMA3, {**bare, "rope_parameters": {"full_attention": yarn}}) == [
        "config key 'rope_parameters.full_attention.truncate'"
    ]


# patterns and windows


def slides(fields):
    return [spec.kind.window for spec in layer_plan(fields).specs]


def test_gemma_pattern_from_each_source():
    assert slides(GEMMA3.read(gemma())[0]) == [5, 5, 5, 5, 5, None, 5]
    assert slides(GEMMA3.read(gemma(sliding_window_pattern=2))[0]) == [5, None, 5, None, 5, None, 5]
    types = ["full_attention"] * 6 + ["sliding_attention"]
    assert slides(GEMMA3.read(gemma(layer_types=types, sliding_window_pattern=2))[0]) == [None] * 6 + [5]


def test_patterns_that_do_not_fit_are_refused():
    assert findings(GEMMA3, gemma(layer_types=["full_attention"])) == ["config key 'layer_types'"]
    assert findings(GEMMA3, gemma(layer_types=["chunked_attention"] * 7)) == ["config key 'layer_types'"]
    assert findings(GEMMA3, gemma(sliding_window_pattern=0)) == ["config key 'sliding_window_pattern'"]
    assert findings(GEMMA3, gemma(_sliding_window_pattern=4)) == ["config key '_sliding_window_pattern'"]
    assert findings(GEMMA3, gemma(sliding_window=None)) == ["config key 'sliding_window'"]


def test_olmo_pattern_is_stated_or_four_to_one():
    olmo = find("olmo3")
    config = olmo.variants["pattern"].config
    assert slides(olmo.read(config)[0]) == [5, 5, 5, None, 5]
    stated = {**config, "layer_types": ["full_attention"] * 4 + ["sliding_attention"]}
    assert slides(olmo.read(stated)[0]) == [None] * 4 + [5]
    assert findings(olmo, {**config, "layer_types": ["full_attention"] * 4}) == ["config key 'layer_types'"]
    assert findings(olmo, {**config, "sliding_window": None}) == ["config key 'sliding_window'"]


def test_qwen_window_rule():
    assert slides(QWEN3.read(qwen(sliding_window=4, use_sliding_window=False, max_window_layers=1))[0]) == [None] * 3
    assert slides(QWEN3.read(qwen(sliding_window=4, use_sliding_window=True, max_window_layers=1))[0]) == [None, 4, 4]
    assert slides(QWEN3.read(qwen(sliding_window=4, use_sliding_window=True, max_window_layers=0))[0]) == [4, 4, 4]
    default = less(qwen(use_sliding_window=True, max_window_layers=2), "sliding_window")
    assert slides(QWEN3.read(default)[0]) == [None, None, 4096]
    assert findings(QWEN3, qwen(layer_types=["sliding_attention"] * 3)) == ["config key 'layer_types'"]


def test_62_layers_end_with_two_sliding_ones():
    fields = GEMMA3.read(gemma(num_hidden_layers=62))[0]
    assert layer_plan(fields).bank_names[-2:] == ("layers_59", "layers_60_61")


# sizes, ties, wrappers


def test_head_dim_is_stated_or_the_class_default():
    assert QWEN3.read(less(qwen(), "head_dim"))[0].head_dim == 128
    assert GEMMA3.read(less(gemma(), "head_dim"))[0].head_dim == 256
    assert QWEN3.read(qwen(head_dim=None, hidden_size=32))[0].head_dim == 8


def test_key_value_heads_divide_the_queries():
    assert findings(QWEN3, qwen(num_key_value_heads=3)) == ["config key 'num_key_value_heads'"]
    assert QWEN3.read(qwen(num_key_value_heads=None))[0].num_kv_heads == 4


def test_tie_flag_defaults():
    assert not QWEN3.read(less(qwen(), "tie_word_embeddings"))[0].tie_embeddings
    assert GEMMA3.read(gemma())[0].tie_embeddings
    wrapper = less(dict(GEMMA3.variants["wrapper_hub"].config))
    assert GEMMA3.read(wrapper)[0].tie_embeddings
    assert not GEMMA3.read({**wrapper, "tie_word_embeddings": False})[0].tie_embeddings
    text = {**wrapper["text_config"], "tie_word_embeddings": True}
    assert findings(GEMMA3, {**wrapper, "tie_word_embeddings": False, "text_config": text}) == [
        "config key 'tie_word_embeddings'"
    ]


def test_a_27b_text_config_relies_on_omission():
    config = json.loads((CONFIGS / "google__gemma-3-27b-it.json").read_text())
    fields = GEMMA3.read(config)[0]
    assert fields.vocab_size == 262208
    assert (fields.head_dim, fields.attention_scale) == (128, 168**-0.5)
    assert layer_plan(fields).kinds["full_attention"].rope_scaling == RopeScaling("linear", 8.0)


CLASSES = [(family, name) for family in families() for name in family.model_types if name in CONFIG_MAPPING]


@pytest.mark.parametrize(("family", "model_type"), CLASSES, ids=lambda v: getattr(v, "name", v))
def test_what_a_config_leaves_out_is_as_its_class_has_it(family, model_type):
    """A config that states every default of transformers' own class is the one that states none."""
    # The class's 96 heads do not divide its 4096 features: what torch would round down is refused here.
    sizes = {"model_type": model_type} | ({"head_dim": 128} if model_type == "glm4_moe" else {})
    claimed = {key for line in family.fields for key in line.keys}
    stated = {key: value for key, value in CONFIG_MAPPING[model_type](**sizes).to_dict().items() if key in claimed}
    assert len(stated) > 20
    assert family.read({**stated, **sizes})[0] == family.read(sizes)[0]


def test_an_attention_softcap_is_noticed_and_not_computed():
    fields, notices = GEMMA3.read(gemma(attn_logit_softcapping=50.0))
    assert fields.attn_logit_softcap is None
    assert "attn_logit_softcapping is 50.0" in notices[0]
    assert findings(GEMMA3, gemma(attn_logit_softcapping="50")) == ["config key 'attn_logit_softcapping'"]


def test_bidirectional_gemma_is_refused():
    assert findings(GEMMA3, gemma(use_bidirectional_attention=True)) == ["config key 'use_bidirectional_attention'"]


# writing back


def test_a_changed_field_is_written_in_the_configs_spelling():
    old = qwen(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=1e6)
    fields = QWEN3.read(old)[0].replace(rope_theta=5e5, rope_scaling=RopeScaling("linear", 4.0))
    assert QWEN3.rewrite(old, fields) == {**old, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = less(qwen(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}), "rope_theta", "rope_scaling")
    assert QWEN3.rewrite(new, QWEN3.read(new)[0].replace(rope_theta=5e5)) == {
        **new,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    wrapper = dict(GEMMA3.variants["wrapper_hub"].config)
    changed = GEMMA3.rewrite(wrapper, GEMMA3.read(wrapper)[0].replace(vocab_size=140))
    assert changed == {**wrapper, "text_config": {**wrapper["text_config"], "vocab_size": 140}}


def test_unusual_values_come_back_as_they_were():
    config = qwen(max_position_embeddings=1048576, rms_norm_eps=1e-06, eos_token_id=[1, 106], pad_token_id=None)
    assert json.dumps(QWEN3.rewrite(config, QWEN3.read(config)[0])) == json.dumps(config)


def test_a_config_no_decoder_can_be_built_of_is_refused():
    """Before any weight is looked at: an import that only `load` would refuse has cost a copy."""
    family = find("qwen3")
    config = dict(family.variants["untied"].config) | {"head_dim": 75}
    findings = family.examine(config).findings
    assert [finding.what for finding in findings] == ["the decoder"]
    assert "rotary positions need an even number" in findings[0].found
