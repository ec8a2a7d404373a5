"""How releases name the tensors of a wrapper, from the names transformers 5.24 gives them in memory.

Text-only checkpoints have one spelling for both. Nothing here reads a family's rules, and nothing of a vision tower
is computed: its tensors are there to be carried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

PLAIN = "model."
"""The decoder's prefix in a text-only checkpoint."""

KIMI_K25 = "Kimi_K25ForConditionalGeneration"
_TOWER, _BLOCK = r"^model\.vision_tower\.", r"vision_tower.encoder.blocks.\1."
_LAYER = _TOWER + r"layers\.(\d+)\."

HUB_NAMES: Mapping[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("Gemma3ForConditionalGeneration", "language_model.model."): (
        (r"^model\.language_model\.", "language_model.model."),
        (r"^lm_head\.", "language_model.lm_head."),
        (_TOWER, "vision_tower.vision_model."),
        (r"^model\.multi_modal_projector\.", "multi_modal_projector."),
    ),
    ("Gemma3ForConditionalGeneration", "model.language_model."): ((_TOWER, "model.vision_tower.vision_model."),),
    (KIMI_K25, "language_model.model."): (
        (r"^model\.language_model\.", "language_model.model."),
        (r"^lm_head\.", "language_model.lm_head."),
        (_TOWER + r"patch_embed\.pos_emb\.position_embeddings$", "vision_tower.patch_embed.pos_emb.weight"),
        (_TOWER + r"patch_embed\.", "vision_tower.patch_embed."),
        (_TOWER + r"final_layernorm\.", "vision_tower.encoder.final_layernorm."),
        (_LAYER + r"norm1\.", _BLOCK + "norm0."),
        (_LAYER + r"norm2\.", _BLOCK + "norm1."),
        (_LAYER + r"attn\.qkv\.", _BLOCK + "wqkv."),
        (_LAYER + r"attn\.proj\.", _BLOCK + "wo."),
        (_LAYER + r"mlp\.fc1\.", _BLOCK + "mlp.fc0."),
        (_LAYER + r"mlp\.fc2\.", _BLOCK + "mlp.fc1."),
        (r"^model\.mm_projector\.pre_norm\.", "mm_projector.pre_norm."),
        (r"^model\.mm_projector\.in_proj\.", "mm_projector.proj.0."),
        (r"^model\.mm_projector\.out_proj\.", "mm_projector.proj.2."),
    ),
}
"""(class, a release's prefix of the decoder) -> (pattern, replacement), from transformers 5.24's names in memory.

Gemma 3 4b to 27b: the originals are `language_model.model.…`; transformers 4.52 to 4.57 saved
`model.language_model.…`. Both have a `vision_model.` level that 5.24 dropped from its modules. Kimi K2.5 has its
vision tower's queries, keys and values in one tensor.
"""


def hub_name(architecture: str, body: str, name: str) -> str:
    """A tensor's name in the release of `architecture` whose decoder's prefix is `body`. A pattern that has been
    replaced meets no other."""
    for pattern, replacement in () if body == PLAIN else HUB_NAMES[architecture, body]:
        name = re.sub(pattern, replacement, name)
    return name


def as_stored(architecture: str, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors by their names in memory, those joined that a release stores in one."""
    if architecture != KIMI_K25:
        return dict(values)
    found: dict[str, np.ndarray] = {}
    for name, array in values.items():
        match = re.match(r"^(model\.vision_tower\.layers\.\d+\.attn\.)([qkv])_proj\.(weight|bias)$", name)
        if match is None:
            found[name] = array
        elif match[2] == "q":
            parts = [values[f"{match[1]}{part}_proj.{match[3]}"] for part in "qkv"]
            found[f"{match[1]}qkv.{match[3]}"] = np.concatenate(parts)
    return found
