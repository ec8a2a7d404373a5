"""Llama, the dense releases with one rope (transformers 5.24 `LlamaForCausalLM`, `LlamaConfig`): an example."""

from collections.abc import Iterator

from dewconv.dew_core.fields import DecoderFields
from dewconv.families.blocks import (
    PRE_NORMS,
    activation,
    attention,
    bookkeeping,
    gated_mlp,
    layer_norms,
    tied,
    trunk,
    widths,
)
from dewconv.families.family import Family, Variant
from dewconv.families.fields import fixed, flag, inert, same, via
from dewconv.families.rope import rope
from dewconv.families.rules import Statement

FIELDS = (
    *bookkeeping(),
    *widths(
        vocab=32000,
        hidden=4096,
        intermediate=11008,
        layers=32,
        heads=32,
        kv_heads=None,
        head_dim=None,
        longest=2048,
        eps=1e-6,
    ),
    activation("hidden_act", "silu"),
    tied(default=False),
    same("attention_bias", "attention_bias", flag, False),
    fixed("mlp_bias", False, "the gated feed-forward has no biases"),
    inert("pretraining_tp", why="how the release was trained"),
    rope(),
    via((), lambda config: {"scale_after_cast": True, "qk_norm": False}, lambda d: {}, "LlamaRMSNorm; no q/k norm"),
)


def weights(d: DecoderFields) -> Iterator[Statement]:
    yield from trunk(d)
    yield from layer_norms(d, PRE_NORMS)
    yield from attention(d)
    yield from gated_mlp(d)


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

FAMILY = Family(
    name="llama",
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    fields=FIELDS,
    weights=weights,
    reference="transformers:LlamaForCausalLM",
    variants={
        "untied": Variant(TINY, "grouped queries, an own head"),
        "tied": Variant({**TINY, "tie_word_embeddings": True}, "a tied head, absent from the file", head="absent"),
        "llama3": Variant({**TINY, "rope_scaling": LLAMA3}, "the llama3 ramp (Llama 3.1)", length=60),
    },
)
