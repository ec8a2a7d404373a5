"""The lines of sigmoid-routed experts and of prediction depths, as DeepSeek V3 and its descendants state them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..dew_core.fields import DecoderFields
from ..dew_core.records import Mixture
from .fields import (
    MOST,
    MOST_LAYERS,
    Config,
    Line,
    Unreadable,
    count,
    expert_count,
    flag,
    layer_count,
    optional,
    positive,
    value_of,
    via,
)
from .rules import Carried

DEPTHS = ("num_nextn_predict_layers", "num_mtp_layers")
"""The releases' key, and transformers 5's (`DeepseekV3Config.attribute_map`, `Glm4MoeConfig.attribute_map`)."""


def whole(key: str, value: Any) -> int:
    """A whole number up to `MOST`, 0 included; null is 0. Raises Unreadable."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Unreadable(key, value, "a whole number")
    if value > MOST:
        raise Unreadable(key, value, f"a whole number of at most {MOST}")
    return value


FIRST_DENSE = "first_k_dense_replace"
MLP_TYPES = "mlp_layer_types"


def mlp_types(key: str, value: Any) -> tuple[str, ...]:
    """A list of "dense" and "sparse", one a layer. Raises Unreadable."""
    if not isinstance(value, list | tuple):
        raise Unreadable(key, value, "a list, one entry per layer")
    for name in value:
        if name not in ("dense", "sparse"):
            raise Unreadable(key, name, "dense or sparse", "not supported")
    return tuple(value)


def read_sparse_layers(config: Config, depth: int, said_by: tuple[str, ...], first_dense: int) -> tuple[int, ...]:
    """The sparse ones of `depth` layers. said_by: the keys the config class reads, the strongest first.

    A `first_k_dense_replace` that the class does not read (transformers 5.24 `Glm4MoeLiteConfig`) and that says
    otherwise than the class computes is refused: the release's other code may follow it.
    """
    types = value_of(config, MLP_TYPES, optional(mlp_types), None) if MLP_TYPES in said_by else None
    stated = value_of(config, FIRST_DENSE, whole, first_dense)
    if types is not None:
        if len(types) != depth:
            raise Unreadable(MLP_TYPES, len(types), f"{depth} entries, one per layer of num_hidden_layers")
        return tuple(index for index, name in enumerate(types) if name == "sparse")
    if FIRST_DENSE not in said_by and min(stated, depth) != min(first_dense, depth):
        raise Unreadable(
            FIRST_DENSE, stated, f"{first_dense}: the class does not read it", f"state {MLP_TYPES}, which it reads"
        )
    return tuple(range(min(stated, depth), depth))


def sigmoid_experts(
    experts: int,
    chosen: int,
    groups: int,
    kept: int,
    first_dense: int,
    width: int,
    shared: int,
    normalised: bool,
    scaling: float,
    layers: int,
    said_by: tuple[str, ...] = (FIRST_DENSE,),
) -> Line:
    """Experts chosen by a sigmoid with a correction bias within the best groups, beside shared ones (transformers 5.24
    `DeepseekV3MoE`, `DeepseekV3TopkRouter`; `Glm4MoeMoE`, `Glm4MoeTopkRouter`). Each argument but the last is the
    config class's default. `n_shared_experts` of 0 or null is none.

    said_by: the keys that tell the class which layers are sparse, the strongest first: `FIRST_DENSE`, from that layer
    on; `MLP_TYPES`, layer by layer (`Glm4MoeLiteConfig`); both, where the list goes before the number
    (`GlmMoeDsaConfig`).
    """

    def read(config: Config) -> Mapping[str, Any]:
        total = value_of(config, "n_routed_experts", expert_count, experts)
        taken = value_of(config, "num_experts_per_tok", count, chosen)
        parts = value_of(config, "n_group", count, groups)
        limit = value_of(config, "topk_group", count, kept)
        if total % parts or total // parts < 2:
            raise Unreadable("n_group", parts, f"a divisor of n_routed_experts, {total}, with two experts a group")
        if limit > parts:
            raise Unreadable("topk_group", limit, f"at most n_group, {parts}")
        if taken > limit * (total // parts):
            raise Unreadable(
                "num_experts_per_tok", taken, f"at most the {limit * (total // parts)} experts of kept groups"
            )
        depth = value_of(config, "num_hidden_layers", layer_count, layers)
        features = value_of(config, "moe_intermediate_size", count, width)
        mixture = Mixture(
            experts=total,
            top_k=taken,
            layers=read_sparse_layers(config, depth, said_by, first_dense),
            score_function="sigmoid",
            norm_topk_prob=value_of(config, "norm_topk_prob", flag, normalised),
            scaling=float(value_of(config, "routed_scaling_factor", positive, scaling)),
            groups=parts,
            groups_per_token=limit,
            bias=True,
            expert_features=features,
            shared_features=features * value_of(config, "n_shared_experts", whole, shared),
        )
        return {"mixture": mixture}

    def write(d: DecoderFields) -> Mapping[str, Any]:
        mixture = d.mixture
        if mixture is None or mixture.expert_features is None:
            return {}
        sparse = mixture.layers if mixture.layers is not None else tuple(range(d.num_layers))
        types = ["sparse" if index in sparse else "dense" for index in range(d.num_layers)]
        listed = MLP_TYPES in said_by
        return {
            "n_routed_experts": mixture.experts,
            "num_experts_per_tok": mixture.top_k,
            "n_group": mixture.groups,
            "topk_group": mixture.groups_per_token,
            **({MLP_TYPES: types} if listed else {FIRST_DENSE: min(sparse, default=d.num_layers)}),
            "moe_intermediate_size": mixture.expert_features,
            "n_shared_experts": mixture.shared_features // mixture.expert_features,
            "norm_topk_prob": mixture.norm_topk_prob,
            "routed_scaling_factor": mixture.scaling,
        }

    keys = (
        "n_routed_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        FIRST_DENSE,
        *((MLP_TYPES,) if MLP_TYPES in said_by else ()),
        "moe_intermediate_size",
        "n_shared_experts",
        "norm_topk_prob",
        "routed_scaling_factor",
    )
    return via(keys, read, write)


def depths(config: Config) -> int:
    """How many prediction-depth layers a config announces, none where it names no count. Raises Unreadable."""
    found = {key: whole(key, config[key]) for key in DEPTHS if key in config}
    for key, value in found.items():
        if value > MOST_LAYERS:
            raise Unreadable(key, value, f"at most {MOST_LAYERS} layers")
    return max(found.values(), default=0)


def prediction_depths() -> Line:
    """The count of prediction-depth layers, which are carried where a file holds them (transformers saves none) and not
    computed."""

    def read(config: Config) -> Mapping[str, Any]:
        depths(config)
        return {}

    return via(DEPTHS, read, lambda d: {}, "carried")


def carried_depths(layers: int) -> Callable[[Config], Iterator[Carried]]:
    """`Family.carried` of a family whose prediction depths are numbered on from its last layer. layers: the config
    class's default of `num_hidden_layers`."""

    def carried(config: Config) -> Iterator[Carried]:
        last = value_of(config, "num_hidden_layers", layer_count, layers)
        for index in range(last, last + depths(config)):
            why = "a prediction-depth layer, which the decoder does not compute"
            yield Carried(f"model.layers.{index}.", why, "prediction-depth layer(s)")

    return carried
