"""The stack's loops over every layout of one store, and the view between them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dewconv.dew_core.layers import group_name
from dewconv.dew_core.records import LayerKind
from dewconv.dew_core.stack import INTERMEDIATES, StackView, layer_output, layer_outputs
from dewconv.dew_core.transformer import CausalTransformer

FIELDS = {
    "vocab_size": 61,
    "emb_features": 16,
    "num_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "mlp_features": 24,
    "max_seq_len": 16,
    "layer_types": ("sliding", "sliding", "full", "sliding", "sliding", "sliding"),
    "kinds": {"sliding": LayerKind(window=3), "full": LayerKind(rope_theta=1e6)},
}
TOKENS = np.random.default_rng(1).integers(0, 61, (2, 9)).astype(np.int32)


def decoder(**changes):
    return CausalTransformer(**{**FIELDS, **changes})


def drawn(model):
    """The model's variables with nothing neutral in them."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), TOKENS))
    rng = np.random.default_rng(0)

    def leaf(shape):
        values = rng.standard_normal(shape.shape).astype(np.float32) * 0.3
        return jnp.asarray(values + 0.8 if len(shape.shape) == 1 else values)

    return jax.tree.map(leaf, shapes)


@pytest.fixture(scope="module")
def stores():
    model = decoder()
    rows = drawn(model)
    banks = StackView(model.plan.groups).stack(rows)
    mixed = dict(banks["params"])
    for first, count in model.plan.groups:
        if count > 1:
            name = group_name(first, count)
            mixed[name] = {key: item for key, item in mixed[name].items() if key != "mlp"}
            for index in range(first, first + count):
                mixed[group_name(index, 1)] = {"mlp": rows["params"][group_name(index, 1)]["mlp"]}
    # One run as a bank and the other per layer.
    half = {**banks["params"], **{f"layers_{i}": rows["params"][f"layers_{i}"] for i in (0, 1)}}
    del half["layers_0_1"]
    return {"rows": rows, "banks": banks, "mixed": {"params": mixed}, "half": {"params": half}}


def run(model, store, **options):
    """The model over TOKENS, compiled: one program rather than one a primitive."""
    return jax.jit(lambda store: model.apply(store, TOKENS, **options))(store)


def close(one, other, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), one, other)


def test_a_bank_is_the_layers_stacked(stores):
    view = StackView(decoder().plan.groups)
    assert view.bank_names() == ["layers_0_1", "layers_2", "layers_3_5"]
    kernel = stores["banks"]["params"]["layers_3_5"]["self_attn"]["q_proj"]["kernel"]
    assert kernel.shape == (3, 16, 16)
    np.testing.assert_array_equal(kernel[2], stores["rows"]["params"]["layers_5"]["self_attn"]["q_proj"]["kernel"])
    for store in stores.values():
        jax.tree.map(np.testing.assert_array_equal, view.unstack(store), stores["rows"])


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("layout", ["rows", "banks", "mixed", "half"])
def test_every_loop_runs_every_store(stores, layout, scanned):
    capture = {"capture_intermediates": layer_outputs, "mutable": [INTERMEDIATES]}
    want, seen = run(decoder(), stores["rows"], **capture)
    got, captured = run(decoder(scan_layers=scanned), stores[layout], **capture)
    close(got, want)
    assert set(captured[INTERMEDIATES]) == {f"layers_{i}" for i in range(6)}
    for index in range(6):
        close(layer_output(captured[INTERMEDIATES], index), layer_output(seen[INTERMEDIATES], index))


@pytest.mark.parametrize(
    ("layout", "scanned"), [("rows", False), ("rows", True), ("banks", False), ("banks", True), ("mixed", True)]
)
def test_decoding_through_every_store_is_the_full_forward(stores, layout, scanned):
    model, store = decoder(scan_layers=scanned), stores[layout]
    allocate = {"method": CausalTransformer.init_cache, "mutable": ["cache"]}
    cache = jax.jit(lambda store: model.apply(store, 2, **allocate)[1]["cache"])(store)
    assert set(cache) == {f"layers_{i}" for i in range(6)}
    pieces = []
    for tokens in (TOKENS[:, :4], TOKENS[:, 4:5], TOKENS[:, 5:]):
        step = jax.jit(lambda store, tokens: model.apply(store, tokens, decode=True, mutable=["cache"]))
        logits, written = step({**store, "cache": cache}, tokens)
        cache = written["cache"]
        pieces.append(logits)
    close(jnp.concatenate(pieces, axis=1), run(decoder(), stores["rows"]))


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("layout", ["rows", "banks", "mixed", "half"])
def test_a_store_written_back_keeps_its_layout(stores, layout, scanned):
    store = stores[layout]
    _, written = run(decoder(scan_layers=scanned), store, mutable=True)
    jax.tree.map(np.testing.assert_array_equal, written["params"], store["params"])


@pytest.mark.parametrize(("layout", "scanned"), [("rows", True), ("banks", False), ("banks", True), ("mixed", True)])
def test_gradients_are_the_same_in_every_layout(stores, layout, scanned):
    def loss(model, params):
        return jnp.square(model.apply({"params": params}, TOKENS)).mean()

    want = jax.jit(jax.grad(lambda params: loss(decoder(), params)))(stores["rows"]["params"])
    got = jax.jit(jax.grad(lambda params: loss(decoder(scan_layers=scanned), params)))(stores[layout]["params"])
    view = StackView(decoder().plan.groups)
    close(view.unstack({"params": got})["params"], want)


@pytest.mark.parametrize("policy", ["full", "save_out_proj"])
def test_gradients_through_remat(stores, policy):
    def gradient(**changes):
        model = decoder(**changes)
        return jax.jit(jax.grad(lambda params: model.apply({"params": params}, TOKENS).std()))(stores["rows"]["params"])

    want = gradient()
    for scanned in (False, True):
        close(gradient(remat=policy, scan_layers=scanned), want)


def test_bank_layers_caps_a_run(stores):
    model = decoder(scan_layers=True, bank_layers=2)
    view = StackView(model.plan.groups)
    assert view.bank_names() == ["layers_0_1", "layers_2", "layers_3_4", "layers_5"]
    banks = view.stack(stores["rows"])
    close(run(model, banks), run(decoder(), stores["rows"]))


def test_init_makes_one_subtree_a_layer_whatever_the_loop():
    key = jax.random.key(0)
    plain, scanned = (
        jax.jit(lambda model=model: model.init(key, TOKENS))() for model in (decoder(), decoder(scan_layers=True))
    )
    jax.tree.map(np.testing.assert_array_equal, plain, scanned)
    assert "layers_5" in plain["params"]


@pytest.mark.parametrize("scanned", [False, True])
def test_dropout_draws_by_layer(stores, scanned):
    model = decoder(scan_layers=scanned, dropout_rate=0.5)
    _, seen = run(
        model,
        stores["rows"],
        train=True,
        rngs={"dropout": jax.random.key(3)},
        capture_intermediates=lambda module, method: module.name == "dropout",
        mutable=[INTERMEDIATES],
    )
    dropped = [np.asarray(seen[INTERMEDIATES][f"layers_{i}"]["dropout"]["__call__"][0] == 0) for i in range(6)]
    assert all(0.4 < mask.mean() < 0.6 for mask in dropped)
    assert len({mask.tobytes() for mask in dropped}) == 6
    close(run(model, stores["rows"]), run(decoder(), stores["rows"]))


def test_a_leaf_held_twice_is_refused(stores):
    twice = {**stores["banks"]["params"], "layers_0": stores["rows"]["params"]["layers_0"]}
    for scanned in (False, True):
        with pytest.raises(ValueError, match=r"params/layers_0_1/.* is held by the bank and by the layers"):
            decoder(scan_layers=scanned).apply({"params": twice}, TOKENS)


def test_a_run_with_nothing_in_the_store_is_refused(stores):
    some = {key: item for key, item in stores["banks"]["params"].items() if key != "layers_3_5"}
    with pytest.raises(ValueError, match="holds layers_0_1 and nothing of layers_3_5"):
        decoder(scan_layers=True).apply({"params": some}, TOKENS)


def test_a_missing_layer_of_a_run_is_refused(stores):
    some = {key: item for key, item in stores["rows"]["params"].items() if key != "layers_4"}
    with pytest.raises(ValueError, match="holds layers_3 and not layers_4"):
        decoder(scan_layers=True).apply({"params": some}, TOKENS)


def test_a_bank_of_another_plan_is_refused(stores):
    for scanned in (False, True):
        with pytest.raises(ValueError, match=r"layers_3_5, which is no run of this decoder \(layers_0_1, layers_3_4"):
            decoder(scan_layers=scanned, bank_layers=2).apply(stores["banks"], TOKENS)


def test_pipelines_are_refused():
    with pytest.raises(ValueError, match="stages=2: pipelines are not supported"):
        StackView(((0, 2),), stages=2)


def test_an_output_not_captured_is_named(stores):
    with pytest.raises(KeyError, match="no output of layers_6"):
        layer_output({}, 6)


def test_the_stream_has_one_dtype_in_both_loops(stores):
    params = stores["rows"]["params"]
    table = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params["embed_tokens"])
    mixed = {"params": {**params, "embed_tokens": table}}
    capture = {"capture_intermediates": layer_outputs, "mutable": [INTERMEDIATES]}

    def dtypes(model):
        _, seen = jax.eval_shape(lambda: model.apply(mixed, TOKENS, **capture))
        return {layer_output(seen[INTERMEDIATES], index).dtype for index in range(6)}

    assert len(dtypes(decoder())) == 1
    assert dtypes(decoder(scan_layers=True)) == dtypes(decoder())


def test_bank_sites_name_the_stored_stack():
    (site,) = decoder(scan_layers=True).bank_sites
    assert site.scanned
    assert site.view.bank_names() == ["layers_0_1", "layers_2", "layers_3_5"]
    (plain,) = decoder().bank_sites
    assert not plain.scanned
    assert plain.view.bank_names() == [f"layers_{i}" for i in range(6)]
