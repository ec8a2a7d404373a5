"""A manifest is checked whole when it is read: each field that cannot be what an import wrote is told by name."""

import copy
import json

import pytest

from dewconv.converters.banks import check_banks, open_banks
from dewconv.converters.differences import open_tensors
from dewconv.converters.exporting import export_checkpoint
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.source import open_source
from dewconv.families import ConversionError, FindingsError, find
from dewconv.parity.fixtures import write_checkpoint

WRONG = ("words", [], [1], {}, {"a": 1}, True, -1, 0.5, 10**30, None, "../x", ["/etc/passwd"])
OPEN = {
    # Fields that describe and decide nothing, where any text (or null) is as good as another.
    "source.name": str,
    "source.repo": str | None,
    "source.revision": str | None,
    "source.path": str | None,
    "etag": str | None,
    "inexact": list,
    "carried": dict,
    "coded": dict,
    "aliases": dict,
    "zeros": list,
    "beside": dict,
    "text_only": bool,
    "quantized": type(None),
}


def paths(value, before=()):
    for key, item in value.items():
        yield (*before, key)
        if isinstance(item, dict):
            yield from paths(item, (*before, key))


@pytest.fixture(scope="module")
def banks(tmp_path_factory):
    """Banks of a wrapper: carried tensors, layer kinds with ropes, an index, side files."""
    where = tmp_path_factory.mktemp("manifest")
    owner = find("gemma3")
    name = next(name for name, variant in owner.variants.items() if "text_config" in variant.config)
    source = write_checkpoint(where / "source", owner.variants[name], owner)
    (source / "tokenizer.json").write_text('{"model": {}}')
    import_checkpoint(open_source(source), where / "banks")
    return where / "banks"


def altered(banks, change):
    """What opening, comparing and planning the export of `banks` under a changed manifest says; None when all do."""
    path = banks / "dewconv.json"
    before = path.read_bytes()
    value = json.loads(before)
    change(value)
    path.write_text(json.dumps(value))
    try:
        open_tensors(banks)
    except ConversionError as error:
        return str(error)
    finally:
        path.write_bytes(before)
    return None


def holder_of(value, path):
    for key in path[:-1]:
        value = value[key]
    return value


def test_every_field_of_every_wrong_type_is_told_by_its_name(banks):
    value = json.loads((banks / "dewconv.json").read_text())
    tried, badly = 0, []
    alike = {}
    for path in paths(value):
        # Two keys of a table of names stand for the others.
        table = path[:-1] if path[0] in ("carried", "files", "beside") or path[:2] == ("source", "files") else path
        alike[table] = alike.get(table, 0) + 1
        if alike[table] > 2:
            continue
        for wrong in WRONG:
            now = copy.deepcopy(value)
            holder_of(now, path)[path[-1]] = wrong
            said = altered(banks, lambda m, now=now: (m.clear(), m.update(now)))
            tried += 1
            if said is None:
                known = OPEN.get(".".join(path), OPEN.get(path[-1]))
                told_well = (
                    path[0] in ("decoder", "carried")
                    or (known is not None and isinstance(wrong, known))
                    or wrong == holder_of(value, path)[path[-1]]
                )
            else:
                # A value that a field can have is held against what is stored, and against the other fields.
                stored = path[0] in ("decoder", "carried", "aliases") and " finding" in said.splitlines()[0]
                internal = any(word in said for word in ("Error", "object is not", "NoneType", "argument"))
                told_well = not internal and (path[0] in said or path[-1] in said or stored)
            if not told_well:
                badly.append(f"{'.'.join(path)} = {wrong!r}: {said and said[:300]}")
    assert badly == []
    assert tried > 300


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(family="gemma4"), "field family: found 'gemma4', needed 'gemma3'"),
        (lambda m: m.update(model_type="gemma9"), "field model_type: found 'gemma9'"),
        (lambda m: m.update(codec="fp9"), "field codec: found 'fp9', needed one of plain, fp8, int4"),
        (lambda m: m.update(dtype="bf17"), "field dtype: found 'bf17', needed one of keep, "),
        (lambda m: m.update(version=2), "has format version 2, this dewconv reads 1; use a newer dewconv"),
        (
            lambda m: m["source"]["files"].pop("model.safetensors"),
            "field source.files.model.safetensors: found nothing",
        ),
        (lambda m: m["source"]["files"].pop("config.json"), "field source.files.config.json: found nothing"),
        (lambda m: m["decoder"].update(num_layers="7"), "field decoder.num_layers: found '7'"),
        (lambda m: m["decoder"].update(num_layers=10**9), "field decoder.num_layers: found 1000000000"),
        (lambda m: m["files"].update({"../top.safetensors": {}}), "leads out of the directory"),
        (lambda m: m["beside"].update({"../../x": {"xxh3": "0" * 16}}), "leads out of the directory"),
        (lambda m: m["aliases"].update({"ghost": "model.norm.weight"}), "field aliases: found 'ghost'"),
        (lambda m: m["zeros"].append("ghost"), "field zeros: found 'ghost'"),
        (lambda m: m["spelling"].update(body="x."), 'field spelling: found {"body": "x."'),
    ],
)
def test_what_is_said(banks, change, said):
    message = altered(banks, change)
    assert message is not None
    assert str(banks / "dewconv.json") in message
    assert said in message


def test_every_problem_is_told_at_once(banks):
    message = altered(banks, lambda m: (m.update(codec="fp9", dtype=3), m.pop("zeros")))
    assert [line.split(":")[0].strip() for line in message.splitlines()[1:]] == [
        "field dtype",
        "field codec",
        "field zeros",
    ]


@pytest.mark.parametrize("name", ["source/tokenizer.json", "source/config.json", "headers/model.safetensors.json"])
@pytest.mark.parametrize("size", ["same", "other"])
def test_a_file_beside_the_weights_that_was_altered_is_not_exported(banks, tmp_path, name, size):
    path = banks / name
    before = path.read_bytes()
    flipped = before.replace(b"0", b"1", 1) if b"0" in before else before[:-1] + b" "
    path.write_bytes(flipped if size == "same" else before + b"\n")
    try:
        with pytest.raises(ConversionError) as caught:
            export_checkpoint(open_banks(banks), tmp_path / "out")
        assert name in str(caught.value)
        if isinstance(caught.value, FindingsError) and "checksum" in str(caught.value):
            assert [finding.what for finding in check_banks(open_banks(banks))] == [name]
    finally:
        path.write_bytes(before)
    assert list(tmp_path.iterdir()) == []
    assert export_checkpoint(open_banks(banks), tmp_path / "out").exact


def test_banks_written_before_there_were_checksums_of_them_are_held_to_their_sizes(banks, tmp_path):
    path, manifest = banks / "source/tokenizer.json", banks / "dewconv.json"
    before, text = path.read_bytes(), manifest.read_bytes()
    value = json.loads(text)
    del value["beside"]
    manifest.write_text(json.dumps(value))
    try:
        plan = export_checkpoint(open_banks(banks), tmp_path / "out")
        assert not plan.exact
        assert any("no checksums of the files beside the weights" in notice for notice in plan.notices)
        path.write_bytes(before + b" ")
        with pytest.raises(FindingsError, match=r"source/tokenizer\.json: found 14 bytes, needed 13"):
            export_checkpoint(open_banks(banks), tmp_path / "again")
    finally:
        path.write_bytes(before)
        manifest.write_bytes(text)


def test_a_link_out_of_a_bank_directory_is_not_followed(banks, tmp_path):
    path = banks / "source/tokenizer.json"
    before = path.read_bytes()
    (tmp_path / "secret").write_bytes(before)
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    try:
        with pytest.raises(FindingsError, match=r"source/tokenizer\.json: found a link that leads out"):
            open_banks(banks)
    finally:
        path.unlink()
        path.write_bytes(before)
