"""Rotary positions: inverse frequencies, their published rescalings, and the rotation.

The frequencies are constants of a layer kind, computed once in numpy. They must be the reference's to the
last bit where that can be had: a relative error of one fp32 ulp in a frequency is an angle error of
`position` ulps.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from .records import RopeScaling, YarnScaling

PARTIAL_ROTARY_TYPES = ("proportional", "prefix")
"""The two published meanings of a partial rotary factor (`rotary_freqs`)."""


def rotary_freqs(
    head_dim: int,
    theta: float,
    *,
    rope_scaling: RopeScaling | None = None,
    yarn: YarnScaling | None = None,
    partial_rotary_factor: float | None = None,
    partial_rotary_type: str = "proportional",
) -> tuple[np.ndarray, float]:
    """The inverse frequencies [n] in fp32, radians a position, and the amplitude of cos and sin.

    The first 2n dimensions of a head rotate, the rest pass through. Without a partial factor n is head_dim /
    2. A factor f follows one of two conventions:

    "proportional": n is head_dim / 2, so pairs span the whole head; the first int(f * head_dim // 2)
    frequencies are theta^(-2i / head_dim) and the rest zero (transformers 5.24 rope type proportional; Gemma
    4). "prefix": 2n is int(f * head_dim), and the frequencies are theta^(-2i / 2n) (transformers 5.24
    `Glm4RotaryEmbedding`, `Qwen3NextRotaryEmbedding`).

    Raises ValueError for an odd rotated width, an unknown convention or scaling, and for two scalings at
    once.
    """
    if rope_scaling is not None and yarn is not None:
        raise ValueError("rope_scaling and yarn are both set; a kind has one frequency scaling")
    if partial_rotary_type not in PARTIAL_ROTARY_TYPES:
        raise ValueError(
            f"partial_rotary_type is {partial_rotary_type!r}; it is one of {', '.join(PARTIAL_ROTARY_TYPES)}"
        )
    factor = 1.0 if partial_rotary_factor is None else partial_rotary_factor
    if not 0.0 <= factor <= 1.0:
        raise ValueError(f"partial_rotary_factor is {factor}; it is a fraction of the head")
    proportional = partial_rotary_type == "proportional"
    dim = head_dim if proportional else int(head_dim * factor)
    if dim % 2:
        raise ValueError(f"rotary positions turn pairs, and the rotated width is {dim} of head_dim {head_dim}")
    rotated = int(factor * head_dim // 2) if proportional else dim // 2
    if yarn is not None:
        if rotated != dim // 2:
            raise ValueError("yarn over a proportional partial rotary is not defined; use partial_rotary_type='prefix'")
        return _yarn_freqs(dim, theta, yarn)

    inverse = np.float32(1) / _powers(theta, dim)
    inverse[rotated:] = 0
    if rope_scaling is None:
        return inverse, 1.0
    if rope_scaling.rope_type == "linear":
        return inverse / np.float32(rope_scaling.factor), 1.0
    if rope_scaling.rope_type == "llama3":
        if rotated != dim // 2:
            raise ValueError("llama3 over a proportional partial rotary is not defined")
        return _llama3_freqs(inverse, rope_scaling), 1.0
    raise ValueError(f"rope_type is {rope_scaling.rope_type!r}; it is one of linear, llama3")


def _powers(theta: float, dim: int) -> np.ndarray:
    """theta^(2i / dim) in fp32. The exponents are fp32 as torch has them; the power is taken in fp64 and
    rounded, which is what torch's vectorised fp32 power gives for all but about one value in a hundred."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def _llama3_freqs(inverse: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    factor, context = np.float32(scaling.factor), scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = np.float32(2 * math.pi) / inverse
    long_wave = wavelength > np.float32(context / low)
    short_wave = wavelength < np.float32(context / high)
    scaled = np.where(long_wave, inverse / factor, inverse)
    blend = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    smooth = (np.float32(1) - blend) * scaled / factor + blend * scaled
    return np.where(~long_wave & ~short_wave, smooth, scaled)


def _yarn_freqs(dim: int, theta: float, yarn: YarnScaling) -> tuple[np.ndarray, float]:
    powers = _powers(theta, dim)

    def correction(rotations: float) -> float:
        """The (fractional) dimension that turns `rotations` times over the original context."""
        return dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(yarn.beta_fast), correction(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The published clamp is dim - 1, though the ramp has dim / 2 entries.
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    steps = np.arange(dim // 2, dtype=np.float32)
    keep = np.float32(1) - np.clip((steps - np.float32(low)) / np.float32(high - low), np.float32(0), np.float32(1))
    interpolated = np.float32(1) / (np.float32(yarn.factor) * powers)
    inverse = interpolated * (np.float32(1) - keep) + np.float32(1) / powers * keep
    return inverse, yarn_amplitude(yarn)


def yarn_amplitude(yarn: YarnScaling) -> float:
    """The factor on cos and sin (`YarnScaling`)."""
    if yarn.attention_factor is not None:
        return float(yarn.attention_factor)
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return yarn_mscale(yarn.factor)


def yarn_softmax_correction(yarn: YarnScaling | None) -> float:
    """What latent attention's softmax scale is multiplied by beside the amplitude on cos and sin: m(mscale_all_dim)^2
    where that is stated and not 0, else 1 (transformers 5.24 `DeepseekV3Attention`, `yarn_apply_mscale`)."""
    if yarn is None or not yarn.mscale_all_dim:
        return 1.0
    return yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def yarn_mscale(factor: float, scale: float = 1.0) -> float:
    """m(s) = 0.1 s ln(factor) + 1 for a factor above 1, else 1 (transformers 5.24 yarn; DeepSeek-V2)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rotary_tables(
    positions: jax.Array, inverse: np.ndarray, amplitude: float, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """cos and sin [..., n] in `dtype` for int positions [...]. Angles are fp32: bf16 loses integers above
    256."""
    angles = positions.astype(jnp.float32)[..., None] * inverse
    return (jnp.cos(angles) * amplitude).astype(dtype), (jnp.sin(angles) * amplitude).astype(dtype)


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Rotate the first 2n features of x [B, S, heads, D] by cos and sin [B, S, n]; the rest pass through.

    Pairs are (i, i + n), or (2i, 2i + 1) when interleaved (transformers 5.24 `Glm4Attention`, DeepSeek V3's
    `rope_interleave`, each pair left in place).
    """
    n = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated, rest = x[..., : 2 * n], x[..., 2 * n :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :n], rotated[..., n:]
    turned = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        rotated = jnp.stack(turned, axis=-1).reshape(rotated.shape)
        return rotated if rest.shape[-1] == 0 else jnp.concatenate([rotated, rest], axis=-1)
    return jnp.concatenate(turned if rest.shape[-1] == 0 else (*turned, rest), axis=-1)
