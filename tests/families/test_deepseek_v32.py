"""DeepSeek V3.2: what its config says, and the choice of keys beside DeepSeek V3's attention."""

from dataclasses import replace

import numpy as np
import pytest

from dewconv.dew_core.records import MLA, Indexer
from dewconv.families import find
from dewconv.families.errors import FindingsError
from dewconv.parity.candidate import build_candidate, reference_run
from dewconv.parity.fixtures import write_checkpoint

FAMILY = find("deepseek_v32")
TINY = FAMILY.variants["untied"].config


def read(**changes):
    return FAMILY.read({key: value for key, value in {**TINY, **changes}.items() if value is not ...})[0]


def test_unset_keys_take_the_class_defaults():
    """`DeepseekV32Config`'s, which are the release's own."""
    fields, notices = FAMILY.read({"model_type": "deepseek_v32"})
    assert fields.mixer == MLA(indexer=Indexer())
    assert (fields.num_layers, fields.emb_features, fields.vocab_size, fields.max_seq_len) == (61, 7168, 129280, 163840)
    assert fields.mixture.layers == tuple(range(3, 61))
    assert (fields.mixture.groups, fields.mixture.groups_per_token, fields.mixture.top_k) == (8, 4, 8)
    assert fields.rope_interleave
    assert not fields.mixer.indexer.indexer_rope_interleave
    assert fields.kv_shared_layers is None
    assert notices == ()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"index_topk": ...}, lambda d: d.mixer.indexer.index_topk == 2048),
        ({"index_n_heads": 5}, lambda d: d.mixer.indexer.index_n_heads == 5),
        ({"index_head_dim": 16}, lambda d: d.mixer.indexer.index_head_dim == 16),
        ({"rms_norm_eps": 1e-5}, lambda d: d.mixer.indexer.index_norm_eps == 1e-6 and d.norm_eps == 1e-5),
        ({"head_dim": 64}, lambda d: d.head_features == 48),
        ({"rope_interleave": True}, lambda d: d.rope_interleave),
        ({"mlp_bias": False}, lambda d: d.num_layers == 3),
        ({"layer_types": ["indexed_attention"] * 3}, lambda d: d.layer_types is None),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, lambda d: d.mixture.layers == (0, 2)),
        ({"first_k_dense_replace": 2}, lambda d: d.mixture.layers == (2,)),
    ],
)
def test_switches(changes, found):
    fields = read(**changes)
    assert found(fields)
    assert FAMILY.read(FAMILY.write(fields))[0] == fields


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("q_lora_rank", None),
        ("index_topk", 0),
        ("index_n_heads", None),
        ("index_head_dim", 15),
        ("rope_interleave", False),
        ("indexer_rope_interleave", True),
        ("layer_types", ["full_attention"] * 3),
        ("layer_types", "full_attention"),
        ("scoring_func", "softmax"),
        ("moe_layer_freq", 2),
        ("indexer_types", ["full"] * 3),
    ],
)
def test_what_cannot_be_computed_is_refused_by_key(key, value):
    with pytest.raises(FindingsError, match=key):
        read(**{key: value})


def test_the_choice_shows_past_the_number_of_keys_alone(tmp_path):
    """dsa 48. With the other rotary pairs, another number of keys or dense attention, positions up to index_topk are
    as they were: a check of short sequences sees nothing."""
    spec = FAMILY.variants["untied"]
    reference = reference_run(write_checkpoint(tmp_path / "untied", spec, FAMILY), shortest=spec.length)
    fields, indexer = reference.fields, reference.fields.mixer.indexer

    def errors(**changes):
        candidate = fields.replace(mixer=replace(fields.mixer, indexer=replace(indexer, **changes)))
        logits = build_candidate(reference, candidate, reference.statements).forward(reference.probe.tokens).logits
        found = np.abs(logits - reference.forward.logits).max((0, 2)) / reference.logits_bound
        return found[: indexer.index_topk].max(), found[indexer.index_topk :].max()

    short, long = errors()
    assert max(short, long) < 1
    for changes in ({"indexer_rope_interleave": True}, {"index_topk": 7}, {"index_topk": 1000}):
        short, long = errors(**changes)
        assert short < 1, changes
        assert long > 1000, changes


def test_torch_itself_repeats_a_recorded_choice(tmp_path):
    """Given its own choices torch computes what it computed, to the bit; given others, other numbers, and it still
    tells its own first choice."""
    spec = FAMILY.variants["untied"]
    run = reference_run(write_checkpoint(tmp_path / "untied", spec, FAMILY), shortest=spec.length)
    tokens, own = run.probe.tokens, run.forward.choices
    np.testing.assert_array_equal(run.torch.forward(tokens, routes=own).logits, run.forward.logits)
    assert own.keys.sum(-1).max() == 6
    length = tokens.shape[1]
    newest = np.tril(np.ones((length, length), bool)) & ~np.tril(np.ones((length, length), bool), -6)
    others = replace(own, keys=np.broadcast_to(newest[None, :, None], own.keys.shape).copy())
    given = run.torch.forward(tokens, streams=True, routes=others)
    assert np.abs(given.logits - run.forward.logits).max() > 1e3 * run.logits_bound
    np.testing.assert_array_equal(given.selected[0].keys, run.forward.selected[0].keys)
    ours = build_candidate(run, run.fields, run.statements).forward(tokens, streams=True, routes=others)
    assert np.abs(ours.logits - given.logits).max() <= run.logits_bound
    np.testing.assert_array_equal(ours.selected[0].keys, run.forward.selected[0].keys)
    assert np.abs(run.torch.cached(tokens, 5, others) - given.logits).max() <= run.logits_bound
