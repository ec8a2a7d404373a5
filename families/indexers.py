"""The lines and rules of DeepSeek sparse attention, as DeepSeek-V3.2 and GLM-5 state it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..dew_core.fields import DecoderFields
from ..dew_core.layers import layer_plan
from ..dew_core.records import MLA, Indexer
from .blocks import latent_sizes, linear, vector
from .fields import Config, Line, Unreadable, count, inert, value_of, via
from .rules import Rule

INDEX_KEYS = ("index_n_heads", "index_head_dim", "index_topk")
"""The config keys that are `records.Indexer`'s fields."""
EVERY_LAYER = "indexed_attention"
"""What transformers 5 writes for every layer in `layer_types`."""


def indexed_latent_sizes(
    heads: int,
    q_lora: int,
    kv_lora: int,
    nope: int,
    rope: int,
    value: int,
    index_heads: int,
    index_dim: int,
    chosen: int,
    interleaved: bool,
) -> tuple[Line, ...]:
    """The sizes of latent attention and of its indexer. Each argument but the last is the config class's default.

    interleaved: which features of the indexer are rotary pairs, by its class: neighbours (transformers 5.24
    `GlmMoeDsaIndexer`) or halves (`DeepseekV32Indexer`). A null `q_lora_rank` is refused: both classes have a query
    latent, which the indexer's queries come from.
    """
    plain, head_dim = latent_sizes(heads=heads, q_lora=q_lora, kv_lora=kv_lora, nope=nope, rope=rope, value=value)

    def read(config: Config) -> Mapping[str, Any]:
        values = plain.read(config)
        mixer: MLA = values["mixer"]
        if mixer.q_lora_rank is None:
            raise Unreadable("q_lora_rank", None, "a whole number: the indexer's queries come from the query latent")
        indexer = Indexer(
            index_n_heads=value_of(config, "index_n_heads", count, index_heads),
            index_head_dim=value_of(config, "index_head_dim", count, index_dim),
            index_topk=value_of(config, "index_topk", count, chosen),
            indexer_rope_interleave=interleaved,
        )
        if indexer.index_head_dim < mixer.qk_rope_head_dim:
            needed = f"at least qk_rope_head_dim, {mixer.qk_rope_head_dim}: the first of an index head's features turn"
            raise Unreadable("index_head_dim", indexer.index_head_dim, needed)
        return {**values, "mixer": replace(mixer, indexer=indexer)}

    def write(d: DecoderFields) -> Mapping[str, Any]:
        indexer = d.mixer.indexer if isinstance(d.mixer, MLA) else None
        return {**plain.write(d), **({} if indexer is None else {key: getattr(indexer, key) for key in INDEX_KEYS})}

    return (
        via((*plain.keys, *INDEX_KEYS), read, write),
        head_dim,
        via(("layer_types",), read_layer_types, lambda d: {}, "every layer has sparse attention"),
        inert("mlp_bias", why="stored by the class, whose feed-forwards have no bias either way"),
    )


def read_layer_types(config: Config) -> Mapping[str, Any]:
    stated = config.get("layer_types")
    for name in stated if isinstance(stated, list | tuple) else [] if stated is None else [stated]:
        if name != EVERY_LAYER:
            raise Unreadable("layer_types", name, f"{EVERY_LAYER} for every layer", "not supported")
    return {}


def indexers(d: DecoderFields) -> Iterator[Rule]:
    """The indexer of every layer that does not share another's choice: queries from the query latent, keys with their
    layer norm and the heads' weights from the states."""
    owning: dict[MLA, list[int]] = {}
    for index, spec in enumerate(layer_plan(d).specs):
        mixer = spec.kind.mixer
        if isinstance(mixer, MLA) and mixer.indexer is not None and not spec.kv_shared:
            owning.setdefault(mixer, []).append(index)
    source, leaf = "model.layers.{l}.self_attn.indexer.", "layers_{l}/self_attn/indexer/"
    for mixer, members in owning.items():
        over, rank = {"l": members}, mixer.q_lora_rank or d.emb_features
        assert mixer.indexer is not None
        heads, width = mixer.indexer.index_n_heads, mixer.indexer.index_head_dim
        yield linear(f"{source}wq_b.weight", f"{leaf}wq_b/kernel", rank, heads * width, over)
        yield linear(f"{source}wk.weight", f"{leaf}wk/kernel", d.emb_features, width, over)
        yield vector(f"{source}k_norm.weight", f"{leaf}k_norm/scale", width, over)
        yield vector(f"{source}k_norm.bias", f"{leaf}k_norm/bias", width, over)
        yield linear(f"{source}weights_proj.weight", f"{leaf}weights_proj/kernel", d.emb_features, heads, over)
