"""What no family here needs yet, by a family of the test's own: padding, fused and interleaved tensors, stored forms,
prediction depths that are carried."""

from dataclasses import replace

import numpy as np
import pytest

from dewconv.converters import banks as banks_module
from dewconv.converters import plan as plan_module
from dewconv.converters.banks import open_banks
from dewconv.converters.exporting import export_checkpoint
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.plan import plan_import
from dewconv.converters.source import open_source
from dewconv.families.errors import FindingsError
from dewconv.families.qwen3 import FAMILY
from dewconv.families.rules import Carried, OneOf, Rule, View, Zeros

VOCAB, D, INNER, PADDED = 131, 24, 28, 136


def weights(d):
    """Qwen3 with padded embedding rows, and gate and up projections fused, interleaved or apart."""
    for item in FAMILY.weights(d):
        name = getattr(item, "source", "")
        if name == "model.embed_tokens.weight":
            whole = View.of(PADDED, D)
            yield Rule(name, whole[:VOCAB], "embed_tokens/embedding", View.of(VOCAB, D))
            yield Zeros(name, whole[VOCAB:])
        elif "gate_proj" not in name and "up_proj" not in name:
            yield item
    for layer in range(d.num_layers):
        over = {"l": (layer,)}
        fused, leaf = View.of(2 * INNER, D), View.of(D, INNER)
        at, to = "model.layers.{l}.mlp.", "layers_{l}/mlp/"
        yield OneOf(
            f"the MLP of layer {layer}",
            {
                "fused": (
                    Rule(f"{at}gate_up_proj", fused[:INNER].T, f"{to}gate_proj/kernel", leaf, over),
                    Rule(f"{at}gate_up_proj", fused[INNER:].T, f"{to}up_proj/kernel", leaf, over),
                ),
                "interleaved": (
                    Rule(f"{at}woven", fused[0::2].T, f"{to}gate_proj/kernel", leaf, over),
                    Rule(f"{at}woven", fused[1::2].T, f"{to}up_proj/kernel", leaf, over),
                ),
                "apart": (
                    Rule(f"{at}gate_proj.weight", View.of(INNER, D).T, f"{to}gate_proj/kernel", leaf, over),
                    Rule(f"{at}up_proj.weight", View.of(INNER, D).T, f"{to}up_proj/kernel", leaf, over),
                ),
            },
        )


def carried(config):
    yield Carried(f"model.layers.{config['num_hidden_layers']}.", "a prediction depth, not computed")


@pytest.fixture
def family(monkeypatch):
    """The made-up family in the registry's place."""
    made = replace(FAMILY, weights=weights, carried=carried)
    for module in (plan_module, banks_module):
        monkeypatch.setattr(module, "find", lambda name: made)
    return made


FORMS = {
    "fused": lambda gate, up: {"gate_up_proj": np.concatenate([gate, up])},
    "interleaved": lambda gate, up: {"woven": np.stack([gate, up], 1).reshape(2 * INNER, D)},
    "apart": lambda gate, up: {"gate_proj.weight": gate, "up_proj.weight": up},
}


@pytest.fixture
def source(tiny, tmp_path):
    """A checkpoint with each layer in another form, padded rows and a prediction depth, over three shards."""
    config = tiny.qwen3_config(num_hidden_layers=3)
    plain = tiny.weights_of(config)
    held = {}
    for name, array in plain.items():
        if name == "model.embed_tokens.weight":
            held[name] = np.concatenate([array, np.zeros((PADDED - VOCAB, D), array.dtype)])
        elif "gate_proj" not in name and "up_proj" not in name:
            held[name] = array
    for layer, form in enumerate(FORMS):
        at = f"model.layers.{layer}.mlp."
        tensors = FORMS[form](plain[f"{at}gate_proj.weight"], plain[f"{at}up_proj.weight"])
        held |= {at + name: array for name, array in tensors.items()}
    held["model.layers.3.eh_proj.weight"] = tiny.random_bits((24, 48), np.dtype(np.float16), 77)
    return plain, held, tiny.write(tmp_path / "source", config, held, shards=3)


def test_every_form_fills_the_same_bank_and_is_written_back(family, source, tiny, tmp_path):
    plain, _, path = source
    banks = import_checkpoint(open_source(path), tmp_path / "banks")
    for name in ("gate_proj", "up_proj"):
        bank = banks.array("layers_0_2", f"mlp/{name}/kernel")
        for layer in range(3):
            assert bank[layer].tobytes() == plain[f"model.layers.{layer}.mlp.{name}.weight"].T.tobytes(), (name, layer)
    embedding = banks.array("top", "embed_tokens/embedding")
    assert embedding.tobytes() == plain["model.embed_tokens.weight"].tobytes()
    assert banks.manifest.carried == {"model.layers.3.eh_proj.weight": "a prediction depth, not computed"}
    assert banks.manifest.zeros == ("model.embed_tokens.weight",)
    assert export_checkpoint(open_banks(tmp_path / "banks"), tmp_path / "out").exact
    assert tiny.files_of(tmp_path / "out") == tiny.files_of(path)


@pytest.mark.parametrize("bits", [0x3F80, 0x8000])
def test_padding_that_is_not_zero_is_refused_even_as_minus_zero(family, source, tiny, tmp_path, bits):
    _, held, path = source
    held["model.embed_tokens.weight"].view(np.uint16)[133, 5] = bits
    tiny.write(path, tiny.qwen3_config(num_hidden_layers=3), held, shards=3)
    with pytest.raises(FindingsError, match=r"tensor model\.embed_tokens\.weight: found values in its padding"):
        import_checkpoint(open_source(path), tmp_path / "banks")
    assert not (tmp_path / "banks").exists()


def test_two_forms_of_one_layer_are_refused(family, source, tiny):
    _, held, path = source
    held["model.layers.0.mlp.woven"] = held["model.layers.1.mlp.woven"]
    tiny.write(path, tiny.qwen3_config(num_hidden_layers=3), held, shards=3)
    with pytest.raises(FindingsError, match=r"the MLP of layer 0: found fused .* and interleaved"):
        plan_import(open_source(path))


def test_tensors_of_one_parameter_in_two_dtypes_are_refused(family, source, tiny):
    _, _, path = source

    def halves(d):
        for item in FAMILY.weights(d):
            if getattr(item, "leaf", "") == "norm/scale":
                yield Rule("a", View.of(12), "norm/scale", View.of(24)[:12])
                yield Rule("b", View.of(12), "norm/scale", View.of(24)[12:])
            else:
                yield item

    plain = tiny.weights_of(tiny.qwen3_config())
    del plain["model.norm.weight"]
    plain |= {"a": np.ones(12, np.float32), "b": np.ones(12, np.float16)}
    made = replace(FAMILY, weights=halves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "find", lambda name: made)
        with pytest.raises(FindingsError, match=r"parameter norm/scale: found F32 \(a\) and F16 \(b\)"):
            plan_import(open_source(tiny.write(path.parent / "halves", tiny.qwen3_config(), plain)))


def test_rules_that_leave_or_repeat_elements_are_found(tiny, tmp_path):
    def gaps(d):
        for item in FAMILY.weights(d):
            if getattr(item, "leaf", "") == "norm/scale":
                yield Rule("model.norm.weight", View.of(24)[:12], "norm/scale", View.of(24)[:12])
            else:
                yield item

    path = tiny.write(tmp_path / "source", tiny.qwen3_config(), tiny.weights_of(tiny.qwen3_config()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "find", lambda name: replace(FAMILY, weights=gaps))
        with pytest.raises(FindingsError) as caught:
            plan_import(open_source(path))
    assert {finding.what for finding in caught.value.findings} == {"parameter norm/scale", "tensor model.norm.weight"}
