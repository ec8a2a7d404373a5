"""What is refused: replacing foreign directories, exporting damaged banks, codes taken for values, absurd configs."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dewconv.converters.exporting import export_checkpoint
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.source import open_source
from dewconv.families import ConversionError, FindingsError, find
from dewconv.families.fields import MOST_LAYERS
from dewconv.parity.fixtures import write_checkpoint


@pytest.fixture
def source(tmp_path):
    owner = find("qwen3")
    return write_checkpoint(tmp_path / "source", owner.variants["untied"], owner)


def test_overwrite_replaces_its_own_kind_alone(source, tmp_path):
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(ConversionError, match=r"would lose thesis\.txt \(.*has no dewconv\.json"):
        import_checkpoint(open_source(source), mine, overwrite=True)
    banks = import_checkpoint(open_source(source), tmp_path / "banks")
    with pytest.raises(ConversionError, match=r"would lose thesis\.txt \(.*has no config\.json"):
        export_checkpoint(banks, mine, overwrite=True)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    import_checkpoint(open_source(source), tmp_path / "banks", overwrite=True)


def test_damaged_banks_are_not_exported(source, tmp_path):
    banks = import_checkpoint(open_source(source), tmp_path / "banks")
    file = tmp_path / "banks" / "layers_0_2.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(FindingsError, match=r"layers_0_2\.safetensors: .*checksum"):
        export_checkpoint(banks, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_integers_are_no_parameters(source, tmp_path):
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].astype(np.int32)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(FindingsError, match=rf"{name}: found dtype I32, needed a floating dtype"):
        import_checkpoint(open_source(source), tmp_path / "banks")
    assert not (tmp_path / "banks").exists()


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_absurd_depths_are_refused_before_anything_is_made_of_them(name):
    owner = find(name)
    config = dict(next(iter(owner.variants.values())).config)
    with pytest.raises(FindingsError, match=f"at most {MOST_LAYERS} layers"):
        owner.read({**config, "num_hidden_layers": 10**9})
    reading = owner.examine({**config, "num_hidden_layers": 10**9})
    assert len(reading.findings) == 1
    assert not reading.complete
