"""Imports that read the hub by ranges: the banks of a download, no byte of the weights stored or sent twice."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_server import COMMIT, Fault, Repository, running

from dewconv.converters.prefetch import runs
from dewconv.families import deepseek_v3, qwen3, qwen3_moe
from dewconv.parity.fixtures import write_checkpoint

TOKEN = "hf_secretsecretsecret"
SIDE = ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja")


def command(home, url, *words, code=0):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-m", "dewconv", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Two shards with an index: latent attention, one tensor an expert, three prediction depths."""
    return write_checkpoint(
        tmp_path_factory.mktemp("streamed") / "source", deepseek_v3.VARIANTS["depths"], deepseek_v3.FAMILY, shards=2
    )


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "dewconv.json"
    }


def weights_of(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.glob("*.safetensors")}


def stored(home: Path) -> int:
    """Bytes of all files under the hub's cache; none is a shard."""
    assert list(home.rglob("*.safetensors")) == []
    return sum(path.stat().st_size for path in home.rglob("*") if path.is_file() and not path.is_symlink())


def test_a_streamed_import_is_the_import_of_a_download(checkpoint, tmp_path):
    with running({"org/tiny": Repository(checkpoint)}) as hub:
        command(tmp_path / "home", hub.url, "import", "org/tiny", tmp_path / "banks", "--stream")
        sent = {name: size for name, size in hub.sent.items() if name.endswith(".safetensors")}
    assert sent == weights_of(checkpoint)
    beside = sum(path.stat().st_size for path in checkpoint.iterdir() if path.suffix != ".safetensors")
    assert stored(tmp_path / "home") < beside + 4096
    command(tmp_path / "home", "", "import", checkpoint, tmp_path / "local")
    assert bytes_of(tmp_path / "banks") == bytes_of(tmp_path / "local")
    manifest = json.loads((tmp_path / "banks" / "dewconv.json").read_text())
    assert manifest["source"]["revision"] == COMMIT
    assert manifest["files"] == json.loads((tmp_path / "local" / "dewconv.json").read_text())["files"]
    shards = {name: item for name, item in manifest["source"]["files"].items() if name.endswith(".safetensors")}
    assert {name: item["size"] for name, item in shards.items()} == weights_of(checkpoint)
    assert all(item["etag"] for item in shards.values())
    command(tmp_path / "home", "", "export", tmp_path / "banks", tmp_path / "back")
    for name in (*weights_of(checkpoint), "model.safetensors.index.json", *SIDE):
        assert (tmp_path / "back" / name).read_bytes() == (checkpoint / name).read_bytes()


def test_streamed_banks_are_verified_against_the_revision_they_came_from(tmp_path):
    """What lies in the cache has no weights: they are fetched when torch needs them."""
    source = write_checkpoint(tmp_path / "source", qwen3.VARIANTS["mixed"], qwen3.FAMILY)
    options = ("--checks", "logits,round_trip", "--dtype", "float32")
    with running({"org/tiny": Repository(source)}) as hub:
        command(tmp_path / "home", hub.url, "import", "org/tiny", tmp_path / "banks", "--stream")
        assert list((tmp_path / "home").rglob("*.safetensors")) == []
        done = command(tmp_path / "home", hub.url, "verify", tmp_path / "banks", *options)
    assert "Equal" in done.stdout
    assert list((tmp_path / "home").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("family", "variant", "options", "most"),
    [
        (qwen3, "tied_copy", (), 1.4),
        (qwen3_moe, "fused", (), 1.6),
        (deepseek_v3, "fp8", (), 1.0),
        (deepseek_v3, "fp8", ("--quantized", "decode"), 2.0),
        (deepseek_v3, "kimi_k25_int4", ("--quantized", "decode"), 2.0),
    ],
)
def test_every_form_of_weights_is_streamed(family, variant, options, most, tmp_path):
    """most: of the checkpoint's bytes: a copy of a head is compared first, parts of one tensor that lie closer than
    `prefetch.NEAR` are read with what is between them, and values are decoded from whole codes."""
    source = write_checkpoint(tmp_path / "source", family.VARIANTS[variant], family.FAMILY)
    with running({"org/tiny": Repository(source)}) as hub:
        command(tmp_path / "home", hub.url, "import", "org/tiny", tmp_path / "banks", "--stream", *options)
        sent = sum(size for name, size in hub.sent.items() if name.endswith(".safetensors"))
    command(tmp_path / "home", "", "import", source, tmp_path / "local", *options)
    assert bytes_of(tmp_path / "banks") == bytes_of(tmp_path / "local")
    assert 1.0 <= sent / sum(weights_of(source).values()) <= most


def test_a_hub_that_falters_is_asked_again(checkpoint, tmp_path):
    faults = [Fault(status=503), Fault(cut=3), Fault(status=429, after="0"), Fault(cut=0), Fault(status=500)]
    repository = Repository(checkpoint, faults=[*faults, Fault(cut=1000), Fault(cut=1)])
    with running({"org/tiny": repository}) as hub:
        command(tmp_path / "home", hub.url, "import", "org/tiny", tmp_path / "banks", "--stream")
        sent = {name: size for name, size in hub.sent.items() if name.endswith(".safetensors")}
    assert repository.faults == []
    assert sent == weights_of(checkpoint)
    command(tmp_path / "home", "", "import", checkpoint, tmp_path / "local")
    assert bytes_of(tmp_path / "banks") == bytes_of(tmp_path / "local")


def test_a_hub_that_fails_ends_in_one_line_and_is_gone_on_from(checkpoint, tmp_path):
    dead = [Fault(status=503, after="0")] * 400
    repository = Repository(checkpoint, faults=[*[Fault(cut=10**9)] * 40, *dead])
    with running({"org/tiny": repository}) as hub:
        words = ("import", "org/tiny", tmp_path / "banks", "--stream", "--resume")
        done = command(tmp_path / "home", hub.url, *words, code=2)
        assert "could not be read, the hub answered with status 503, 6 times in a row" in done.stderr
        assert not (tmp_path / "banks").exists()
        first = sum(size for name, size in hub.sent.items() if name.endswith(".safetensors"))
        repository.faults.clear()
        hub.sent.clear()
        command(tmp_path / "home", hub.url, *words)
        second = sum(size for name, size in hub.sent.items() if name.endswith(".safetensors"))
    total = sum(weights_of(checkpoint).values())
    assert first > 0.05 * total
    assert second < total
    command(tmp_path / "home", "", "import", checkpoint, tmp_path / "local")
    assert bytes_of(tmp_path / "banks") == bytes_of(tmp_path / "local")


def test_the_token_goes_to_the_hub_and_nowhere_else(checkpoint, tmp_path):
    with (
        running({"org/tiny": Repository(checkpoint)}) as storage,
        running({"org/tiny": Repository(checkpoint, token=TOKEN, storage=storage.url)}) as hub,
    ):
        words = ("import", "org/tiny", tmp_path / "banks", "--stream")
        done = command(tmp_path / "home", hub.url, *words, "--token", TOKEN)
        assert {authorization for _, _, authorization in storage.requests} == {None}
        asked = {authorization for _, path, authorization in hub.requests if "org/tiny" in path}
        assert asked == {f"Bearer {TOKEN}"}
        assert storage.sent == weights_of(checkpoint)
        assert TOKEN not in done.stdout + done.stderr
        assert all(TOKEN.encode() not in data for data in bytes_of(tmp_path).values())
        refused = command(tmp_path / "other", hub.url, "import", "org/tiny", tmp_path / "no", "--stream", code=2)
        assert "it is private (401)" in refused.stderr


def test_a_hub_without_ranges_is_refused(checkpoint, tmp_path):
    with running({"org/tiny": Repository(checkpoint, ranges=False)}) as hub:
        done = command(tmp_path / "home", hub.url, "import", "org/tiny", tmp_path / "banks", "--stream", code=2)
    assert "sends model-" in done.stderr
    assert "go without --stream" in done.stderr
    assert not (tmp_path / "banks").exists()


def test_what_cannot_be_streamed_says_why(checkpoint, tmp_path):
    done = command(tmp_path / "home", "", "import", checkpoint, tmp_path / "banks", "--stream", code=2)
    assert "it is a local directory; go without --stream" in done.stderr
    done = command(tmp_path / "home", "", "import", "org/tiny", tmp_path / "banks", "--stream", "--offline", code=2)
    assert "offline mode is on; go without --stream" in done.stderr


def test_an_index_that_names_what_the_hub_has_not(checkpoint, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for path in checkpoint.iterdir():
        if not path.name.endswith("00002.safetensors"):
            (source / path.name).write_bytes(path.read_bytes())
    with running({"org/tiny": Repository(source)}) as hub:
        done = command(tmp_path / "home", hub.url, "import", "org/tiny", tmp_path / "banks", "--stream", code=2)
    assert "shard model-00002-of-00002.safetensors: found not in the repository" in done.stderr


def test_the_shards_of_the_index_are_fetched_and_no_other_weights(checkpoint, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    (source / "consolidated.safetensors").write_bytes(b"the same weights once more")
    with running({"org/tiny": Repository(source)}) as hub:
        command(tmp_path / "home", hub.url, "import", "org/tiny", tmp_path / "banks", "--unverified", "--quiet")
    fetched = {name: size for name, size in hub.sent.items() if name.endswith(".safetensors")}
    assert len(fetched) == 2
    assert fetched == weights_of(checkpoint)


@pytest.mark.parametrize("how", [(), ("--stream",)], ids=["fetched", "streamed"])
def test_an_index_never_leads_to_another_repository(checkpoint, tmp_path, how):
    """The token that opens one repository is not sent for a file of another, which the index of the first names."""
    source, shard = tmp_path / "source", "../../../org/secret/resolve/main/x.safetensors"
    shutil.copytree(checkpoint, source)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = shard
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with running({"org/tiny": Repository(source), "org/secret": Repository(checkpoint, token=TOKEN)}) as hub:
        words = ("import", "org/tiny", tmp_path / "banks", *how, "--token", TOKEN)
        done = command(tmp_path / "home", hub.url, *words, code=2)
    assert repr(shard) in done.stderr
    assert "plain file name" in done.stderr
    assert hub.requests
    assert not [path for _, path, _ in hub.requests if "secret" in path or ".." in path]
    assert not (tmp_path / "banks").exists()


def test_inspecting_by_ranges_reads_headers_alone(checkpoint, tmp_path):
    with running({"org/tiny": Repository(checkpoint)}) as hub:
        done = command(tmp_path / "home", hub.url, "inspect", "org/tiny", "--stream", "--json")
        sent = sum(size for name, size in hub.sent.items() if name.endswith(".safetensors"))
    assert json.loads(done.stdout)["problems"] == []
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in checkpoint.glob("*.safetensors"))
    assert sent == headers


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: x, [(0, 800_000)]),
        (lambda x: x.T, [(0, 800_000)]),
        (lambda x: x[:, ::-1], [(0, 800_000)]),
        (lambda x: x[3:5], [(0, 160_000)]),
        (lambda x: x[:, 1000:1010], [(0, 720_080)]),
        (lambda x: x.reshape(2, 5, 10_000)[:, :1], [(0, 80_000), (400_000, 480_000)]),
        (lambda x: x.reshape(2, 5, 10_000)[:, :1].transpose(2, 0, 1), [(0, 80_000), (400_000, 480_000)]),
        (
            lambda x: x[::2, :10],
            [(0, 80), (160_000, 160_080), (320_000, 320_080), (480_000, 480_080), (640_000, 640_080)],
        ),
    ],
)
def test_runs_are_where_elements_lie(make, expected):
    array = make(np.zeros((10, 10_000), np.float64))
    if array.shape == (10, 10):
        expected = [(row * 80_000, row * 80_000 + 80) for row in range(10)]
    assert runs(array) == expected
