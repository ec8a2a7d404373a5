"""Quantised storage on the torch side: tiny checkpoints are stored in it, and references read plain copies.

transformers 5.24 reads block-scaled FP8 without a GPU, but refuses matrices that are not whole blocks and does not
round to the checkpoint's dtype when it computes in float32; packed int4 needs a package of its own. Both are decoded
here in torch, from the formats' definitions alone: nothing here reads `converters`' codecs.

    fp8     X.weight float8_e4m3fn, X.weight_scale_inv float32 a block: code * scale
    int4    X.weight_packed int32, eight codes plus 8 a word, the lowest bits first; X.weight_scale a group of columns:
            (code - 8) * scale; X.weight_shape: rows and columns

The product is taken in float32 and rounded once, to bfloat16.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..families.errors import ConversionError

RECORDS = ("quantization_config", "compression_config")
MODELOPT = "hf_quant_config.json"
"""ModelOpt's record beside config.json."""
NIBBLES = 8
LARGEST = 448.0
"""Of float8_e4m3fn."""
SCALES = (".weight_scale_inv", ".weight_scale", ".scale")


def quantisation_record(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantisation record of a config.json or of its text config, None without one."""
    for part in (config, config.get("text_config") or {}):
        for key in RECORDS:
            if isinstance(part.get(key), Mapping):
                return part[key]
    return None


def without_records(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without its quantisation records."""
    kept = {key: value for key, value in config.items() if key not in RECORDS}
    if isinstance(kept.get("text_config"), Mapping):
        kept["text_config"] = without_records(kept["text_config"])
    return kept


def _block(record: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block of an FP8 scale, None where one is for a row or a tensor (transformers' key; ModelOpt's algorithm)."""
    size = [128, 128] if record.get("quant_algo") == "FP8_PB_WO" else record.get("weight_block_size")
    return None if size is None else (size[0], size[1])


def _group(record: Mapping[str, Any]) -> int:
    """The columns of an int4 scale."""
    return next(iter(record["config_groups"].values()))["weights"]["group_size"]


def _spread(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """A scale for every element of [..., o, i]: each repeated over its block, blocks at the edges cut."""
    whole = scales.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return whole[..., : shape[-2], : shape[-1]]


# Storing


def encode(
    name: str, values: np.ndarray, record: Mapping[str, Any], generator: np.random.Generator
) -> dict[str, torch.Tensor]:
    """A matrix [o, i] as its stored tensors. Blocks differ in scale by a factor of up to four, so that none can stand
    for another: the stored weights are not `values`, but as large."""
    matrix = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    if record.get("quant_method") == "fp8":
        rows, columns = record["weight_block_size"]
        scales = _largest(matrix, rows, columns) / LARGEST
        codes = (matrix / _spread(scales, (rows, columns), matrix.shape)).to(torch.float8_e4m3fn)
        scales = scales * _factors(scales.shape, generator)
        # DeepSeek V3.1's `ue8m0`: powers of two, in float32 all the same.
        stored = torch.exp2(torch.log2(scales).round()) if record.get("scale_fmt") == "ue8m0" else scales
        return {name: codes, f"{name}_scale_inv": stored}
    group = _group(record)
    scales = _largest(matrix, 1, group) / 7.5
    codes = (matrix / _spread(scales, (1, group), matrix.shape)).round().clamp(-8, 7).to(torch.int64).numpy() + 8
    words = (codes.reshape(len(codes), -1, NIBBLES) << (4 * np.arange(NIBBLES))).sum(-1).astype(np.uint32)
    return {
        f"{name}_packed": torch.from_numpy(words.view(np.int32).copy()),
        f"{name}_scale": (scales * _factors(scales.shape, generator)).bfloat16(),
        f"{name}_shape": torch.tensor(matrix.shape, dtype=torch.int32),
    }


def _largest(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The largest magnitude of every block."""
    down, across = -(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns)
    padded = torch.zeros(down * rows, across * columns)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix.abs()
    return padded.reshape(down, rows, across, columns).amax((1, 3))


def _factors(shape: torch.Size, generator: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(np.exp2(generator.uniform(-1.0, 1.0, tuple(shape))).astype(np.float32))


# Reading


def decode_fp8(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """block: the shape of a block; None where a scale is for a row or for the whole tensor."""
    if block is not None and scales.ndim == codes.ndim:
        spread = _spread(scales, block, tuple(codes.shape))
    else:
        spread = scales.float().reshape(-1, 1) if scales.numel() > 1 else scales.float().reshape(())
    return (codes.float() * spread).bfloat16()


def decode_int4(packed: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    shifts = 4 * torch.arange(NIBBLES, dtype=torch.int64)
    codes = (packed.to(torch.int64)[..., None] >> shifts) & 15
    values = codes.reshape(*packed.shape[:-1], -1).float() - 8
    return (values * _spread(scales, (1, group), tuple(values.shape))).bfloat16()


@contextmanager
def plain_checkpoint(directory: str | Path, config: Mapping[str, Any]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """`directory` and `config` as they are, or, when the config has a quantisation record, a temporary copy with every
    weight decoded and a config without the record."""
    directory, record = Path(directory), quantisation_record(config)
    if record is None and (directory / MODELOPT).is_file():
        beside = json.loads((directory / MODELOPT).read_text())
        record = beside.get("quantization", beside)
    if record is None:
        yield directory, config
        return
    with TemporaryDirectory(prefix="dewconv-decoded-") as scratch:
        where, plain = Path(scratch), without_records(config)
        for file in directory.glob("*.json"):
            if not file.name.endswith(".index.json") and file.name != MODELOPT:
                shutil.copyfile(file, where / file.name)
        (where / "config.json").write_text(json.dumps(plain, indent=2) + "\n")
        _write_decoded(directory, where, record)
        yield where, plain


def _write_decoded(directory: Path, where: Path, record: Mapping[str, Any]) -> None:
    """Every shard of `directory` decoded, under its own name, and an index of them."""
    weight_map: dict[str, str] = {}
    with ExitStack() as stack:
        files = {
            shard: stack.enter_context(safe_open(shard, "pt")) for shard in sorted(directory.glob("*.safetensors"))
        }
        place = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
        for shard, file in files.items():
            decoded: dict[str, torch.Tensor] = {}
            for name in file.keys():  # noqa: SIM118
                decoded |= _decoded(name, place, record)
            save_file(decoded, where / shard.name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(decoded, shard.name)
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (where / "model.safetensors.index.json").write_text(json.dumps(index))


def _decoded(name: str, place: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What the stored tensor `name` is in a plain checkpoint: nothing, when it is part of another. place: the open
    file of every tensor."""

    def read(part: str) -> torch.Tensor:
        if part not in place:
            raise ConversionError(f"tensor {part} is missing: codes mean nothing without it")
        return place[part].get_tensor(part)

    if name.endswith(".weight_packed"):
        stem = name.removesuffix("_packed")
        return {stem: decode_int4(read(name), read(f"{stem}_scale"), _group(record))}
    module = name.rpartition(".")[0]
    coded = (f"{module}.weight", f"{module}.weight_packed")
    if name.endswith((*SCALES, ".weight_shape", ".input_scale")) and any(other in place for other in coded):
        return {}
    tensor = read(name)
    if tensor.dtype != torch.float8_e4m3fn:
        return {name: tensor}
    found = [module + end for end in SCALES if module + end in place]
    return {name: decode_fp8(tensor, read(found[0] if found else module + SCALES[0]), _block(record))}
