"""The records a decoder is described with: plain frozen values, JSON-able, importable without JAX.

Every name, field and default is the decoder reference's. Records whose machinery this release does not build
(AltUp, hyper-connections, …) are present so that the record of a decoder is complete; the
decoder refuses them by name when they are set (`CausalTransformer.refuse_unbuildable_fields`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

GatedActivation = Literal["swiglu", "geglu", "geglu_exact"]


@dataclass(frozen=True)
class RopeScaling:
    """A rescaling of rotary frequencies that keeps cos and sin at amplitude 1.

    rope_type "linear" divides every inverse frequency by `factor`; "llama3" is Llama 3.1's ramp, which divides
    the frequencies of wavelength above `original_max_position_embeddings / low_freq_factor`, keeps those below
    `original_max_position_embeddings / high_freq_factor` and blends between
    (transformers 5.24 `modeling_rope_utils`, linear and llama3).
    """

    rope_type: Literal["linear", "llama3"] = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): per-frequency interpolation and an amplitude on cos and sin.

    The amplitude is `attention_factor` when stated; else m(mscale)/m(mscale_all_dim) when both are non-zero;
    else m(1), with m(s) = 0.1 s ln(factor) + 1 for factor > 1 and 1 otherwise. `truncate` rounds the
    correction range outwards to whole dimensions (transformers 5.24 `modeling_rope_utils`, yarn).
    """

    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class MixerBase:
    """A token mixer named as a value. None in its place is grouped-query causal attention.

    name: its entry in the mixers registry (`mixers.MIXERS`). head_dim: features of one query head, None when the
    decoder's own `head_dim` says.
    """

    name: ClassVar[str] = ""

    @property
    def head_dim(self) -> int | None:
        return None


@dataclass(frozen=True)
class Indexer:
    """The lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2-Exp; transformers 5.24 `DeepseekV32Indexer`,
    `GlmMoeDsaIndexer`; fields by their config keys).

    A query attends the `index_topk` keys that score highest by `index_n_heads` heads of `index_head_dim` features, all
    it sees when those are fewer. A head's first `qk_rope_head_dim` features turn: halves of them are pairs
    (DeepSeek-V3.2), or neighbours with `indexer_rope_interleave` (GLM-5), whatever pairs the attention's own heads
    have. index_norm_eps: of the keys' layer norm, the class's own beside any `rms_norm_eps`.
    """

    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    indexer_rope_interleave: bool = False
    index_norm_eps: float = 1e-6


@dataclass(frozen=True)
class MLA(MixerBase):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1; fields by DeepSeek V3's config keys).

    Keys and values are expanded by `kv_b_proj` from one normed latent of `kv_lora_rank` features a token, and every
    head's key ends in one shared rotary key of `qk_rope_head_dim` features. Queries come from a normed latent of
    `q_lora_rank` features, or straight from the states when that is None. A head's query and key are
    `qk_nope_head_dim` features that do not turn, then the rotary ones; its value has `v_head_dim`.

    latent_norm_eps: of the two latents' RMS norms, which is not the decoder's `norm_eps` (transformers 5.24
    `DeepseekV3Attention` and the release's own code leave it at 1e-6 whatever `rms_norm_eps` says). indexer: what
    chooses the keys a query attends, None for all it sees.
    """

    name: ClassVar[str] = "mla"

    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    latent_norm_eps: float = 1e-6
    indexer: Indexer | None = None

    @property
    def head_dim(self) -> int:
        """`qk_nope_head_dim + qk_rope_head_dim`: features of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class LayerKind:
    """What the layers of one kind in the pattern do differently; None rides the model's value.

    window: keys a layer attends, its own included. chunk: attend only keys whose position shares the query's
    `position // chunk`. A kind sets a window or a chunk, not both.
    """

    window: int | None = None
    chunk: int | None = None
    num_kv_heads: int | None = None
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    yarn: YarnScaling | None = None
    head_dim: int | None = None
    mixer: MixerBase | None = None


@dataclass(frozen=True)
class Mixture:
    """The experts some layers route to, and how the router chooses (the decoder reference, `Mixture`)."""

    experts: int
    top_k: int = 2
    layers: tuple[int, ...] | None = None
    every: int | None = None
    score_function: str = "softmax"
    norm_topk_prob: bool = True
    scaling: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_score: str = "top2"
    bias: bool = False
    scale_inputs: bool = False
    parallel: bool = False
    expert_features: int | None = None
    shared_features: int = 0
    shared_gate: bool = False
    implementation: str = "auto"
    dispatch: str = "global"
    capacity_factor: float | None = None
    hash_layers: tuple[int, ...] | None = None
    latent_features: int | None = None
    latent_norm: bool = False


@dataclass(frozen=True)
class BlockWiring:
    """How a block norms its two residuals, and whether it scales its output.

    pre_norms alone is the plain pre-norm block, both pairs Gemma's sandwich block, output_norms alone OLMo 3's
    post-norm block (transformers 5.24 `Olmo3DecoderLayer`).
    """

    pre_norms: bool = True
    output_norms: bool = False
    layer_scalar: Literal["frozen", "trainable"] | None = None


@dataclass(frozen=True)
class KVCache:
    """How attention layers store the decode cache: `layout` dense or paged, `dtype` the stored element type
    (None is the compute dtype) or a quantised one."""

    layout: Literal["dense", "paged"] = "dense"
    dtype: str | None = None


@dataclass(frozen=True)
class AltUp:
    """Gemma 3n's alternating updates (transformers 5.24 `Gemma3nTextAltUp`)."""

    num_inputs: int = 4
    active_idx: int = 0
    coef_clip: float | None = 120.0
    correct_scale: bool = True


@dataclass(frozen=True)
class HyperConnections:
    """Manifold-constrained hyper-connections: `hc_mult` residual streams."""

    hc_mult: int = 4
    sinkhorn_iters: int = 20
    eps: float = 1e-6


@dataclass(frozen=True)
class AttentionResiduals:
    """Kimi K3's softmax over finished blocks of layers, `block_size` layers a block."""

    block_size: int = 4


@dataclass(frozen=True)
class ResidualSite:
    """A layer's place among the blocks of attention residuals."""

    block: int
    first: bool
    last: bool


RECORDS: dict[str, type[Any]] = {
    record.__name__: record
    for record in (
        RopeScaling,
        YarnScaling,
        Indexer,
        MLA,
        LayerKind,
        Mixture,
        KVCache,
        AltUp,
        HyperConnections,
        AttentionResiduals,
    )
}
"""The records a decoder field may hold, by class name."""
