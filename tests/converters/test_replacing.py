"""`overwrite` replaces what a run of the same kind wrote, and never a file that may be a user's."""

import json
import shutil

import pytest

from dewconv.converters import staging
from dewconv.converters.banks import open_banks
from dewconv.converters.exporting import export_checkpoint
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.source import open_source
from dewconv.families import ConversionError


@pytest.fixture
def made(tiny, tmp_path):
    source = open_source(tiny.qwen3(shards=2).path)
    banks = import_checkpoint(source, tmp_path / "banks")
    export_checkpoint(banks, tmp_path / "checkpoint")
    return {"import": (import_checkpoint, source, "banks"), "export": (export_checkpoint, banks, "checkpoint")}


def empty(out):
    for item in out.iterdir():
        shutil.rmtree(item) if item.is_dir() else item.unlink()


def a_project(out):
    empty(out)
    (out / "config.json").write_text('{"port": 80}')
    (out / "main.py").write_text("code")
    (out / ".git").mkdir()
    return "main.py"


def a_manifest_of_another_program(out):
    empty(out)
    (out / "dewconv.json").write_text("{}")
    (out / "essay.txt").write_text("years of work")
    return "essay.txt"


def a_config_and_no_weights(out):
    empty(out)
    (out / "config.json").write_text('{"model_type": "qwen3"}')
    return "config.json"


def notes_beside(out):
    (out / "notes.txt").write_text("mine")
    return "notes.txt"


def a_file_below(out):
    (out / "source").mkdir(exist_ok=True)
    (out / "source" / "mine.md").write_text("mine")
    return "source/mine.md"


def an_empty_directory(out):
    (out / "plans" / "later").mkdir(parents=True)
    return "plans/later/"


def other_banks(out):
    shutil.copytree(out.parent / "banks", out.parent / "copy")
    shutil.move(out.parent / "copy", out / "sub")
    return "sub/dewconv.json"


def a_linked_directory(out):
    (out.parent / "elsewhere").mkdir()
    (out / "linked").symlink_to(out.parent / "elsewhere")
    return "linked"


def a_file_moved_and_linked(out):
    name = next(path for path in sorted(out.iterdir()) if path.suffix == ".safetensors")
    shutil.move(name, out.parent / "moved")
    name.symlink_to(out.parent / "moved")
    # A checkpoint whose shard is a link out of it cannot be read as one: everything in it may be a user's.
    return name.name if (out / "dewconv.json").exists() else "LICENSE"


def a_directory_of_a_known_name(out):
    known = out / "unfinished.jsonl" if (out / "dewconv.json").exists() else out / "README.md"
    (known / "below").mkdir(parents=True)
    (known / "below" / "mine").write_text("mine")
    return f"{known.name}/below/mine"


@pytest.mark.parametrize("verb", ["import", "export"])
@pytest.mark.parametrize(
    "change",
    [
        a_project,
        a_manifest_of_another_program,
        a_config_and_no_weights,
        notes_beside,
        a_file_below,
        an_empty_directory,
        other_banks,
        a_linked_directory,
        a_file_moved_and_linked,
        a_directory_of_a_known_name,
    ],
)
def test_what_may_be_a_users_is_never_replaced(tiny, tmp_path, made, verb, change):
    run, given, name = made[verb]
    out = tmp_path / name if verb == "export" else shutil.copytree(tmp_path / "banks", tmp_path / "again")
    lost = change(out)
    before = {path.relative_to(tmp_path): path.is_symlink() for path in tmp_path.rglob("*")}
    contents = tiny.files_of(tmp_path)
    with pytest.raises(ConversionError) as caught:
        run(given, out, overwrite=True)
    message = str(caught.value)
    assert message.startswith(f"{out}: ")
    assert "\n" not in message
    assert lost in message
    assert "another OUT" in message
    assert {path.relative_to(tmp_path): path.is_symlink() for path in tmp_path.rglob("*")} == before
    assert tiny.files_of(tmp_path) == contents


def test_only_the_first_files_are_named(tmp_path, made):
    run, given, _ = made["export"]
    for number in range(9):
        (tmp_path / "checkpoint" / f"note{number}.txt").write_text("mine")
    with pytest.raises(ConversionError, match=r"lose note0\.txt, note1\.txt, note2\.txt, note3\.txt and 5 more; name"):
        run(given, tmp_path / "checkpoint", overwrite=True)


def test_what_a_run_wrote_is_replaced(tiny, tmp_path, made):
    wanted = tiny.files_of(tmp_path / "checkpoint")
    assert "assets/notes.txt" in wanted
    other = import_checkpoint(open_source(tiny.qwen3("other", num_hidden_layers=2).path), tmp_path / "others")
    import_checkpoint(made["import"][1], tmp_path / "others", overwrite=True)
    assert open_banks(tmp_path / "others").manifest.fields.num_layers == 3
    (tmp_path / "checkpoint" / "tokenizer.json").write_text("{}")
    export_checkpoint(made["export"][1], tmp_path / "checkpoint", max_shard_size=20000, overwrite=True)
    assert len(list((tmp_path / "checkpoint").glob("model-*.safetensors"))) > 2
    export_checkpoint(made["export"][1], tmp_path / "checkpoint", overwrite=True)
    assert tiny.files_of(tmp_path / "checkpoint") == wanted
    assert other.manifest.fields.num_layers == 2


def test_other_weights_taken_along_are_replaced_by_equal_ones_alone(tiny, tmp_path):
    path = tiny.qwen3().path
    (path / "model.gguf").write_bytes(b"GGUF" + bytes(1000))
    (path / "extra.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    banks = import_checkpoint(open_source(path).with_all_files(), tmp_path / "banks")
    out = tmp_path / "out"
    export_checkpoint(banks, out)
    wanted = tiny.files_of(out)
    assert {"model.gguf", "extra.safetensors"} < set(wanted)
    export_checkpoint(banks, out, overwrite=True)
    import_checkpoint(open_source(path).with_all_files(), tmp_path / "banks", overwrite=True)
    assert tiny.files_of(out) == wanted
    (out / "model.gguf").write_bytes(b"GGUF" + bytes(999) + b"1")
    with pytest.raises(ConversionError, match=r"would lose model\.gguf; name"):
        export_checkpoint(open_banks(tmp_path / "banks"), out, overwrite=True)


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("verb", ["import", "export"])
def test_a_file_that_appears_while_it_is_replaced_is_kept(tiny, tmp_path, made, monkeypatch, verb, exchange):
    run, given, name = made[verb]
    out = tmp_path / name if verb == "export" else shutil.copytree(tmp_path / "banks", tmp_path / "again")
    wanted = tiny.files_of(out)
    real, rename = staging._exchanged, staging.os.rename

    def exchanged(stage, target):
        if exchange:
            appear()
            return real(stage, target)
        return False

    def renamed(old, new):
        if str(old) == str(out):
            appear()
        rename(old, new)

    def appear():
        if not (out / "late.txt").exists():
            (out / "late.txt").write_text("mine")

    monkeypatch.setattr(staging, "_exchanged", exchanged)
    monkeypatch.setattr(staging.os, "rename", renamed)
    with pytest.raises(ConversionError, match=r"would lose late\.txt; name"):
        run(given, out, overwrite=True)
    assert tiny.files_of(out) == {**wanted, "late.txt": b"mine"}
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_saving_replaces_by_the_same_rule(tiny, tmp_path, made):
    from dewconv.converters.loading import load
    from dewconv.converters.saving import save

    model, variables = load(tmp_path / "banks")
    save(tmp_path / "saved", model, variables, like=tmp_path / "banks")
    save(tmp_path / "saved", model, variables, like=tmp_path / "banks", overwrite=True)
    (tmp_path / "saved" / "log.json").write_text(json.dumps([1]))
    with pytest.raises(ConversionError, match=r"would lose log\.json; name"):
        save(tmp_path / "saved", model, variables, like=tmp_path / "banks", overwrite=True)
