"""`verify` end to end on two variants; the whole set is what `dewconv.parity.measure` runs for the cards."""

import shutil
from importlib.metadata import version

import pytest
import torch
from safetensors.torch import load_file, save_file

from dewconv.converters.importing import import_checkpoint
from dewconv.converters.source import open_source
from dewconv.families import ConversionError, FindingsError, find
from dewconv.parity import CHECKS, Report, verify, write_checkpoint
from dewconv.parity.round_trip import compare_sources


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    owner = find("qwen3")
    return write_checkpoint(tmp_path_factory.mktemp("hf") / "window", owner.variants["window"], owner)


@pytest.fixture(scope="module")
def banks(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("banks") / "window"
    import_checkpoint(open_source(source), out)
    return out


@pytest.mark.parametrize(("family", "variant"), [("qwen3", "mixed"), ("gemma3", "wrapper_hub")])
def test_a_variant_passes_every_check_in_both_dtypes(family, variant):
    report = verify(family=family, variant=variant)
    assert report.passed, report.failures
    ran = {(check.name, check.dtype) for check in report.checks if check.passed}
    for dtype in ("float32", "bfloat16"):
        for name in ("logits", "logits:unrolled", "layers", "decode", "padding", "greedy"):
            assert (name, dtype) in ran
    assert ("rounding", "bfloat16") in ran
    assert {("gradients", "float32"), ("round_trip", "stored")} <= ran
    assert max(check.ratio for check in report.checks if check.ratio is not None) < 0.7
    assert Report.from_dict(report.to_dict()) == report
    assert set(report.layers) == {"float32", "bfloat16"}


@pytest.mark.parametrize(("family", "variant"), [("qwen3_moe", "sparse_step"), ("glm4_moe", "groups")])
def test_routed_layers_decode_pack_and_learn_as_torch_does(family, variant):
    checks = ("routing", "decode", "padding", "gradients")
    report = verify(family=family, variant=variant, checks=checks, dtype="float32")
    assert report.passed, report.failures
    found = {check.name: check for check in report.checks}
    assert set(found) == set(checks)
    assert all(check.passed for check in report.checks)
    counted = found["routing"].figures
    assert counted["same"] == counted["choices"] > 0
    assert f"{counted['same']} of {counted['choices']} tokens took the same experts" in report.to_markdown()


def test_banks_are_verified_against_the_source_they_came_from(banks):
    report = verify(banks, checks=("logits", "round_trip"))
    assert report.passed
    assert report.model["target"] == "banks"


def test_float16_is_compared_as_the_others_are(banks):
    report = verify(banks, checks=("logits", "rounding", "greedy"), dtype="float16")
    assert report.passed, report.failures
    assert {check.dtype for check in report.checks} == {"float16"}


def test_damaged_banks_are_not_taken_for_another_model(banks, tmp_path):
    damaged = shutil.copytree(banks, tmp_path / "damaged")
    bank = next(path for path in sorted(damaged.glob("layers_*.safetensors")))
    content = bytearray(bank.read_bytes())
    content[-50] ^= 64
    bank.write_bytes(content)
    with pytest.raises(FindingsError, match=rf"{bank.name}.*\n?.*the file was altered or is damaged"):
        verify(damaged, checks="logits", tokens=4)


@pytest.mark.parametrize(
    ("family", "variant", "told"),
    [("gemma3", "pattern", "is of the family qwen3, .* of gemma3"), ("qwen3", "deep", "are not one model: .* differ")],
)
def test_banks_of_another_model_are_not_compared(banks, source, tmp_path, family, variant, told):
    owner = find(family)
    other = write_checkpoint(tmp_path / "other", owner.variants[variant], owner)
    for target in (banks, source):
        with pytest.raises(ConversionError, match=told):
            verify(target, against=other, checks="logits", dtype="float32", tokens=4)


def test_a_probe_beyond_memory_is_refused_before_anything_is_loaded(banks):
    with pytest.raises(ConversionError, match=r"a probe of 1000000 tokens needs .* GB.*--tokens"):
        verify(banks, checks="logits", tokens=1_000_000)


def test_another_checkpoints_weights_differ_and_the_layer_is_named(source, banks, tmp_path):
    other = shutil.copytree(source, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"] *= 1.01
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    report = verify(banks, against=other, checks=("logits", "layers", "round_trip"))
    verdicts = {check.name: check for check in report.checks}
    assert not report.passed
    assert not verdicts["logits"].passed
    assert verdicts["layers"].worst["layer"] == 2
    assert "layer 2" in verdicts["layers"].note
    assert "model.layers.2.mlp.down_proj.weight" in verdicts["round_trip"].note


def test_below_float32_a_small_error_is_told_from_rounding(tmp_path):
    """5 percent of one projection is far inside the bfloat16 bound of logits, and beyond two roundings of one model."""
    owner = find("qwen3")
    honest = write_checkpoint(tmp_path / "honest", owner.variants["mixed"], owner)
    other = shutil.copytree(honest, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.05
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    wanted = ("logits", "rounding")
    ours, broken = (verify(honest, against=one, checks=wanted, dtype="bfloat16") for one in (honest, other))
    assert ours.passed
    assert [(check.name, check.passed) for check in broken.checks] == [
        ("logits", True),
        ("logits:unrolled", True),
        ("rounding", False),
    ]
    assert [check.passed for check in verify(honest, checks=("rounding",), dtype="float32").checks] == [None]


@pytest.mark.parametrize(("family", "variant"), [("gemma3", "pattern"), ("qwen3", "biases")])
@pytest.mark.parametrize("around", [0.0, 1.0])
def test_a_norms_convention_is_the_familys_whatever_its_weights_look_like(tmp_path, family, variant, around):
    """Weights near 0, as (1 + w) has them, and near 1, as plain ones are: neither is taken for the other's."""
    owner = find(family)
    path = write_checkpoint(tmp_path / variant, owner.variants[variant], owner)
    tensors = load_file(path / "model.safetensors")
    drawn = torch.Generator().manual_seed(0)
    for name in sorted(name for name in tensors if name.endswith("norm.weight")):
        tensors[name] = around + 0.1 * torch.randn(tensors[name].shape, generator=drawn)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    report = verify(path, checks=("logits", "round_trip"), dtype="float32")
    assert report.passed, report.failures


def test_what_olmo3_differs_in_is_told_with_the_version_compared_with():
    report = verify(family="olmo3", variant="yarn", checks=("logits",), dtype="float32")
    assert report.passed, report.failures
    assert report.probe["lengths"][0] > 64
    assert any("transformers 5.5 to 5.12 put it on the sliding layers too" in notice for notice in report.notices)
    assert report.versions["transformers"] == version("transformers")
    text = report.to_markdown()
    assert "5.5 to 5.12" in text
    assert version("transformers") in text


def test_a_source_that_is_gone_is_said(source, tmp_path):
    moved = shutil.copytree(source, tmp_path / "hf")
    out = tmp_path / "banks"
    import_checkpoint(open_source(moved), out)
    shutil.rmtree(moved)
    with pytest.raises(ConversionError, match="--against"):
        verify(out)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"family": "qwen3", "variant": "nope"}, "no variant 'nope'"),
        ({"family": "qwen3", "variant": "untied", "checks": ("logit",)}, "no check is called 'logit'"),
        ({}, "either a target or a family"),
    ],
)
def test_what_cannot_be_verified_is_said(options, says):
    with pytest.raises(ConversionError, match=says):
        verify(**options)


def test_a_prompt_needs_a_tokenizer(source):
    with pytest.raises(ConversionError, match=r"tokenizer\.json"):
        verify(source, prompt="hello")


def test_every_kind_of_difference_between_sources_is_told(source, tmp_path):
    other = shutil.copytree(source, tmp_path / "other")
    assert not list(compare_sources(open_source(source), open_source(other)))
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    tensors["model.embed_tokens.weight"][3, 4] += 1
    del tensors["lm_head.weight"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    (other / "chat_template.jinja").write_text("other")
    (other / "config.json").write_text((source / "config.json").read_text() + " ")
    told = "\n".join(compare_sources(open_source(source), open_source(other)))
    for part in (
        "lm_head.weight: missing",
        "model.norm.weight: F32",
        "model.embed_tokens.weight: bytes differ",
        "config.json: bytes differ",
        "chat_template.jinja: differs",
    ):
        assert part in told
    assert set(CHECKS) == {
        "logits",
        "rounding",
        "layers",
        "routing",
        "selection",
        "decode",
        "padding",
        "greedy",
        "gradients",
        "round_trip",
    }
