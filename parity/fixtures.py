"""Tiny checkpoints: a variant's config, weights in which nothing is neutral, and the hub's tensor names.

The names are those the torch module gives its parameters, respelled by the tables of `hub_names`. The families' rules
make none of them, so that a wrong rule cannot agree with itself.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from ..families.errors import ConversionError
from ..families.family import Family, Variant
from .hub_names import as_stored, hub_name
from .torch_experts import FUSED, unfused
from .torch_storage import encode, quantisation_record

ROUTER = "mlp.gate.weight"
CORRECTION = "e_score_correction_bias"
CORRECTION_BIAS = (0.0, 0.3)
"""Mean and spread of a router's correction biases, where the variant states none. Scores lie in 0-1."""

GENERATION = {"do_sample": True, "eos_token_id": [1, 106], "top_k": 64, "top_p": 0.95}
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}\n"


def model_class(name: str) -> type[Any]:
    """A transformers class by name. Raises ConversionError when this version has none of that name."""
    found = getattr(transformers, str(name), None)
    if not isinstance(found, type) or not hasattr(found, "from_pretrained"):
        raise ConversionError(
            f"transformers {transformers.__version__} has no class {name!r}; parity has nothing to compare with"
        )
    return found


def architecture(config: Mapping[str, Any], family: Family) -> str:
    """The reference's class name for a config.json: the wrapper's when it has a `text_config`."""
    if "text_config" in config and family.wrapper is not None:
        return family.wrapper.architecture
    return family.reference.partition(":")[2]


def away_from_neutral(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Effective norm scales in [0.4, 0.9] or [1.1, 1.6]: away from 0 and 1, and never equal."""
    values = generator.uniform(0.4, 0.9, shape)
    return np.where(generator.random(shape) < 0.5, values, values + 0.7)


def draw(name: str, parameter: torch.Tensor, initial: float | None, generator: np.random.Generator) -> np.ndarray:
    """A parameter's values, float32.

    Vectors that a fresh module fills with 1 are scales, with 0 under a norm's name offsets from 1 (Gemma), else
    biases of magnitude 0.1 to 0.5. Matrices are normal with standard deviation fan_in^-1/2, which keeps the size
    of what they read; embedding tables 0.6, which puts tied logits in O(1-10) at these widths.
    """
    shape = tuple(parameter.shape)
    if len(shape) == 1 and initial == 1.0:
        values = away_from_neutral(generator, shape)
    elif len(shape) == 1 and "norm" in name and not name.endswith(".bias"):
        values = away_from_neutral(generator, shape) - 1.0
    elif len(shape) == 1:
        values = generator.uniform(0.1, 0.5, shape) * generator.choice([-1.0, 1.0], shape)
    elif "embed" in name:
        values = generator.normal(0.0, 0.6, shape)
    elif name.startswith("lm_head"):
        values = generator.normal(0.0, 3.0 * shape[1] ** -0.5, shape)
    elif name.endswith(ROUTER):
        values = generator.normal(0.0, 1.5 * shape[1] ** -0.5, shape)
    elif FUSED.match(name):
        values = generator.normal(0.0, shape[-1] ** -0.5, shape)
    else:
        values = generator.normal(0.0, float(np.prod(shape[1:])) ** -0.5, shape)
    return values.astype(np.float32)


def draw_weights(variant: Variant, family: Family, seed: int = 0) -> dict[str, torch.Tensor]:
    """A variant's tensors by hub name, in their storage dtypes. Deterministic in the seed."""
    name_of_class = architecture(variant.config, family)
    kind = model_class(name_of_class)
    config = kind.config_class.from_dict(copy.deepcopy(dict(variant.config)))
    with torch.no_grad():
        module = kind(config)
    generator = np.random.default_rng(seed)
    tensors: dict[str, torch.Tensor] = {}
    named = dict(module.named_parameters())
    embedding = module.get_input_embeddings().weight
    head_shape = tuple(embedding.shape)
    table = next(name for name, parameter in named.items() if parameter is embedding)
    values = {}
    for name, parameter in named.items():
        flat = parameter.detach().float()
        constant = float(flat.reshape(-1)[0]) if bool((flat == flat.reshape(-1)[0]).all()) else None
        values[name] = draw(name, parameter, constant, generator)
    if variant.head == "equal":
        values["lm_head.weight"] = values[table]
    elif variant.head == "different":
        values["lm_head.weight"] = generator.normal(0.0, 3.0 * head_shape[1] ** -0.5, head_shape).astype(np.float32)
    mean, spread = variant.correction_bias or CORRECTION_BIAS
    for name, buffer in module.named_buffers():
        if name.endswith(CORRECTION):
            drawn = generator.permutation(np.linspace(mean - spread / 2, mean + spread / 2, len(buffer)))
            values[name] = drawn.astype(np.float32)
    values |= draw_depths(variant, values, generator)
    if variant.form != "fused":
        values = {hub: part for name, array in values.items() for hub, part in unfused(name, array)}
    coded = quantisation_record(variant.config) if variant.coded else None
    for name, array in as_stored(name_of_class, values).items():
        name = hub_name(name_of_class, variant.spelling.body, name)
        if coded is not None and re.search(variant.coded, name):
            tensors |= encode(name, array, coded, generator)
            continue
        wide = variant.storage == "float32" or name.endswith(variant.float32 or ("\0",))
        tensors[name] = torch.from_numpy(array.copy()).to(torch.float32 if wide else torch.bfloat16)
    return tensors


def draw_depths(
    variant: Variant, values: Mapping[str, np.ndarray], generator: np.random.Generator
) -> dict[str, np.ndarray]:
    """The prediction-depth layers past the last one: a sparse layer like it, two norms, the projection of both
    streams, and a head's norm. The first has its own embedding and head beside them, as GLM-4.5 has; the others
    share the model's, as GLM-4.6 does."""
    count = variant.config.get("num_hidden_layers", 0)
    found: dict[str, np.ndarray] = {}
    for depth in range(variant.depths):
        stem, last = f"model.layers.{count + depth}.", f"model.layers.{count - 1}."
        like = {stem + name.removeprefix(last): array.shape for name, array in values.items() if name.startswith(last)}
        table = values["model.embed_tokens.weight"].shape
        width = table[1]
        like |= {f"{stem}eh_proj.weight": (width, 2 * width)}
        like |= {f"{stem}{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head.norm")}
        if depth == 0:
            like |= {f"{stem}{name}.weight": table for name in ("embed_tokens", "shared_head.head")}
        found |= {name: generator.normal(0.0, 0.5, shape).astype(np.float32) for name, shape in like.items()}
    return found


def write_checkpoint(
    directory: str | Path, variant: Variant, family: Family, seed: int = 0, shards: int | None = None
) -> Path:
    """Write a variant's checkpoint directory: config.json as the variant has it, weights, side files.

    shards: how many files the weights are in; unset, two when the decoder has eight layers or more, prediction
    depths or quantised weights, else one.
    Returns the directory, which must not exist or be empty.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = draw_weights(variant, family, seed)
    text = variant.config.get("text_config", variant.config)
    if shards is None:
        shards = 2 if variant.depths or variant.coded or text.get("num_hidden_layers", 0) >= 8 else 1
    (directory / "config.json").write_text(json.dumps(variant.config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
    (directory / "tokenizer_config.json").write_text('{\n  "bos_token": "<bos>",\n  "eos_token": "<eos>"\n}\n')
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    # Cut in the order of names, so that a layer's tensors straddle two files, as releases' do.
    names = sorted(tensors)
    parts = [names[n * len(names) // shards : (n + 1) * len(names) // shards] for n in range(shards)]
    if variant.depths:
        # A prediction depth and the head in one file: what leaves the one out must not leave out the other.
        ends = tuple(f"model.layers.{text['num_hidden_layers'] + depth}." for depth in range(variant.depths))
        apart = [name for name in names if name.startswith((*ends, "lm_head."))]
        parts = [[name for name in names if name not in apart], apart]
    if variant.coded:
        # The scales of the first file's codes lie in the second, as some of a release's do.
        scales = [name for name in parts[0] if name.endswith(("weight_scale_inv", "weight_scale"))]
        parts[:2] = [name for name in parts[0] if name not in scales], scales + parts[1]
    weight_map = {}
    for number, part in enumerate(parts):
        shard = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, directory / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return directory
