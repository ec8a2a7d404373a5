"""Sources: directories, indexes that lie, links, side files, pickles, the hub's cache layout."""

import hashlib
import http.server
import json
import os
import pickle
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from safetensors.numpy import save_file

from dewconv.converters.source import open_source
from dewconv.families.errors import ConversionError, FindingsError

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def edit_index(path, change):
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def test_a_single_file_and_shards_give_the_same_table(tiny):
    single = open_source(tiny.qwen3("one").path)
    sharded = open_source(tiny.qwen3("two", shards=2).path)
    assert set(single.tensors) == set(sharded.tensors)
    assert {t.file for t in sharded.tensors.values()} == {ONE, TWO}
    assert single.weight_bytes == sharded.weight_bytes
    assert list(single.config) == list(tiny.qwen3_config())


def test_a_config_alone_opens_without_weights(tiny, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.qwen3_config()))
    source = open_source(tmp_path)
    assert not source.has_weights
    assert source.config["model_type"] == "qwen3"


class TestIndexFaults:
    """Each fault of an index has a message of its own."""

    def messages(self, tiny, break_it):
        checkpoint = tiny.qwen3(shards=2)
        break_it(checkpoint.path)
        with pytest.raises(ConversionError) as caught:
            open_source(checkpoint.path)
        return str(caught.value)

    def test_missing_shard(self, tiny):
        text = self.messages(tiny, lambda path: (path / TWO).unlink())
        assert f"shard {TWO}: found no such file" in text
        assert "finish the download" in text

    def test_wrong_shard(self, tiny):
        name = "model.norm.weight"
        right = {}

        def swap(weight_map):
            right["shard"] = weight_map[name]
            weight_map[name] = ONE if weight_map[name] == TWO else TWO

        text = self.messages(tiny, lambda path: edit_index(path, swap))
        assert f"tensor {name!r}: found in {right['shard']}, needed in" in text

    def test_tensor_in_no_shard(self, tiny):
        text = self.messages(tiny, lambda path: edit_index(path, lambda m: m.update({"mtp.fc.weight": ONE})))
        assert "tensor 'mtp.fc.weight': found in no shard" in text

    def test_tensor_in_two_shards(self, tiny):
        def duplicate(path):
            from safetensors.numpy import load_file

            held = load_file(path / TWO)
            held["model.embed_tokens.weight"] = np.zeros((131, 24), np.float16)
            save_file(held, path / TWO)

        text = self.messages(tiny, duplicate)
        assert f"tensor 'model.embed_tokens.weight': found in {ONE} and {TWO}, needed in one shard" in text

    def test_several_faults_are_told_at_once(self, tiny):
        def change(weight_map):
            weight_map["a.weight"] = ONE
            weight_map["b.weight"] = TWO

        text = self.messages(tiny, lambda path: edit_index(path, change))
        assert "'a.weight'" in text
        assert "'b.weight'" in text

    def test_no_weight_map(self, tiny):
        assert "no weight_map" in self.messages(tiny, lambda path: (path / INDEX).write_text('{"metadata": {}}'))


def test_a_tensor_the_index_does_not_list_is_reported_and_kept(tiny):
    checkpoint = tiny.qwen3(shards=2)
    edit_index(checkpoint.path, lambda weight_map: weight_map.pop("model.norm.weight"))
    source = open_source(checkpoint.path)
    assert "model.norm.weight" in source.tensors
    assert any("'model.norm.weight'" in notice and "not in the index" in notice for notice in source.notices)


@pytest.mark.parametrize(
    "entry",
    [
        "../evil.safetensors",
        "/etc/passwd",
        "/etc/evil.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "a\0b.safetensors",
        "c:evil.safetensors",
        ".hidden.safetensors",
        "model.bin",
        "",
        7,
        None,
    ],
)
def test_index_entries_that_are_no_plain_name_are_refused_before_any_open(tiny, tmp_path, entry):
    checkpoint = tiny.qwen3(shards=2)
    save_file({"stolen": np.zeros(3, np.float32)}, tmp_path / "evil.safetensors")
    # A shard that is no safetensors file: opening it would give another message.
    (checkpoint.path / ONE).write_bytes(b"")
    edit_index(checkpoint.path, lambda weight_map: weight_map.update({"stolen": entry}))
    with pytest.raises(FindingsError) as caught:
        open_source(checkpoint.path)
    assert "'stolen'" in str(caught.value)
    assert repr(entry) in str(caught.value)
    assert "plain file name" in str(caught.value)


def test_a_shard_that_links_out_of_the_directory_is_refused(tiny, tmp_path):
    checkpoint = tiny.qwen3()
    outside = tmp_path / "outside.safetensors"
    (checkpoint.path / "model.safetensors").rename(outside)
    (checkpoint.path / "model.safetensors").symlink_to(outside)
    with pytest.raises(ConversionError, match="leads out of the directory"):
        open_source(checkpoint.path)


def test_a_single_file_beside_an_index_that_ignores_it_is_ambiguous(tiny):
    checkpoint = tiny.qwen3(shards=2)
    save_file({"a": np.zeros(1, np.float32)}, checkpoint.path / "model.safetensors")
    with pytest.raises(ConversionError, match="both"):
        open_source(checkpoint.path)


def into_hub_cache(checkpoint, cache, repo="org--name", commit="0" * 40):
    """The checkpoint as the hub's cache keeps it: blobs by digest, links in a snapshot."""
    repository = cache / f"models--{repo}"
    snapshot = repository / "snapshots" / commit
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file()):
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(path.read_bytes())
        link = snapshot / path.relative_to(checkpoint)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return repository, snapshot


def test_the_hub_caches_links_into_its_blobs_are_followed(tiny, tmp_path):
    checkpoint = tiny.qwen3(shards=2)
    repository, snapshot = into_hub_cache(checkpoint.path, tmp_path / "hub")
    source = open_source(snapshot)
    assert (source.repo, source.commit) == ("org/name", "0" * 40)
    assert {item.path for item in source.side_files} == set(tiny.side_files)
    assert source.etag(ONE) == hashlib.sha256((checkpoint.path / ONE).read_bytes()).hexdigest()
    again = open_source(repository)
    assert again.commit == "0" * 40
    assert set(again.tensors) == set(source.tensors)
    assert open_source(repository, revision="main").commit == "0" * 40
    for revision in ("v2", "../blobs", "/etc/hostname"):
        with pytest.raises(ConversionError, match="no snapshot"):
            open_source(repository, revision=revision)


def test_a_link_out_of_a_snapshot_that_is_not_into_its_blobs_is_refused(tiny, tmp_path):
    _, snapshot = into_hub_cache(tiny.qwen3().path, tmp_path / "hub")
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes((snapshot / "model.safetensors").read_bytes())
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(outside)
    with pytest.raises(ConversionError, match="leads out"):
        open_source(snapshot)


def test_side_files_are_listed_and_code_pickles_links_and_git_are_not(tiny, tmp_path):
    checkpoint = tiny.qwen3()
    (tmp_path / "secret.txt").write_text("secret")
    (checkpoint.path / "secret.txt").symlink_to(tmp_path / "secret.txt")
    (checkpoint.path / "inner.txt").symlink_to("merges.txt")
    (checkpoint.path / "linked").symlink_to(tmp_path)
    (checkpoint.path / "modeling.py").write_text("raise SystemExit")
    (checkpoint.path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    (checkpoint.path / "training_args.bin").write_bytes(b"")
    (checkpoint.path / "pytorch_model.bin.index.json").write_text("{}")
    (checkpoint.path / ".git").mkdir()
    (checkpoint.path / ".git" / "config").write_text("x")
    (checkpoint.path / "consolidated.safetensors").write_bytes(b"not even a header")
    source = open_source(checkpoint.path)
    assert {item.path for item in source.side_files} == {*tiny.side_files, "inner.txt"}
    left = {item.path: item.why for item in source.skipped}
    assert "leads out" in left["secret.txt"]
    assert "leads out" in left["linked"]
    assert "code" in left["modeling.py"]
    assert "pickle" in left["pytorch_model.bin"]
    assert "pickle" in left["training_args.bin"]
    assert "consolidated.safetensors" in left
    assert not any(".git" in name for name in left)
    assert any("safetensors files are used" in notice for notice in source.notices)


class Dangerous:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickled_weights_alone_are_refused_and_never_run(tiny, tmp_path, name):
    checkpoint = tiny.qwen3()
    (checkpoint.path / "model.safetensors").unlink()
    trap = tmp_path / "trap"
    (checkpoint.path / name).write_bytes(pickle.dumps(Dangerous(str(trap))))
    with pytest.raises(ConversionError, match=rf"{re.escape(name)}.*save_pretrained"):
        open_source(checkpoint.path)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1, "a": 2}', "'a' twice"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "nested more than 64 deep"),
        ("\xff", "not valid JSON"),
    ],
)
def test_a_config_that_is_no_config_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConversionError, match=message):
        open_source(tmp_path)


def test_infinity_is_a_value_released_configs_have(tmp_path):
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert open_source(tmp_path).config["time_step_limit"] == [0.0, float("inf")]


def test_what_is_no_directory_says_so(tiny, tmp_path):
    file = tiny.qwen3().path / "model.safetensors"
    with pytest.raises(ConversionError, match="give the directory"):
        open_source(file)
    with pytest.raises(ConversionError, match=r"org/name"):
        open_source(tmp_path / "typo" / "typo")
    with pytest.raises(ConversionError, match="no such directory"):
        open_source("./nowhere")
    with pytest.raises(ConversionError, match="has no revision 'v2'"):
        open_source(file.parent, revision="v2")
    with pytest.raises(ConversionError, match=r"no config\.json"):
        open_source(tmp_path)


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that answers every request with one status; it records what it was asked."""

    status, error, asked = 404, "RepoNotFound", []

    def do_GET(self):
        type(self).asked.append(self.path)
        self.send_response(self.status)
        self.send_header("X-Error-Code", self.error)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Hub.asked = []
    yield server
    server.shutdown()
    server.server_close()


ASK = """
import sys
from dewconv.converters.source import open_source
from dewconv.families.errors import ConversionError
try:
    print(open_source("org/name", revision=sys.argv[1] or None).root)
except ConversionError as error:
    print("ERROR", error)
"""
TOKEN = "hf_" + "secret" * 5


def ask(tmp_path, endpoint, revision="", **environment):
    result = subprocess.run(
        [sys.executable, "-c", ASK, revision],
        cwd=tmp_path,
        env={
            **os.environ,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert TOKEN not in result.stdout + result.stderr
    return result


@pytest.mark.parametrize(
    ("status", "code", "revision", "message"),
    [
        (404, "RepoNotFound", "", "knows no such repository"),
        (401, "", "", "private"),
        (403, "GatedRepo", "", "gated"),
        (403, "", "", "forbidden"),
        (404, "RevisionNotFound", "v9", "no revision 'v9'"),
        (418, "", "", "status 418"),
    ],
)
def test_each_way_the_hub_refuses_ends_in_one_line(hub, tmp_path, status, code, revision, message):
    Hub.status, Hub.error = status, code
    result = ask(tmp_path, f"http://127.0.0.1:{hub.server_port}", revision)
    line = next(line for line in result.stdout.splitlines() if line.startswith("ERROR"))
    assert message in line, result.stdout
    assert result.stdout.count("\n") == 1
    assert "Traceback" not in result.stderr
    assert Hub.asked


def test_offline_fails_at_once_and_a_local_directory_is_never_looked_up(hub, tmp_path, tiny):
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    result = ask(tmp_path, endpoint, HF_HUB_OFFLINE="1")
    assert "offline mode is on" in result.stdout
    tiny.qwen3("org/name")
    result = ask(tmp_path, endpoint)
    assert result.stdout.strip().endswith("org/name")
    assert not Hub.asked


def test_an_unreachable_hub_is_told_apart_from_offline_mode(tmp_path):
    result = ask(tmp_path, "http://127.0.0.1:9")
    assert "cannot be reached" in result.stdout
    assert "offline mode" not in result.stdout
