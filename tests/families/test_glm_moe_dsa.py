"""GLM-5 to 5.2: what their configs say, which layers have an indexer, and the layout of those that share."""

import json

import pytest
from safetensors.torch import load_file, save_file

from dewconv.converters.plan import plan_import
from dewconv.converters.source import open_source
from dewconv.dew_core.records import MLA, Indexer
from dewconv.families import find
from dewconv.families.errors import FindingsError
from dewconv.parity.fixtures import write_checkpoint

FAMILY = find("glm_moe_dsa")
TINY = FAMILY.variants["untied"].config


def read(**changes):
    return FAMILY.read({key: value for key, value in {**TINY, **changes}.items() if value is not ...})[0]


def types(pattern):
    return [{"F": "full", "S": "shared"}[letter] for letter in pattern]


def test_unset_keys_take_the_class_defaults():
    fields, notices = FAMILY.read({"model_type": "glm_moe_dsa"})
    indexer = Indexer(index_n_heads=32, indexer_rope_interleave=True)
    assert fields.mixer == MLA(q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256, indexer=indexer)
    assert (fields.num_layers, fields.emb_features, fields.vocab_size, fields.norm_eps) == (78, 6144, 154880, 1e-5)
    assert fields.mixture.layers == tuple(range(3, 78))
    assert fields.kv_shared_layers is None
    assert notices == ()


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({}, None),
        ({"indexer_types": types("FFFFFF")}, None),
        ({"indexer_types": types("FFSSFS")}, (2, 3, 5)),
        ({"index_topk_pattern": "FSFSSF"}, (1, 3, 4)),
        ({"index_topk_pattern": types("FSFSSF")}, (1, 3, 4)),
        ({"index_topk_pattern": "FFFFFS", "index_topk_freq": 2}, (5,)),
        ({"index_topk_freq": 2}, (2, 4)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (3, 4, 5)),
        ({"index_topk_freq": 0}, None),
        ({"index_topk_freq": 2, "indexer_types": types("FFSFSF")}, (2, 4)),
        ({"indexer_types": None, "index_topk_pattern": None, "index_topk_freq": 2}, (2, 4)),
    ],
)
def test_which_layers_have_an_indexer(changes, shared):
    """transformers 5.24 `GlmMoeDsaConfig`, whose own reading is the reference."""
    from transformers import GlmMoeDsaConfig

    fields = read(num_hidden_layers=6, **changes)
    assert fields.kv_shared_layers == shared
    assert FAMILY.read(FAMILY.write(fields))[0] == fields
    theirs = GlmMoeDsaConfig.from_dict({**TINY, "num_hidden_layers": 6, **changes}).indexer_types
    assert tuple(i for i, name in enumerate(theirs) if name == "shared") == (shared or ())


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("indexer_types", {"indexer_types": types("FF")}),
        ("indexer_types", {"indexer_types": types("SFF")}),
        ("indexer_types", {"indexer_types": ["full", "full", "half"]}),
        ("index_topk_pattern", {"index_topk_pattern": "FXS"}),
        ("index_topk_pattern", {"index_topk_pattern": "FFSS"}),
        ("index_topk_freq", {"index_topk_freq": 2, "indexer_types": types("FFF")}),
        ("index_topk_freq", {"index_topk_freq": None}),
        ("index_topk_pattern", {"index_topk_pattern": "FSF", "indexer_types": types("FFF")}),
        ("indexer_rope_interleave", {"indexer_rope_interleave": False}),
        ("rope_interleave", {"rope_interleave": False}),
        ("moe_router_dtype", {"moe_router_dtype": "bfloat16"}),
        ("q_lora_rank", {"q_lora_rank": None}),
        ("qk_head_dim", {"qk_head_dim": 32}),
        ("mlp_layer_types", {"mlp_layer_types": ["dense"]}),
    ],
)
def test_what_cannot_be_computed_is_refused_by_key(key, changes):
    with pytest.raises(FindingsError, match=key):
        read(**changes)


@pytest.mark.parametrize("stated", [16, 32, 192, ...])
def test_head_dim_says_nothing(stated):
    """64 in GLM-5 and 192 in GLM-5.2, of models with one head size."""
    assert read(head_dim=stated) == read()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("shared") / "source", FAMILY.variants["shared"], FAMILY)


def test_sharing_layers_have_no_indexer_on_either_side(shared):
    plan = plan_import(open_source(shared))
    layers = {name.split(".")[2] for name in plan.source.tensors if ".indexer." in name}
    assert layers == {"0", "1", "4"}
    assert plan.fields.kv_shared_layers == (2, 3, 5)


def edited(source, to, change):
    to.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            save_file(change(load_file(file)), to / file.name, metadata={"format": "pt"})
        else:
            (to / file.name).write_bytes(file.read_bytes())
    return to


def test_an_indexer_missing_from_its_layer_or_found_on_another_is_refused(shared, tmp_path):
    """dsa 48."""
    wk = "model.layers.{}.self_attn.indexer.wk.weight"

    def lost(tensors):
        return {name: one for name, one in tensors.items() if name != wk.format(4)}

    def extra(tensors):
        return {**tensors, wk.format(5): tensors[wk.format(4)].clone()}

    for change, layer in ((lost, 4), (extra, 5)):
        path = edited(shared, tmp_path / change.__name__, change)
        with pytest.raises(FindingsError, match=wk.format(layer)):
            plan_import(open_source(path))
    everywhere = edited(shared, tmp_path / "everywhere", dict)
    config = json.loads((everywhere / "config.json").read_text())
    del config["indexer_types"]
    (everywhere / "config.json").write_text(json.dumps(config))
    with pytest.raises(FindingsError, match=r"layers\.\{2-3, 5\}\.self_attn\.indexer"):
        plan_import(open_source(everywhere))
