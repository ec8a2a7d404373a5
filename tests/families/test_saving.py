"""What `save` makes of every family's own weights, banked or one subtree a layer, is the checkpoint they came from."""

import pytest

from dewconv.converters.banks import open_banks
from dewconv.converters.exporting import export_checkpoint
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.loading import read_parameters
from dewconv.converters.saving import save
from dewconv.converters.source import open_source
from dewconv.converters.trees import nested
from dewconv.dew_core.layers import group_layers
from dewconv.families import FindingsError, families, find
from dewconv.parity.fixtures import write_checkpoint
from dewconv.parity.round_trip import compare_sources


def by_layer(leaves):
    """Parameter path -> array with each bank's rows under their layers."""
    found = {}
    for path, array in leaves.items():
        top, _, below = path.partition("/")
        layers = group_layers(top)
        if layers is None or len(layers) == 1:
            found[path] = array
        else:
            found |= {f"layers_{layer}/{below}": array[row] for row, layer in enumerate(layers)}
    return found


def last_of(family):
    """The variant with the most layers: several runs where the family has kinds of layers."""
    return max(family.variants, key=lambda name: family.variants[name].config.get("num_hidden_layers", 0))


@pytest.mark.parametrize("form", [dict, by_layer], ids=["banks", "layers"])
@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_saved_weights_export_as_the_checkpoint(tmp_path, family, form):
    source = open_source(write_checkpoint(tmp_path / "source", family.variants[last_of(family)], family))
    banks = import_checkpoint(source, tmp_path / "banks")
    leaves = form(dict(read_parameters(banks.path)[1]))
    save(tmp_path / "saved", None, {"params": nested(leaves)}, banks)
    export_checkpoint(open_banks(tmp_path / "saved"), tmp_path / "back")
    assert list(compare_sources(source, open_source(tmp_path / "back"))) == []


@pytest.mark.parametrize(
    ("family", "at"),
    [
        ("qwen3_moe", "mlp/experts/up_proj"),
        ("deepseek_v3", "self_attn/kv_b_proj"),
        ("glm_moe_dsa", "self_attn/indexer/wq_b"),
    ],
)
def test_what_an_adapter_adds_is_refused_by_name(tmp_path, family, at):
    owner = find(family)
    banks = import_checkpoint(
        open_source(write_checkpoint(tmp_path / "source", next(iter(owner.variants.values())), owner)),
        tmp_path / "banks",
    )
    leaves = by_layer(dict(read_parameters(banks.path)[1]))
    kernel = leaves[f"layers_1/{at}/kernel"]
    for name in ("lora_a", "lora_b"):
        leaves[f"layers_1/{at}/{name}"] = kernel
    with pytest.raises(FindingsError) as caught:
        save(tmp_path / "saved", None, nested(leaves), banks)
    assert [finding.what for finding in caught.value.findings] == [
        f"parameter layers_1/{at}/{name}" for name in ("lora_a", "lora_b")
    ]
    assert not (tmp_path / "saved").exists()
