"""The lengths of q/k norms: over the whole projection in OLMo 3, over one head in the others that have them."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dewconv.converters.plan import plan_import
from dewconv.converters.source import open_source
from dewconv.families import FindingsError, find
from dewconv.families.rules import leaf_shapes
from dewconv.parity import write_checkpoint


@pytest.mark.parametrize(
    ("family", "variant", "whole"),
    [
        ("olmo3", "pattern", True),
        ("qwen3", "untied", False),
        ("gemma3_text", "text", False),
        ("qwen3_moe", "experts", False),
        ("glm4_moe", "qk_norm", False),
    ],
)
def test_qk_norms_have_the_familys_length_and_no_other(tmp_path, family, variant, whole):
    owner = find(family)
    path = write_checkpoint(tmp_path / variant, owner.variants[variant], owner)
    plan = plan_import(open_source(path))
    d = plan.fields
    assert d.num_heads != d.kv_heads
    own = {
        norm: heads * d.head_dim if whole else d.head_dim
        for norm, heads in (("q_norm", d.num_heads), ("k_norm", d.kv_heads))
    }
    shapes = leaf_shapes(plan.placements)
    for norm, length in own.items():
        assert shapes[f"layers_1/self_attn/{norm}/scale"] == (length,)

    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    name = "model.layers.1.self_attn.k_norm.weight"
    tensors[name] = np.ones(d.head_dim if whole else d.kv_heads * d.head_dim, tensors[name].dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(FindingsError, match=r"model\.layers\.1\.self_attn\.k_norm\.weight"):
        plan_import(open_source(path))
