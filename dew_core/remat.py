"""What a recomputed block keeps for its backward pass, by the names of the values it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

QKV_RESIDUALS = ("q_proj", "k_proj", "v_proj", "kv_proj")
ATTENTION_RESIDUALS = (*QKV_RESIDUALS, "o_proj")
MLP_RESIDUALS = ("gate_proj", "up_proj", "down_proj")
RESIDUALS = (*ATTENTION_RESIDUALS, "context", *MLP_RESIDUALS)
"""The values a block names as it runs, each after the projection that produced it; context is attention's
output before o_proj."""


@dataclass(frozen=True)
class RematPolicy:
    """The residuals a block under remat keeps in device memory (`save`) or moves to pinned host memory and
    back (`offload`). Everything else but its inputs is recomputed.

    Raises ValueError for a name off `RESIDUALS`, or one in both lists: it would recompute silently.
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "save", _names("save", self.save))
        object.__setattr__(self, "offload", _names("offload", self.offload))
        both = sorted(set(self.save) & set(self.offload))
        if both:
            raise ValueError(f"a remat policy both saves and offloads {', '.join(both)}")

    def checkpoint_policy(self) -> Callable[..., Any] | None:
        """The policy `nn.remat` runs the block under; None recomputes everything."""
        # Here and not at the top: a record of names needs no JAX.
        import jax

        if self.offload:
            return jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(self.save),
                names_which_can_be_offloaded=list(self.offload),
                offload_src="device",
                offload_dst="pinned_host",
            )
        return jax.checkpoint_policies.save_only_these_names(*self.save) if self.save else None


def _names(field: str, value: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"a remat policy's {field} is a list of residual names, not {value!r}")
    unknown = [name for name in value if name not in RESIDUALS]
    if unknown:
        raise ValueError(f"not residuals of a block: {', '.join(map(repr, unknown))}; they are {', '.join(RESIDUALS)}")
    return tuple(value)


REMAT_POLICIES: Mapping[str, RematPolicy] = MappingProxyType(
    {
        "minimal_with_context": RematPolicy(save=RESIDUALS),
        "minimal": RematPolicy(save=(*ATTENTION_RESIDUALS, *MLP_RESIDUALS)),
        "save_dot_with_context_except_mlp": RematPolicy(save=(*ATTENTION_RESIDUALS, "context")),
        "save_dot_except_mlpwi": RematPolicy(save=(*ATTENTION_RESIDUALS, "down_proj")),
        "save_dot_except_mlp": RematPolicy(save=ATTENTION_RESIDUALS),
        "save_qkv_proj": RematPolicy(save=QKV_RESIDUALS),
        "save_out_proj": RematPolicy(save=("o_proj",)),
        "qkv_proj_offloaded": RematPolicy(offload=QKV_RESIDUALS),
        "minimal_offloaded": RematPolicy(offload=(*ATTENTION_RESIDUALS, *MLP_RESIDUALS)),
        "full": RematPolicy(),
    }
)
"""MaxText's recipes (`get_remat_policy`) under this decoder's names, fastest and largest first: its
query_proj, key_proj, value_proj and out_proj are q_proj, k_proj, v_proj and o_proj; its mlpwi_0, mlpwi_1 and
mlpwo are gate_proj, up_proj and down_proj. `full` keeps nothing but the block's inputs."""


def remat_policy(value: RematPolicy | str | Mapping[str, Sequence[str]] | None) -> RematPolicy | None:
    """The policy `value` names: a policy, a name in `REMAT_POLICIES`, a record of save and offload names, or
    None for no recomputation at all. Raises ValueError for anything else."""
    if value is None or isinstance(value, RematPolicy):
        return value
    if isinstance(value, str):
        if value not in REMAT_POLICIES:
            raise ValueError(f"remat is {value!r}; the named policies are {', '.join(REMAT_POLICIES)}")
        return REMAT_POLICIES[value]
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - {"save", "offload"})
        if unknown:
            raise ValueError(f"a remat record has save and offload, not {', '.join(map(repr, unknown))}")
        return RematPolicy(**value)
    raise ValueError(f"remat is {value!r}; it is a RematPolicy, a policy's name, a record of names or None")
