import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dewconv.families import FindingsError, find
from dewconv.parity.fixtures import write_checkpoint
from dewconv.parity.references import load_reference, next_token_loss


@pytest.fixture(scope="module", params=[("qwen3", "untied"), ("gemma3", "wrapper_saved")])
def side(request, tmp_path_factory):
    family, variant = request.param
    owner = find(family)
    path = write_checkpoint(tmp_path_factory.mktemp(variant), owner.variants[variant], owner)
    return (
        owner,
        owner.variants[variant].config,
        path,
        load_reference(path, owner, owner.variants[variant].config, "float32"),
    )


TOKENS = np.random.default_rng(0).integers(3, 128, (2, 20))


def test_the_last_stream_is_before_the_final_norm(side):
    *_, reference = side
    forward = reference.forward(TOKENS, streams=True)
    assert len(forward.streams) == reference.layers + 1
    with torch.no_grad():
        states = reference.decoder.norm(torch.from_numpy(forward.streams[-1]))
        logits = reference.model.get_output_embeddings()(states)
    np.testing.assert_array_equal(logits.numpy(), forward.logits)


def test_the_cache_and_generate_agree_with_the_forward(side):
    *_, reference = side
    full = reference.forward(TOKENS).logits
    bound = 2e-6 * np.abs(full).max()
    assert np.abs(reference.cached(TOKENS) - full).max() < bound
    assert np.abs(reference.cached(TOKENS, prefill=13) - full).max() < bound
    chosen, scores = reference.greedy(TOKENS[:, :8], 5)
    whole = reference.forward(np.concatenate([TOKENS[:, :8], chosen], axis=1)).logits
    np.testing.assert_array_equal(chosen, whole[:, 7:-1].argmax(-1))
    assert np.abs(scores - whole[:, 7:-1]).max() < bound


def test_gradients_are_named_as_the_rules_name_weights(side):
    owner, config, _, reference = side
    loss, gradients = reference.gradients(TOKENS)
    assert 1.0 < loss < 30.0
    fields, _ = owner.read(config)
    from dewconv.families.rules import placements

    assert set(gradients) == {place.source for place in placements(owner.weights(fields))}
    assert all(np.abs(gradient).max() > 0 for gradient in gradients.values())


def test_rotary_frequencies_stay_float32_in_bfloat16(side):
    owner, config, path, _ = side
    reference = load_reference(path, owner, config, "bfloat16")
    buffers = {name: buffer for name, buffer in reference.model.named_buffers() if "inv_freq" in name}
    assert buffers
    assert all(buffer.dtype == torch.float32 for buffer in buffers.values())
    assert next(reference.model.parameters()).dtype == torch.bfloat16


def test_what_transformers_does_not_find_is_named(tmp_path):
    owner = find("qwen3")
    path = write_checkpoint(tmp_path / "x", owner.variants["untied"], owner)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FindingsError) as caught:
        load_reference(path, owner, owner.variants["untied"].config, "float32")
    text = str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight" in text
    assert "model.layers.0.extra.weight" in text


def test_the_loss_over_a_large_vocabulary_is_not_rounded():
    logits = torch.randn(1, 4, 262144, generator=torch.Generator().manual_seed(0)) * 3
    logits.requires_grad_()
    tokens = torch.arange(4)[None]
    next_token_loss(logits, tokens).backward()
    chosen = torch.nn.functional.one_hot(tokens[0, 1:], 262144)
    exact = (torch.softmax(logits[0, :-1].detach().double(), -1) - chosen) / 3
    assert logits.grad is not None
    error = (logits.grad[0, :-1].double() - exact).abs().max(-1).values
    assert (error <= 2.0**-24 * exact.abs().max(-1).values).all()
    # A row's probabilities sum to one: in float32, torch's are 3e-5 short.
    assert (logits.grad[0, :-1].double().sum(-1).abs() * 3 <= 2.0**-23).all()
