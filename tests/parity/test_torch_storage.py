"""The torch side's own decoding: element for element from the formats' definitions, and whole checkpoints."""

import json
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dewconv.converters.importing import import_checkpoint
from dewconv.converters.source import open_source
from dewconv.families import ConversionError, find
from dewconv.parity import verify
from dewconv.parity.candidate import reference_run
from dewconv.parity.fixtures import write_checkpoint
from dewconv.parity.torch_storage import decode_fp8, decode_int4, encode, plain_checkpoint

FAMILY = find("deepseek_v3")
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GROUPS = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"group_size": 32}}}}
CODED = [name for name, variant in FAMILY.variants.items() if variant.coded]


def e4m3(code: int) -> float:
    """S EEEE MMM with bias 7 (OCP 8-bit floating point 1.0)."""
    sign, exponent, mantissa = (-1.0) ** (code >> 7), code >> 3 & 15, code & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def to_bfloat16(value: np.float32) -> float:
    return float(np.asarray(value, np.float32).astype(ml_dtypes.bfloat16))


def test_a_block_scaled_matrix_by_its_definition():
    """fp8 12: [200, 136] in blocks of 128 has edge blocks of 72 rows and 8 columns; no two scales are alike."""
    codes = np.random.default_rng(0).integers(0, 254, (200, 136), np.uint8)
    codes[codes & 127 == 127] = 0x38
    scales = np.array([[1.25, 2.5], [4.0, 8.1]], np.float32)
    found = decode_fp8(torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales), (128, 128))
    assert found.dtype == torch.bfloat16
    for row in (0, 127, 128, 199):
        for column in (0, 127, 128, 135):
            scale = scales[row // 128, column // 128]
            assert float(found[row, column]) == to_bfloat16(np.float32(e4m3(int(codes[row, column]))) * scale)


@pytest.mark.parametrize("scales", [torch.tensor([[0.5], [3.0]]), torch.tensor([0.5, 3.0]), torch.tensor(0.75)])
def test_a_scale_a_row_or_a_tensor(scales):
    codes = torch.tensor([[1.0, -2.0, 448.0], [0.5, 1.5, 2.0**-9]]).to(torch.float8_e4m3fn)
    spread = scales.reshape(-1, 1).expand(2, 3) if scales.numel() > 1 else scales
    assert torch.equal(decode_fp8(codes, scales, None), (codes.float() * spread).bfloat16())


def test_a_packed_word_by_its_definition():
    """int4 54: the lowest bits come first, and 8 is taken off."""
    packed = torch.tensor([[0x76543210, 0x01234567, 0x0FEDCBA9, -1]], dtype=torch.int32)
    scales = torch.tensor([[0.5]], dtype=torch.bfloat16)
    codes = [*range(-8, 0), *range(-1, -9, -1), 1, 2, 3, 4, 5, 6, 7, -8, *[7] * 8]
    assert decode_int4(packed, scales, 32).tolist() == [[0.5 * code for code in codes]]


@pytest.mark.parametrize(("record", "shape", "largest"), [(BLOCKS, (200, 136), 448), (GROUPS, (40, 96), 7.5)])
def test_what_is_stored_is_the_matrix_up_to_a_factor_a_block(record, shape, largest):
    """No block is scaled as another, and within a block the codes are the values': within half a step of a three-bit
    mantissa, or of one of fifteen steps, of which the last is cut."""
    values = np.random.default_rng(1).normal(0, 1, shape).astype(np.float32)
    stored = encode("x.weight", values, record, np.random.default_rng(2))
    if record is BLOCKS:
        scales, block = stored["x.weight_scale_inv"], (128, 128)
        found = decode_fp8(stored["x.weight"], scales, block)
    else:
        scales, block = stored["x.weight_scale"], (1, 32)
        found = decode_int4(stored["x.weight_packed"], scales, 32)
        assert stored["x.weight_packed"].shape == (40, 12)
        assert stored["x.weight_shape"].tolist() == [40, 96]
    assert tuple(scales.shape) == tuple(-(-size // span) for size, span in zip(shape, block, strict=True))
    factors = []
    for row, column in np.ndindex(*scales.shape):
        here = np.s_[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
        wanted, got = values[here], found.float().numpy()[here]
        step = np.abs(wanted).max() / largest
        factors.append(float(scales[row, column]) / step)
        half = np.maximum(np.abs(wanted) / 16, step * 2.0**-10) if record is BLOCKS else step / 2
        # The logical values are bfloat16, and so are the scales of groups.
        assert (np.abs(got / factors[-1] - wanted) <= 1.001 * half + np.abs(wanted) * 2.0**-8).all()
    assert 0.4 < min(factors) < 0.9
    assert 1.1 < max(factors) < 2.1
    assert all(other - one > 1e-5 for one, other in pairwise(sorted(factors)))


@pytest.fixture(scope="module", params=CODED)
def stored(request, tmp_path_factory):
    variant = FAMILY.variants[request.param]
    return variant, write_checkpoint(tmp_path_factory.mktemp("stored") / request.param, variant, FAMILY)


def tensors_of(path):
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_a_plain_copy_has_every_weight_and_no_record(stored):
    variant, path = stored
    held = tensors_of(path)
    with plain_checkpoint(path, variant.config) as (where, config):
        plain = tensors_of(where)
        assert "quantization_config" not in json.dumps(config) + (where / "config.json").read_text()
    ends = ("_scale_inv", "_scale", "_shape")
    assert plain.keys() == {name.removesuffix("_packed") for name in held if not name.endswith(ends)}
    assert {tensor.dtype for tensor in plain.values()} == {torch.bfloat16, torch.float32}
    untouched = [name for name in plain if name in held and held[name].dtype == plain[name].dtype]
    assert all(torch.equal(held[name], plain[name]) for name in untouched)
    assert 0 < len(untouched) < len(plain)
    assert not where.exists()


def test_both_sides_decode_the_same_values(stored):
    """torch's plain copy and what `converters` make of the codes, bit for bit."""
    variant, path = stored
    run = reference_run(path)
    with plain_checkpoint(path, variant.config) as (where, _):
        plain = tensors_of(where)
    assert any(tensor.quantised for tensor in run.plan.tensors.values())
    for name, values in run.tensors.items():
        assert values.astype(np.float32).tobytes() == plain[name].float().numpy().tobytes(), name


def test_a_plain_checkpoint_is_read_where_it_lies(tmp_path):
    config = FAMILY.variants["untied"].config
    with plain_checkpoint(tmp_path, config) as (where, same):
        assert where == tmp_path
        assert same is config


def test_codes_and_scales_lie_in_different_files(stored):
    _, path = stored
    files = {name: item.file for name, item in open_source(path).tensors.items()}
    pairs = [
        (files[name], files[name.removesuffix(end) + code])
        for name in files
        for end, code in (("_scale_inv", ""), ("_scale", "_packed"))
        if name.endswith(end) and name.removesuffix(end) + code in files
    ]
    assert any(scale != code for scale, code in pairs)


@pytest.mark.parametrize("variant", ["fp8", "kimi_k25_int4"])
def test_one_scale_that_differs_is_told(tmp_path, variant):
    """The torch side reads its own codes: verified against a checkpoint with one scale of one block halved, it does
    not agree."""
    spec = FAMILY.variants[variant]
    path = write_checkpoint(tmp_path / "a", spec, FAMILY)
    other = write_checkpoint(tmp_path / "b", spec, FAMILY)
    name = next(
        name
        for name in sorted(open_source(other).tensors)
        if name.endswith(("o_proj.weight_scale_inv", "experts.0.down_proj.weight_scale"))
    )
    file = other / open_source(other).tensors[name].file
    held = load_file(file)
    held[name] = held[name].clone()
    held[name][0, 0] *= 0.5
    save_file(held, file, metadata={"format": "pt"})
    report = verify(path, against=other, checks=("logits",), tokens=24, dtype="float32")
    assert not report.passed


def test_banks_of_codes_are_verified_against_their_source(tmp_path, stored):
    """Codes and scales kept in the banks, decoded as they are loaded; exported byte for byte."""
    _, path = stored
    import_checkpoint(open_source(path), tmp_path / "banks", quantized="keep")
    report = verify(tmp_path / "banks", checks=("logits", "round_trip"), tokens=24, dtype="float32")
    assert report.passed
    assert {check.name for check in report.checks} == {"logits", "logits:unrolled", "round_trip"}


def test_codes_without_their_scale_are_told(tmp_path):
    variant = FAMILY.variants["fp8"]
    path = write_checkpoint(tmp_path / "a", variant, FAMILY)
    gone = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    for file in path.glob("*.safetensors"):
        kept = {name: one for name, one in load_file(file).items() if name != gone}
        save_file(kept, file, metadata={"format": "pt"})
    with (
        pytest.raises(ConversionError, match=r"o_proj\.weight_scale_inv is missing"),
        plain_checkpoint(path, variant.config),
    ):
        pass


def test_a_record_beside_the_config_is_read(tmp_path):
    """ModelOpt's older exports state their quantisation in a file of its own."""
    codes = torch.tensor([[1.0, -2.0], [448.0, 0.5]]).to(torch.float8_e4m3fn)
    held = {"x.weight": codes, "x.weight_scale": torch.tensor(0.75), "x.input_scale": torch.tensor(2.0)}
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    record = {"quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(record))
    with plain_checkpoint(tmp_path, {}) as (where, _):
        plain = tensors_of(where)
        assert not (where / "hf_quant_config.json").exists()
    assert plain.keys() == {"x.weight"}
    assert torch.equal(plain["x.weight"], (codes.float() * 0.75).bfloat16())
