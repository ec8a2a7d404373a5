"""The blocks that families share: lines of fields and tables of rules, named after what they describe.

A line block returns lines; a rule block takes the decoder fields and yields rules. Source names are the hub's
under the spelling `model.` / `lm_head.`; `Family.spellings` rewrites them for other releases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..dew_core.fields import DecoderFields
from ..dew_core.layers import layer_plan
from ..dew_core.records import MLA
from .fields import (
    REQUIRED,
    Config,
    Line,
    Unreadable,
    count,
    fixed,
    flag,
    inert,
    layer_count,
    optional,
    positive,
    same,
    value_of,
    via,
)
from .rules import Alias, OneOf, Rule, Statement, View

# Fields


def bookkeeping() -> tuple[Line, ...]:
    """Keys of every config class that do not reach the forward pass (transformers `PreTrainedConfig`)."""
    return (
        inert(
            "architectures",
            "model_type",
            "transformers_version",
            "_name_or_path",
            why="identify the checkpoint",
        ),
        inert("dtype", why="the stored dtype: the bank keeps each tensor's own"),
        inert(
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "unk_token_id",
            "sep_token_id",
            why="token ids: generation only",
        ),
        inert(
            "decoder_start_token_id",
            "forced_bos_token_id",
            "forced_eos_token_id",
            why="token ids: generation only",
        ),
        inert("use_cache", "cache_implementation", why="how the reference decodes, not what"),
        inert("return_dict", "output_attentions", "output_hidden_states", why="what the reference returns"),
        inert("chunk_size_feed_forward", why="how the reference saves memory, not what it computes"),
        inert(
            "_attn_implementation",
            "_attn_implementation_autoset",
            "attn_implementation",
            why="a kernel's name",
        ),
        inert(
            "id2label",
            "label2id",
            "problem_type",
            "finetuning_task",
            "task_specific_params",
            why="task heads",
        ),
        inert("initializer_range", why="initial values only"),
        inert("attention_dropout", why="training only: dropped out attention is not part of the checkpoint"),
        inert("auto_map", why="names remote code, which is never run"),
        inert("quantization_config", why="how weights are stored: read by the codecs"),
        fixed("is_decoder", False, "a decoder-only model does not cross-attend"),
        fixed("is_encoder_decoder", False, "a decoder-only model"),
        fixed("add_cross_attention", False, "a decoder-only model"),
    )


def widths(
    vocab: Any = REQUIRED,
    hidden: Any = REQUIRED,
    intermediate: Any = REQUIRED,
    layers: Any = REQUIRED,
    heads: Any = REQUIRED,
    kv_heads: Any = REQUIRED,
    head_dim: Any = REQUIRED,
    longest: Any = REQUIRED,
    eps: Any = REQUIRED,
) -> tuple[Line, ...]:
    """The sizes of a dense decoder. Each default is the config class's. A null `num_key_value_heads` is
    `num_attention_heads`; a `head_dim` default of None is hidden_size / num_attention_heads."""

    def read_heads(config: Config) -> Mapping[str, Any]:
        query = value_of(config, "num_attention_heads", count, heads)
        stated = config.get("num_key_value_heads", kv_heads)
        key_value = query if stated is None else value_of(config, "num_key_value_heads", count, kv_heads)
        if query % key_value:
            raise Unreadable("num_key_value_heads", key_value, f"a divisor of num_attention_heads, {query}")
        return {"num_heads": query, "num_kv_heads": key_value}

    def read_head_dim(config: Config) -> Mapping[str, Any]:
        if config.get("head_dim", head_dim) is not None:
            return {"head_dim": value_of(config, "head_dim", count, head_dim)}
        size, query = (
            value_of(config, "hidden_size", count, hidden),
            value_of(config, "num_attention_heads", count, heads),
        )
        if size % query:
            raise Unreadable("hidden_size", size, f"a multiple of num_attention_heads, {query}, or a stated head_dim")
        return {"head_dim": size // query}

    *shape, reach, norms = sizes(vocab, hidden, intermediate, layers, longest, eps)
    return (
        *shape,
        via(
            ("num_attention_heads", "num_key_value_heads"),
            read_heads,
            lambda d: {"num_attention_heads": d.num_heads, "num_key_value_heads": d.kv_heads},
        ),
        via(("head_dim",), read_head_dim, lambda d: {"head_dim": d.head_features}),
        reach,
        norms,
    )


def sizes(vocab: Any, hidden: Any, intermediate: Any, layers: Any, longest: Any, eps: Any) -> tuple[Line, ...]:
    """The sizes of a decoder beside its attention's. Each default is the config class's."""
    return (
        same("vocab_size", "vocab_size", count, vocab),
        same("hidden_size", "emb_features", count, hidden),
        same("intermediate_size", "mlp_features", count, intermediate),
        same("num_hidden_layers", "num_layers", layer_count, layers),
        same("max_position_embeddings", "max_seq_len", count, longest),
        same("rms_norm_eps", "norm_eps", positive, eps),
    )


def latent_sizes(heads: int, q_lora: int | None, kv_lora: int, nope: int, rope: int, value: int) -> tuple[Line, ...]:
    """The sizes of latent attention, by DeepSeek's keys. Each default is the config class's.

    `num_key_value_heads` is `num_attention_heads` where it is stated. `head_dim` says nothing: configs state the
    rotary width, the other one, or hidden / heads, and the classes read the two widths alone.
    """

    def read(config: Config) -> Mapping[str, Any]:
        query = value_of(config, "num_attention_heads", count, heads)
        stated = config.get("num_key_value_heads")
        if stated is not None and count("num_key_value_heads", stated) != query:
            raise Unreadable("num_key_value_heads", stated, f"num_attention_heads, {query}: every head has its key")
        mixer = MLA(
            q_lora_rank=value_of(config, "q_lora_rank", optional(count), q_lora),
            kv_lora_rank=value_of(config, "kv_lora_rank", count, kv_lora),
            qk_nope_head_dim=value_of(config, "qk_nope_head_dim", count, nope),
            qk_rope_head_dim=value_of(config, "qk_rope_head_dim", count, rope),
            v_head_dim=value_of(config, "v_head_dim", count, value),
        )
        if mixer.qk_rope_head_dim % 2:
            raise Unreadable("qk_rope_head_dim", mixer.qk_rope_head_dim, "an even number: positions turn pairs")
        if config.get("qk_head_dim", mixer.head_dim) != mixer.head_dim:
            raise Unreadable("qk_head_dim", config["qk_head_dim"], f"{mixer.head_dim}, the sum of its two parts")
        return {"num_heads": query, "num_kv_heads": query, "mixer": mixer, "qk_norm": False}

    def write(d: DecoderFields) -> Mapping[str, Any]:
        written: dict[str, Any] = {"num_attention_heads": d.num_heads, "num_key_value_heads": d.kv_heads}
        return written | {key: getattr(d.mixer, key) for key in LATENT_KEYS}

    return (
        via(("num_attention_heads", "num_key_value_heads", *LATENT_KEYS, "qk_head_dim"), read, write),
        inert("head_dim", why="the widths of latent attention are qk_nope_head_dim, qk_rope_head_dim and v_head_dim"),
    )


LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""The config keys that are `records.MLA`'s fields."""


ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu": "geglu_exact"}
"""transformers `ACT2FN` name -> `GatedMLP` activation."""


def activation(key: str, default: str) -> Line:
    """The gated MLP's activation, under the family's key (`hidden_act`, Gemma's `hidden_activation`)."""
    written = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "geglu_exact": "gelu"}

    def read(config: Config) -> Mapping[str, Any]:
        name = config.get(key, default)
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise Unreadable(key, name, f"one of {', '.join(ACTIVATIONS)}", "not supported")
        return {"mlp": ACTIVATIONS[name]}

    return via((key,), read, lambda d: {key: written[d.mlp]})


def tied(default: bool) -> Line:
    """Whether the head is the embedding table. `default` is the config class's."""
    return same("tie_word_embeddings", "tie_embeddings", flag, default)


def layer_pattern(config: Config, layers: int, known: Sequence[str]) -> tuple[str, ...] | None:
    """The stated `layer_types`, or None when unset. Raises Unreadable for a wrong length or an unknown type."""
    stated = config.get("layer_types")
    if stated is None:
        return None
    if not isinstance(stated, list | tuple) or len(stated) != layers:
        length = len(stated) if isinstance(stated, list | tuple) else stated
        raise Unreadable("layer_types", length, f"{layers} entries, one per layer of num_hidden_layers")
    for name in stated:
        if name not in known:
            raise Unreadable("layer_types", name, f"one of {', '.join(known)}", "not supported")
    return tuple(stated)


# Rules


def linear(source: str, leaf: str, inputs: int, outputs: int, over: Mapping[str, Sequence[int]] | None = None) -> Rule:
    """A torch Linear weight [outputs, inputs] and a Flax kernel [inputs, outputs]."""
    return Rule(source, View.of(outputs, inputs).T, leaf, View.of(inputs, outputs), over or {})


def vector(source: str, leaf: str, size: int, over: Mapping[str, Sequence[int]] | None = None) -> Rule:
    """A tensor of one axis, the same on both sides: a norm's scale, a bias."""
    return Rule(source, View.of(size), leaf, View.of(size), over or {})


def trunk(d: DecoderFields) -> Iterator[Statement]:
    """Embedding, final norm and head. A tied head has no rule: an equal copy on disk is an alias, a different one
    makes the decoder untied (transformers 5.24 `tie_weights` keeps a different head and warns)."""
    yield Rule(
        "model.embed_tokens.weight",
        View.of(d.vocab_size, d.emb_features),
        "embed_tokens/embedding",
        View.of(d.vocab_size, d.emb_features),
    )
    yield vector("model.norm.weight", "norm/scale", d.emb_features)
    if d.tie_embeddings:
        yield Alias(
            "lm_head.weight",
            "model.embed_tokens.weight",
            {"tie_embeddings": False},
            "the config ties the head to the embedding",
        )
    else:
        yield linear("lm_head.weight", "lm_head/kernel", d.emb_features, d.vocab_size)


def layers(d: DecoderFields) -> dict[str, range]:
    """Every layer, as the indices of a rule."""
    return {"l": range(d.num_layers)}


def layer_norms(d: DecoderFields, names: Mapping[str, str]) -> Iterator[Rule]:
    """Each layer's norms: the checkpoint's name -> the parameter's, for as many as the wiring has."""
    for source, leaf in names.items():
        yield vector(f"model.layers.{{l}}.{source}.weight", f"layers_{{l}}/{leaf}/scale", d.emb_features, layers(d))


PRE_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
}
"""The plain pre-norm block: `post_attention_layernorm` norms the feed-forward's input."""

SANDWICH_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
"""Gemma's block, whose `post_attention_layernorm` norms the attention's output (transformers 5.24
`Gemma3DecoderLayer`)."""


def attention(d: DecoderFields) -> Iterator[Rule]:
    """Grouped-query attention: q, k, v and o projections, their biases, and the q/k norms.

    Layers are grouped by what their kind says of head sizes, so kinds of different geometry are separate rules.
    """
    plan = layer_plan(d)
    geometries: dict[tuple[int, int], list[int]] = {}
    for index, spec in enumerate(plan.specs):
        geometries.setdefault((spec.kind.num_kv_heads, spec.kind.head_dim), []).append(index)
    output_bias = d.attention_bias if d.o_proj_bias is None else d.o_proj_bias
    for (kv_heads, head_dim), members in geometries.items():
        over = {"l": members}
        query, key_value = d.num_heads * head_dim, kv_heads * head_dim
        source, leaf = "model.layers.{l}.self_attn.", "layers_{l}/self_attn/"
        for name, width in (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value)):
            yield linear(f"{source}{name}.weight", f"{leaf}{name}/kernel", d.emb_features, width, over)
            if d.attention_bias:
                yield vector(f"{source}{name}.bias", f"{leaf}{name}/bias", width, over)
        yield linear(f"{source}o_proj.weight", f"{leaf}o_proj/kernel", query, d.emb_features, over)
        if output_bias:
            yield vector(f"{source}o_proj.bias", f"{leaf}o_proj/bias", d.emb_features, over)
        if d.qk_norm:
            whole = d.qk_norm_scope == "projection"
            yield vector(f"{source}q_norm.weight", f"{leaf}q_norm/scale", query if whole else head_dim, over)
            yield vector(f"{source}k_norm.weight", f"{leaf}k_norm/scale", key_value if whole else head_dim, over)


def latent_attention(d: DecoderFields) -> Iterator[Rule]:
    """Latent attention of every layer whose mixer is an `MLA`: its projections down and up, their norms and biases.

    `kv_a_proj_with_mqa` gives the latent, then the rotary key; `q_b_proj` a head's plain features, then its rotary
    ones; `kv_b_proj` a head's key, then its value. The decoder cuts them where the file does.
    """
    mixers: dict[MLA, list[int]] = {}
    for index, spec in enumerate(layer_plan(d).specs):
        if isinstance(spec.kind.mixer, MLA):
            mixers.setdefault(spec.kind.mixer, []).append(index)
    output_bias = d.attention_bias if d.o_proj_bias is None else d.o_proj_bias
    source, leaf = "model.layers.{l}.self_attn.", "layers_{l}/self_attn/"
    for mixer, members in mixers.items():
        over, query = {"l": members}, d.num_heads * mixer.head_dim
        if mixer.q_lora_rank is None:
            yield linear(f"{source}q_proj.weight", f"{leaf}q_proj/kernel", d.emb_features, query, over)
        else:
            yield linear(f"{source}q_a_proj.weight", f"{leaf}q_a_proj/kernel", d.emb_features, mixer.q_lora_rank, over)
            if d.attention_bias:
                yield vector(f"{source}q_a_proj.bias", f"{leaf}q_a_proj/bias", mixer.q_lora_rank, over)
            yield vector(f"{source}q_a_layernorm.weight", f"{leaf}q_a_layernorm/scale", mixer.q_lora_rank, over)
            yield linear(f"{source}q_b_proj.weight", f"{leaf}q_b_proj/kernel", mixer.q_lora_rank, query, over)
        both, rank = mixer.kv_lora_rank + mixer.qk_rope_head_dim, mixer.kv_lora_rank
        name = "kv_a_proj_with_mqa"
        yield linear(f"{source}{name}.weight", f"{leaf}{name}/kernel", d.emb_features, both, over)
        if d.attention_bias:
            yield vector(f"{source}{name}.bias", f"{leaf}{name}/bias", both, over)
        yield vector(f"{source}kv_a_layernorm.weight", f"{leaf}kv_a_layernorm/scale", rank, over)
        expanded = d.num_heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
        yield linear(f"{source}kv_b_proj.weight", f"{leaf}kv_b_proj/kernel", rank, expanded, over)
        yield linear(
            f"{source}o_proj.weight", f"{leaf}o_proj/kernel", d.num_heads * mixer.v_head_dim, d.emb_features, over
        )
        if output_bias:
            yield vector(f"{source}o_proj.bias", f"{leaf}o_proj/bias", d.emb_features, over)


def dense_layers(d: DecoderFields) -> dict[int, list[int]]:
    """The layers with a dense feed-forward, by its width."""
    widths_of: dict[int, list[int]] = {}
    for index, spec in enumerate(layer_plan(d).specs):
        if not spec.routed and spec.width:
            widths_of.setdefault(spec.width, []).append(index)
    return widths_of


def gated_mlp(d: DecoderFields) -> Iterator[Rule]:
    """The gated feed-forward of every dense layer: gate, up and down projections, without biases."""
    for width, members in dense_layers(d).items():
        over = {"l": members}
        source, leaf = "model.layers.{l}.mlp.", "layers_{l}/mlp/"
        for name in ("gate_proj", "up_proj"):
            yield linear(f"{source}{name}.weight", f"{leaf}{name}/kernel", d.emb_features, width, over)
        yield linear(f"{source}down_proj.weight", f"{leaf}down_proj/kernel", width, d.emb_features, over)


def experts(d: DecoderFields, shared: str = "shared_experts") -> Iterator[Statement]:
    """The routed feed-forward of every sparse layer: router, its correction bias, experts, shared experts.

    Experts lie one tensor each on the hub, or fused in two tensors a layer (`gate_up_proj` [E, 2 I, D], gate rows
    first, and `down_proj` [E, D, I]: transformers 5's form in memory).
    """
    mixture = d.mixture
    if mixture is None:
        return
    count, features = mixture.experts, d.emb_features
    for index, spec in enumerate(layer_plan(d).specs):
        if not spec.routed:
            continue
        width = mixture.expert_features or spec.width
        source, leaf, here = "model.layers.{l}.mlp.", "layers_{l}/mlp/", {"l": [index]}
        yield linear(f"{source}gate.weight", f"{leaf}gate/kernel", features, count, here)
        if mixture.bias:
            bias = "gate.e_score_correction_bias"
            yield vector(f"{source}{bias}", f"{leaf}{bias.replace('.', '/')}", count, here)
        each = {"l": [index], "e": range(count)}
        single = tuple(
            linear(f"{source}experts.{{e}}.{name}.weight", f"{leaf}experts/{name}/kernel", inputs, outputs, each)
            for name, inputs, outputs in (
                ("gate_proj", features, width),
                ("up_proj", features, width),
                ("down_proj", width, features),
            )
        )
        both = View.of(count, 2 * width, features)
        stack = View.of(count, features, width)
        fused = (
            Rule(
                f"{source}experts.gate_up_proj",
                both[:, :width].transpose(0, 2, 1),
                f"{leaf}experts/gate_proj/kernel",
                stack,
                here,
            ),
            Rule(
                f"{source}experts.gate_up_proj",
                both[:, width:].transpose(0, 2, 1),
                f"{leaf}experts/up_proj/kernel",
                stack,
                here,
            ),
            Rule(
                f"{source}experts.down_proj",
                View.of(count, features, width).transpose(0, 2, 1),
                f"{leaf}experts/down_proj/kernel",
                View.of(count, width, features),
                here,
            ),
        )
        yield OneOf(f"the experts of layer {index}", {"one tensor an expert": single, "fused": fused})
        if mixture.shared_features:
            size = mixture.shared_features
            for name in ("gate_proj", "up_proj"):
                yield linear(
                    f"{source}{shared}.{name}.weight", f"{leaf}shared_experts/{name}/kernel", features, size, here
                )
            yield linear(
                f"{source}{shared}.down_proj.weight", f"{leaf}shared_experts/down_proj/kernel", size, features, here
            )
