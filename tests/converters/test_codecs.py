"""Codes decoded element for element against the formats' definitions, written out here by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from dewconv.converters.codecs import Logical, Plain, Stored
from dewconv.converters.copying import gather
from dewconv.converters.decoding import FP8, INT4
from dewconv.converters.fp8 import Fp8, fp8_codec
from dewconv.converters.grains import leaf_grain, shared_axes
from dewconv.converters.int4 import Int4, int4_codec
from dewconv.converters.parts import decode_whole, decoded_part, expand, source_part, target_parts
from dewconv.converters.quantisation import codec_of, record_of, respell_record, without_record
from dewconv.families.errors import ConversionError
from dewconv.families.family import Spelling
from dewconv.families.rules import Placement, Rule, View

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
FP8_RECORD = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT4_RECORD = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
}


def e4m3(code: int) -> float:
    """S EEEE MMM, bias 7; S.1111.111 is NaN and there are no infinities (OCP 8-bit floating point 1.0, table 1)."""
    sign, exponent, mantissa = (-1.0) ** (code >> 7), code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def rounded(value: float, bits: int, lowest: int, largest: float) -> float:
    """To the nearest multiple of its last place with `bits` significant bits, ties to even; no place below 2^lowest."""
    if math.isnan(value) or math.isinf(value) or value == 0:
        return value
    place = max(math.frexp(value)[1] - bits, lowest)
    result = float(round(Fraction(value) / Fraction(2) ** place) * Fraction(2) ** place)
    return math.copysign(math.inf, value) if abs(result) > largest else math.copysign(result, value)


def float32(value: float) -> float:
    return rounded(value, 24, -149, float(np.finfo(np.float32).max))


def bfloat16(value: float) -> float:
    return rounded(value, 8, -133, float(ml_dtypes.finfo(BF16).max))


def by_definition(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """float32(code) * float32(scale) in float32, rounded to bfloat16, one element at a time."""
    out = np.empty(codes.shape)
    for (row, column), code in np.ndenumerate(codes.view(np.uint8)):
        scale = float(scales[row // block[0], column // block[1]])
        value = e4m3(int(code))
        # Both factors are exact in a float64, and so is their product: 4 and 24 significant bits.
        out[row, column] = bfloat16(float32(value * scale))
    return out


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal values, zeros with their signs; a NaN is any NaN."""
    found = np.asarray(found, np.float64)
    nan = np.isnan(wanted)
    equal = (found == wanted) & (np.signbit(found) == np.signbit(wanted))
    return found.shape == wanted.shape and bool(np.where(nan, np.isnan(found), equal).all())


def fp8_tensor(shape, scale, block=(128, 128), dtype="F32") -> Logical:
    codec = Fp8(block, ("block",))
    stored = {"x.weight": Stored("x.weight", "F8_E4M3", shape)}
    stored["x.weight_scale_inv"] = Stored("x.weight_scale_inv", dtype, scale)
    grouping = codec.group(stored)
    assert not grouping.findings, grouping.findings
    return grouping.tensors["x.weight"]


def decode_fp8(codes: np.ndarray, scales: np.ndarray, block=(128, 128)) -> np.ndarray:
    names = {np.dtype(np.float32): "F32", BF16: "BF16", E8M0: "F8_E8M0", np.dtype(np.float16): "F16"}
    tensor = fp8_tensor(codes.shape, scales.shape, block, names[scales.dtype])
    held = {"x.weight": codes.view(E4M3), "x.weight_scale_inv": scales}
    found = decode_whole(tensor, held.__getitem__)
    assert found.dtype == BF16
    return found


def test_every_code_under_scales_of_every_size():
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    smallest, tiny = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).tiny)
    sizes = [1.0, 0.0, -0.0, smallest, 3 * smallest, tiny, 0.7, 1e-3, 448.0, -2.5, 3e38, math.inf, math.nan, 2**-130]
    for scale in sizes:
        scales = np.full((1, 1), scale, np.float32)
        with np.errstate(all="ignore"):
            assert same(decode_fp8(codes, scales), by_definition(codes, scales, (128, 128))), scale


def test_codes_whose_values_are_known():
    codes = np.array([[0x38, 0x7E, 0x7F, 0xFF, 0x01, 0xB8, 0x80, 0x00]], np.uint8)
    found = decode_fp8(codes, np.ones((1, 1), np.float32))[0].astype(np.float64)
    assert found[[0, 1, 4, 5]].tolist() == [1.0, 448.0, 2.0**-9, -1.0]
    assert np.isnan(found[[2, 3]]).all()
    assert np.signbit(found[[6, 7]]).tolist() == [True, False]


def test_blocks_at_the_edges_are_cut_and_no_axis_is_swapped():
    codes = np.random.default_rng(0).integers(0, 256, (200, 136), np.uint8)
    scales = np.array([[1, 2], [4, 8]], np.float32)
    found = decode_fp8(codes, scales)
    assert same(found, by_definition(codes, scales, (128, 128)))
    ones = decode_fp8(np.full((200, 136), 0x38, np.uint8), scales).astype(np.float32)
    assert (ones[:128, :128] == 1).all()
    assert (ones[:128, 128:] == 2).all()
    assert (ones[128:, :128] == 4).all()
    assert (ones[128:, 128:] == 8).all()


@pytest.mark.parametrize(
    "scales",
    [
        np.array([[0.013, 1.7], [3.1, 240.0]], BF16),
        np.array([[0.013, 1.7], [3.1, 240.0]], np.float16),
        np.array([[0, 127], [130, 255]], np.uint8).view(E8M0),
    ],
    ids=["bfloat16", "float16", "e8m0"],
)
def test_scales_of_other_dtypes(scales):
    codes = np.random.default_rng(1).integers(0, 256, (20, 24), np.uint8)
    if scales.dtype == E8M0:
        # An exponent without a sign or a mantissa, bias 127; 255 is NaN (OCP microscaling formats 1.0).
        powers = [[2.0**-127, 1.0], [8.0, math.nan]]
        assert same(decode_fp8(codes, scales, (16, 16)), by_definition(codes, np.array(powers), (16, 16)))
    else:
        assert same(decode_fp8(codes, scales, (16, 16)), by_definition(codes, scales, (16, 16)))


def test_a_long_row_is_decoded_as_a_short_one():
    generator = np.random.default_rng(2)
    codes = generator.integers(0, 256, (300, 1000), np.uint8)
    scales = generator.uniform(1e-3, 9, (3, 8)).astype(np.float32)
    wide = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:300, :1000]
    with np.errstate(all="ignore"):
        wanted = (codes.view(E4M3).astype(np.float32) * wide).astype(BF16)
    assert same(decode_fp8(codes, scales), wanted.astype(np.float64))


@pytest.mark.parametrize(("scale", "grain"), [((), (6, 10)), ((1,), (6, 10)), ((6, 1), (1, 10)), ((6,), (1, 10))])
def test_a_scale_a_tensor_or_a_channel(scale, grain):
    codes = np.random.default_rng(3).integers(0, 256, (6, 10), np.uint8)
    values = np.random.default_rng(4).uniform(0.01, 5, scale).astype(np.float32)
    stored = {"x.weight": Stored("x.weight", "F8_E4M3", (6, 10)), "x.weight_scale": Stored("s", "F32", scale)}
    stored["x.weight_scale"] = Stored("x.weight_scale", "F32", scale)
    tensor = Fp8(None, ("tensor", "channel")).group(stored).tensors["x.weight"]
    found = decode_whole(tensor, {"x.weight": codes.view(E4M3), "x.weight_scale": values}.__getitem__)
    assert same(found, by_definition(codes, values.reshape(-1, 1), grain))


def test_experts_in_one_tensor_have_a_grid_each():
    codes = np.random.default_rng(5).integers(0, 256, (3, 20, 24), np.uint8)
    scales = np.random.default_rng(6).uniform(0.1, 9, (3, 2, 2)).astype(np.float32)
    stored = {
        "experts.gate_up_proj": Stored("experts.gate_up_proj", "F8_E4M3", (3, 20, 24)),
        "experts.gate_up_proj_scale_inv": Stored("experts.gate_up_proj_scale_inv", "F32", (3, 2, 2)),
    }
    tensor = Fp8((16, 16), ("block",)).group(stored).tensors["experts.gate_up_proj"]
    held = {"experts.gate_up_proj": codes.view(E4M3), "experts.gate_up_proj_scale_inv": scales}
    found = decode_whole(tensor, held.__getitem__)
    for expert in range(3):
        assert same(found[expert], by_definition(codes[expert], scales[expert], (16, 16)))


def int4_by_definition(packed: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    out = np.empty((packed.shape[0], 8 * packed.shape[1]))
    for row, column in np.ndindex(out.shape):
        word = int(packed[row, column // 8]) & 0xFFFFFFFF
        code = (word >> 4 * (column % 8) & 15) - 8
        out[row, column] = bfloat16(float32(code * float(scales[row, column // group])))
    return out


def int4_tensor(rows: int, words: int, groups: int, size: int | None) -> Logical:
    stored = {
        "x.weight_packed": Stored("x.weight_packed", "I32", (rows, words)),
        "x.weight_scale": Stored("x.weight_scale", "BF16", (rows, groups)),
        "x.weight_shape": Stored("x.weight_shape", "I32", (2,)),
    }
    grouping = Int4(size).group(stored)
    assert not grouping.findings, grouping.findings
    return grouping.tensors["x.weight"]


def test_a_packed_word_is_eight_codes_the_lowest_bits_first():
    packed = np.array([[0x76543210]], np.int32)
    scales = np.array([[0.5]], BF16)
    tensor = int4_tensor(1, 1, 1, 32)
    assert (tensor.name, tensor.shape, tensor.beside) == ("x.weight", (1, 8), ("x.weight_shape",))
    found = decode_whole(tensor, {"x.weight_packed": packed, "x.weight_scale": scales}.__getitem__)
    assert found.astype(float).tolist() == [[-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5]]


@pytest.mark.parametrize(("rows", "words", "size"), [(5, 12, 32), (7, 4, None), (3, 40, 8), (130, 16, 64)])
def test_packed_codes_under_every_scale(rows, words, size):
    generator = np.random.default_rng(rows)
    packed = generator.integers(-(2**31), 2**31, (rows, words)).astype(np.int32)
    groups = 1 if size is None else -(-8 * words // size)
    scales = generator.uniform(-3, 3, (rows, groups)).astype(BF16)
    scales.reshape(-1)[:3] = [0.0, 1e-39, 3e38]
    tensor = int4_tensor(rows, words, groups, size)
    held = {"x.weight_packed": packed, "x.weight_scale": scales}
    assert same(decode_whole(tensor, held.__getitem__), int4_by_definition(packed, scales, size or 8 * words))


def test_transformers_decodes_the_same():
    torch = pytest.importorskip("torch")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = np.random.default_rng(7).integers(0, 256, (256, 384), np.uint8)
    for dtype in (np.dtype(np.float32), BF16):
        scales = np.random.default_rng(8).uniform(1e-4, 2, (2, 3)).astype(dtype)
        exact = torch.from_numpy(scales.astype(np.float32))
        theirs = Fp8Dequantize(None)._dequantize_one(
            torch.from_numpy(codes).view(torch.float8_e4m3fn),
            exact if dtype != BF16 else exact.to(torch.bfloat16),
            torch.bfloat16,
        )
        assert same(decode_fp8(codes, scales), theirs.to(torch.float64).numpy())


def test_compressed_tensors_packs_and_decodes_the_same():
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    codes = torch.from_numpy(np.random.default_rng(9).integers(-8, 8, (6, 96), np.int8))
    scales = torch.from_numpy(np.random.default_rng(10).uniform(0.01, 2, (6, 3)).astype(np.float32)).to(torch.bfloat16)
    packed = helpers.pack_to_int32(codes, 4)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    theirs = dequantize(helpers.unpack_from_int32(packed, 4, codes.shape), scales, args=args)
    held = {"x.weight_packed": packed.numpy(), "x.weight_scale": scales.float().numpy().astype(BF16)}
    found = decode_whole(int4_tensor(6, 12, 3, 32), held.__getitem__)
    assert theirs.dtype == torch.bfloat16
    assert same(found, theirs.to(torch.float64).numpy())


# Rules on parts


def stack(count: int, *shape: int) -> tuple[Rule, ...]:
    return (Rule("e.{e}.weight", View.of(*shape).T, "experts/kernel", View.of(*shape[::-1]), {"e": range(count)}),)


def fused(count: int, inner: int, width: int) -> tuple[Rule, ...]:
    both, leaf = View.of(count, 2 * inner, width), View.of(count, width, inner)
    return (
        Rule("w", both[:, :inner].transpose(0, 2, 1), "gate", leaf),
        Rule("w", both[:, inner:].transpose(0, 2, 1), "up", leaf),
    )


def interleaved(inner: int, width: int) -> tuple[Rule, ...]:
    pairs = View.of(2 * inner, width).reshape(inner, 2, width)
    return tuple(Rule("w", pairs[:, at].T, name, View.of(width, inner)) for at, name in enumerate(("gate", "up")))


def heads(count: int, first: int, second: int, width: int) -> tuple[Rule, ...]:
    """A projection whose rows are, head by head, `first` of one thing and `second` of another."""
    rows = View.of(count * (first + second), width).reshape(count, first + second, width)
    parts = ((rows[:, :first], "k", first), (rows[:, first:], "v", second))
    return tuple(
        Rule("w", view.transpose(2, 0, 1), name, View.of(width, count * size).reshape(width, count, size))
        for view, name, size in parts
    )


def joined(rows: int, *widths: int) -> tuple[Rule, ...]:
    """Several tensors side by side in one leaf."""
    leaf, starts = View.of(rows, sum(widths)), [0, *np.cumsum(widths).tolist()]
    return tuple(
        Rule(f"w{i}", View.of(b - a, rows).T, "qkv", leaf[:, a:b]) for i, (a, b) in enumerate(pairwise(starts))
    )


RULES = {
    "transposed": ((Rule("w", View.of(40, 24).T, "kernel", View.of(24, 40)),), (16, 8)),
    "as it lies": ((Rule("w", View.of(40, 24), "kernel", View.of(40, 24)),), (16, 16)),
    "edges cut": ((Rule("w", View.of(37, 21).T, "kernel", View.of(21, 37)),), (16, 8)),
    "stacked": (stack(3, 20, 28), (16, 16)),
    "fused": (fused(3, 16, 24), (16, 16)),
    "fused, a block cut": (fused(2, 20, 24), (16, 16)),
    "fused, an odd size": (fused(2, 9, 7), (4, 4)),
    "interleaved": (interleaved(16, 24), (16, 16)),
    "interleaved, edges cut": (interleaved(13, 10), (16, 16)),
    "heads": (heads(3, 16, 16, 40), (16, 16)),
    "heads, blocks cut": (heads(3, 16, 8, 40), (16, 16)),
    "rows in two": (
        (
            Rule("w", View.of(72, 40)[:64].T, "kv", View.of(40, 64)),
            Rule("w", View.of(72, 40)[64:].T, "rope", View.of(40, 8)),
        ),
        (16, 16),
    ),
    "joined": (joined(24, 32, 16, 16), (16, 16)),
    "joined, a block cut": (joined(24, 20, 12), (16, 16)),
    "a scale a tensor": (fused(2, 12, 8), None),
    "a scale a channel": ((Rule("w", View.of(40, 24).T, "kernel", View.of(24, 40)),), (1, 24)),
}


def random_parts(rules, block, seed=0):
    """Tensors for `rules` in FP8 with a scale a block (None: a tensor), their parts, and their values in float32."""
    generator = np.random.default_rng(seed)
    places = [place for rule in rules for place in rule.placements()]
    tensors, stored, held, values = {}, {}, {}, {}
    for place in places:
        name, shape = place.source, place.source_view.base
        grain = shape if block is None else (*(1,) * (len(shape) - 2), *block)
        grid = tuple(-(-n // g) for n, g in zip(shape, grain, strict=True))
        tensors[name] = Logical(name, "BF16", shape, (name, name + "_s"), FP8, ((1,) * len(shape), grain))
        held[name] = generator.integers(0, 256, shape, np.uint8).view(E4M3)
        held[name + "_s"] = generator.uniform(0.1, 9, grid).astype(np.float32)
        stored |= {
            part: Stored(part, "F8_E4M3" if part == name else "F32", held[part].shape) for part in (name, name + "_s")
        }
        wide = held[name + "_s"]
        for axis, times in enumerate(grain):
            wide = np.repeat(wide, times, axis)
        with np.errstate(all="ignore"):
            wide = wide[tuple(slice(0, n) for n in shape)] * held[name].astype(np.float32)
        values[name] = wide.astype(BF16)
    return places, tensors, stored, held, values


def fill(places, dtype_of, read):
    leaves = {}
    for place in places:
        leaves.setdefault(place.leaf, np.zeros(place.leaf_view.base, dtype_of(place.source)))
        place.leaf_view.apply(leaves[place.leaf])[...] = read(place)
    return leaves


def bits(array: np.ndarray) -> np.ndarray:
    """BF16 as bits, every NaN as one."""
    return np.where(np.isnan(array.astype(np.float32)), np.uint16(0x7FC0), array.view(np.uint16))


@pytest.mark.parametrize("which", RULES)
def test_a_rule_on_a_weight_holds_of_its_codes_and_scales(which):
    rules, block = RULES[which]
    places, tensors, stored, held, values = random_parts(rules, block)
    expansion = expand(places, tensors, stored)
    assert not expansion.findings
    leaves = fill(
        expansion.placements, lambda name: held[name].dtype, lambda place: source_part(place, held[place.source])
    )
    wanted = fill(places, lambda name: BF16, lambda place: place.source_view.apply(values[place.source]))
    assert set(leaves) == set(wanted) | {leaf + ":scale" for leaf in wanted}
    for leaf, value in wanted.items():
        coded = expansion.codings[leaf].array(leaves[leaf], leaves[leaf + ":scale"], leaf)
        found = np.empty(coded.shape, coded.dtype)
        coded.write(found)
        assert (bits(found) == bits(value)).all(), leaf
    # Back again: every stored byte.
    for name, array in held.items():
        own = [place for place in expansion.placements if place.source == name]
        parts = target_parts(own, array.dtype, lambda place: place.leaf_view.apply(leaves[place.leaf]), name)
        assert gather(array.shape, array.dtype, parts, name).tobytes() == array.tobytes(), name


@pytest.mark.parametrize("which", RULES)
def test_a_rule_reads_a_weight_decoded(which):
    rules, block = RULES[which]
    places, tensors, _, held, values = random_parts(rules, block, 1)
    wanted = fill(places, lambda name: BF16, lambda place: place.source_view.apply(values[place.source]))
    for leaf, value in wanted.items():
        parts = [decoded_part(p, tensors[p.source], held.__getitem__) for p in places if p.leaf == leaf]
        found = gather(value.shape, BF16, parts, leaf)
        assert (bits(found) == bits(value)).all(), leaf


def test_scales_are_stored_a_block_where_no_rule_cuts_one():
    cases = {
        "transposed": {(8, 16)},
        "edges cut": {(8, 16)},
        "stacked": {(1, 16, 16)},
        "fused": {(1, 16, 16)},
        "interleaved": {(16, 8)},
        "heads": {(16, 16)},
        "heads, blocks cut": {(16, 8)},
        "fused, a block cut": {(1, 16, 16), (1, 16, 4)},
        "a scale a channel": {(24, 1)},
    }
    for which, grains in cases.items():
        rules, block = RULES[which]
        places, tensors, stored, *_ = random_parts(rules, block)
        assert {coding.grains[1] for coding in expand(places, tensors, stored).codings.values()} == grains, which


def test_packed_codes_follow_their_rules_and_are_not_taken_apart():
    rules = stack(3, 12, 64)
    places = [place for rule in rules for place in rule.placements()]
    generator = np.random.default_rng(11)
    tensors, stored, held = {}, {}, {}
    for place in places:
        name = place.source
        tensors[name] = Logical(name, "BF16", (12, 64), (name + "_packed", name + "_scale"), INT4, ((1, 8), (1, 32)))
        held[name + "_packed"] = generator.integers(-(2**31), 2**31, (12, 8)).astype(np.int32)
        held[name + "_scale"] = generator.uniform(0.1, 2, (12, 2)).astype(BF16)
        stored |= {p: Stored(p, "I32" if p.endswith("packed") else "BF16", held[p].shape) for p in tensors[name].parts}
    expansion = expand(places, tensors, stored)
    leaves = fill(
        expansion.placements, lambda name: held[name].dtype, lambda place: source_part(place, held[place.source])
    )
    assert leaves["experts/kernel"].shape == (3, 8, 12)
    assert leaves["experts/kernel:scale"].shape == (3, 2, 12)
    coded = expansion.codings["experts/kernel"].array(
        leaves["experts/kernel"], leaves["experts/kernel:scale"], "experts/kernel"
    )
    for start, stop in ((0, 64), (3, 17), (8, 40), (33, 34), (5, 64)):
        # Any part of the leaf, wherever in a word or a group it begins.
        part = coded[1].transpose((0, 1))[start:stop]
        found = np.empty(part.shape, BF16)
        part.write(found)
        name = places[1].source
        wanted = int4_by_definition(held[name + "_packed"], held[name + "_scale"], 32).T[start:stop]
        assert same(found, wanted)
    cut = Rule("e.0.weight", View.of(12, 64)[:, :4].T, "a", View.of(4, 12))
    rest = Rule("e.0.weight", View.of(12, 64)[:, 4:].T, "b", View.of(60, 12))
    own = [next(cut.placements()), next(rest.placements())]
    finding = expand(own, tensors, stored).findings[0]
    assert "inside its words" in str(finding)
    assert "--quantized decode" in str(finding)
    value = int4_by_definition(held["e.0.weight_packed"], held["e.0.weight_scale"], 32)
    for place, wanted in zip(own, (value[:, :4].T, value[:, 4:].T), strict=True):
        part = decoded_part(place, tensors["e.0.weight"], held.__getitem__)
        assert same(gather(wanted.shape, BF16, [part], "x"), wanted)


def test_one_leaf_is_stored_in_one_way():
    places, tensors, stored, *_ = random_parts(stack(2, 20, 28), (16, 16))
    tensors["e.1.weight"] = Logical("e.1.weight", "BF16", (20, 28), ("e.1.weight",))
    stored["e.1.weight"] = Stored("e.1.weight", "BF16", (20, 28))
    text = str(expand(places, tensors, stored).findings[0])
    assert "F8_E4M3 x F32 (e.0.weight) and BF16 (e.1.weight)" in text


def test_views_that_cross_rows_share_no_axes():
    diagonal = View((6, 6), (6,), (7,))
    assert shared_axes(diagonal, View.of(6)) is None
    shared = shared_axes(View.of(4, 6).reshape(24), View.of(24))
    assert shared is not None
    assert [axis.length for axis in shared.axes] == [4, 6]
    assert leaf_grain(shared, (2, 3)) == (3,)
    place = Placement("x", diagonal, "leaf", View.of(6))
    tensor = Logical("x", "BF16", (6, 6), ("x", "s"), FP8, ((1, 1), (4, 4)))
    held = {"x": np.arange(36, dtype=np.uint8).reshape(6, 6).view(E4M3), "s": np.ones((2, 2), np.float32)}
    part = decoded_part(place, tensor, held.__getitem__)
    assert gather((6,), BF16, [part], "x").astype(float).tolist() == [e4m3(7 * i) for i in range(6)]


# Which tensors belong together


def stored_of(**tensors):
    return {name: Stored(name, dtype, tuple(shape)) for name, (dtype, *shape) in tensors.items()}


def test_everything_that_does_not_fit_is_found():
    stored = stored_of(
        **{
            "a.weight": ("F8_E4M3", 200, 136),
            "b.weight_scale_inv": ("F32", 2, 2),
            "c.weight": ("BF16", 200, 136),
            "c.weight_scale_inv": ("F32", 2, 2),
            "d.weight": ("F8_E4M3", 200, 136),
            "d.weight_scale_inv": ("F32", 2, 1),
            "e.weight": ("F8_E4M3", 200, 136),
            "e.weight_scale_inv": ("I32", 2, 2),
            "f.weight": ("F8_E5M2", 8, 8),
            "g.weight": ("F8_E4M3", 8, 8),
            "g.weight_scale_inv": ("F32", 1, 1),
            "g.scale": ("F32", 1, 1),
            "h.weight": ("I8", 8, 4),
            "h.scale": ("F8_E8M0", 8, 1),
            "i.weight": ("F8_E4M3", 8),
            "i.weight_scale_inv": ("F32", 1),
            "j.weight": ("U8", 8, 8),
            "j.weight_scale_inv": ("F32", 1, 1),
        }
    )
    grouping = Fp8((128, 128), ("block",)).group(stored)
    lines = "\n".join(map(str, grouping.findings))
    for needed in (
        "tensor a.weight: found F8_E4M3 with no scale",
        "tensor b.weight: found nothing beside its scale b.weight_scale_inv",
        "tensor c.weight: found dtype BF16 beside its scale c.weight_scale_inv",
        "tensor d.weight_scale_inv: found shape [2, 1], needed shape [2, 2]",
        "tensor e.weight_scale_inv: found dtype I32",
        "tensor f.weight: found dtype F8_E5M2",
        "tensor g.weight: found F8_E4M3 with g.weight_scale_inv and g.scale",
        "tensor h.weight: found dtype I8 beside h.scale: packed FP4 (mxfp4)",
        "tensor i.weight_scale_inv: found shape [1], needed shape a weight of two axes",
        "tensor j.weight: found dtype U8 beside j.weight_scale_inv",
    ):
        assert needed in lines, lines
    assert len(grouping.findings) == 10


def test_scales_by_another_name_and_scales_of_activations():
    stored = stored_of(
        **{
            "a.weight": ("F8_E4M3", 200, 136),
            "a.scale": ("F8_E8M0", 2, 2),
            "a.input_scale": ("F32",),
            "b.weight": ("BF16", 8, 8),
            "b.k_scale": ("F32",),
            "norm.scale": ("F32", 8),
        }
    )
    tensors = Fp8((128, 128), ("block",)).group(stored).tensors
    assert list(tensors) == ["a.weight", "b.weight", "norm.scale"]
    assert tensors["a.weight"].parts == ("a.weight", "a.scale")
    assert tensors["a.weight"].beside == ("a.input_scale",)
    assert (tensors["b.weight"].format, tensors["b.weight"].beside) == ("plain", ("b.k_scale",))


def test_modules_not_converted_are_a_cross_check_alone():
    stored = stored_of(
        **{
            "model.language_model.layers.0.q.weight": ("F8_E4M3", 8, 8),
            "model.language_model.layers.0.q.weight_scale_inv": ("F32", 1, 1),
            "model.language_model.layers.0.gate.weight": ("BF16", 8, 8),
        }
    )

    def notices(*listed):
        grouping = Fp8((128, 128), ("block",), listed).group(stored)
        assert not grouping.findings
        assert grouping.tensors["model.language_model.layers.0.q.weight"].quantised
        return grouping.notices

    assert notices("lm_head", "language_model.model.layers.0.gate", "model.layers.0.qq") == ()
    for listed in ("model.layers.0.q", "language_model.model.layers.0", r"re:.*layers\.0\.q", "*.q"):
        (text,) = notices(listed)
        assert text.startswith("model.language_model.layers.0.q.weight: stored in FP8, and listed")
    bare = {name: item for name, item in stored.items() if "gate" in name}
    assert "none is stored so" in Fp8(None, ("tensor",)).group(bare).notices[0]


def test_packed_tensors_that_do_not_fit_are_found():
    stored = stored_of(
        **{
            "a.weight_packed": ("I32", 4, 8),
            "b.weight_scale": ("BF16", 4, 2),
            "c.weight_packed": ("I32", 4, 8),
            "c.weight_scale": ("BF16", 4, 3),
            "d.weight_packed": ("I32", 4, 8),
            "d.weight_scale": ("BF16", 4, 2),
            "d.weight_zero_point": ("I32", 1, 2),
            "e.weight_packed": ("U8", 4, 8),
            "e.weight_scale": ("BF16", 4, 2),
            "f.weight_packed": ("I32", 4, 8),
            "f.weight_scale": ("BF16", 4, 2),
            "f.weight_shape": ("I32", 3),
        }
    )
    grouping = Int4(32).group(stored)
    lines = "\n".join(map(str, grouping.findings))
    for needed in (
        "tensor a.weight_packed: found no scale",
        "tensor b.weight_packed: found nothing beside b.weight_scale",
        "tensor c.weight_scale: found BF16 [4, 3]",
        "tensor d.weight_zero_point: found zero points",
        "tensor e.weight_packed: found U8 [4, 8]",
        "tensor f.weight_shape: found I32 [3]",
    ):
        assert needed in lines, lines
    assert len(grouping.findings) == 6


def scheme(form: str, **weights):
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"weights": {"symmetric": True, **weights}}},
    }


def test_records_name_their_codecs():
    assert fp8_codec(FP8_RECORD) == Fp8((128, 128), ("block",))
    assert fp8_codec({**FP8_RECORD, "modules_to_not_convert": ["lm_head"]}) == Fp8((128, 128), ("block",), ("lm_head",))
    assert fp8_codec({"quant_method": "fp8"}) == Fp8(None, ("tensor", "channel"))
    assert fp8_codec({"quant_algo": "FP8", "exclude_modules": ["lm_head"]}) == Fp8(None, ("tensor",), ("lm_head",))
    assert fp8_codec(scheme("float-quantized", num_bits=8, type="float", strategy="channel")) == Fp8(None, ("channel",))
    blocked = scheme("float-quantized", num_bits=8, type="float", strategy="block", block_structure="128x64")
    assert fp8_codec(blocked) == Fp8((128, 64), ("block",))
    assert fp8_codec(INT4_RECORD) is None
    assert int4_codec(INT4_RECORD) == Int4(32)
    assert int4_codec(scheme("pack-quantized", num_bits=4, type="int", strategy="channel")) == Int4(None)
    assert codec_of({}) == Plain()
    assert codec_of({"text_config": {"quantization_config": INT4_RECORD}}) == Int4(32)
    assert codec_of({}, {"quantization": {"quant_algo": "FP8"}}) == Fp8(None, ("tensor",))


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt NVFP4'"),
        (scheme("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group"), "mxfp4-pack-quantized"),
        (scheme("pack-quantized", num_bits=8, type="int", strategy="channel"), "pack-quantized"),
        (
            scheme("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
            "pack-quantized",
        ),
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size"),
        (scheme("pack-quantized", num_bits=4, type="int", strategy="group", group_size=12), "group_size 12"),
        ({}, "quantised"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_methods_are_refused_by_name_with_examples(record, named):
    stored = stored_of(**{"x.qweight": ("I32", 4, 8), "norm.weight": ("BF16", 8)})
    with pytest.raises(ConversionError) as caught:
        codec_of({"quantization_config": record}, None, stored)
    assert named in str(caught.value)
    if "which are not supported" in str(caught.value):
        assert "x.qweight I32 [4, 8]" in str(caught.value)
        assert "norm" not in str(caught.value)


def test_records_that_differ_or_are_no_records_are_refused():
    with pytest.raises(ConversionError, match="differ"):
        record_of({"quantization_config": FP8_RECORD, "text_config": {"quantization_config": INT4_RECORD}})
    with pytest.raises(ConversionError, match="not an object"):
        record_of({"quantization_config": "fp8"})


def test_a_config_without_its_record_has_none_anywhere():
    config = {"a": 1, "quantization_config": FP8_RECORD, "text_config": {"b": 2, "compression_config": {}}}
    assert without_record(config) == {"a": 1, "text_config": {"b": 2}}
    record = {
        **FP8_RECORD,
        "modules_to_not_convert": ["language_model.lm_head", "language_model.model.layers.0.q", "x"],
    }
    spelled = respell_record(record, Spelling("language_model.model.", "language_model.lm_head."))
    assert spelled == {**FP8_RECORD, "modules_to_not_convert": ["lm_head", "model.layers.0.q", "x"]}


CUT = """
import os, sys
import numpy as np
from dewconv.converters.decoding import Blocked, Coded
from dewconv.families.errors import ConversionError
import ml_dtypes

codes = np.memmap(sys.argv[1], np.uint8, "r", shape=(512, 512)).view(ml_dtypes.float8_e4m3fn)
scales = Blocked.whole(np.ones((4, 4), np.float32), (128, 128))
coded = Coded("fp8", (512, 512), np.dtype(np.float32), Blocked.whole(codes, (1, 1)), scales, "experts.weight")
os.truncate(sys.argv[1], 4096)
out = np.empty((512, 512), np.float32)
for array, into in ((coded, out), (coded.transpose((1, 0)), out), (coded[8:], out[8:])):
    try:
        array.write(into)
    except ConversionError as error:
        print(error)
"""


def test_codes_cut_off_while_they_are_decoded_are_an_error_and_no_signal(tmp_path):
    path = tmp_path / "codes"
    path.write_bytes(bytes(512 * 512))
    done = subprocess.run([sys.executable, "-c", CUT, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 3
    assert all(line.startswith("experts.weight: cannot be read any more: its file was cut off") for line in told)
