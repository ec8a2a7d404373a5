"""The real command on sources as users have them: read-only, on another disk, oddly named, of thousands of files, with
every dtype and value, and with files beside them that are none of its business."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from hub_server import Repository, running
from test_cli import TINY, as_json, content, fails, succeeds

import dewconv.converters.dtypes as dtypes

ROUTED = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 16},
    "text_config": {
        "model_type": "gemma3_text",
        "vocab_size": 37,
        "hidden_size": 12,
        "intermediate_size": 14,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "sliding_window": 5,
        "query_pre_attn_scalar": 10,
    },
}


def write_shard(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], start: int | None = None
) -> None:
    """A safetensors file written by hand, its data at a byte of remainder `start` by 8."""
    table, data = {}, b""
    for name, (dtype, shape, held) in tensors.items():
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(held)]}
        data += held
    text = json.dumps(table, ensure_ascii=False).encode()
    if start is not None:
        text += b" " * ((start - 8 - len(text)) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def gemma3_shapes() -> dict[str, tuple[int, ...]]:
    layer = {
        "self_attn.q_proj": (20, 12),
        "self_attn.k_proj": (10, 12),
        "self_attn.v_proj": (10, 12),
        "self_attn.o_proj": (12, 20),
        "self_attn.q_norm": (10,),
        "self_attn.k_norm": (10,),
        "mlp.gate_proj": (14, 12),
        "mlp.up_proj": (14, 12),
        "mlp.down_proj": (12, 14),
    }
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    layer |= dict.fromkeys(norms, (12,))
    body = "language_model.model."
    shapes = {f"{body}embed_tokens.weight": (37, 12), f"{body}norm.weight": (12,)}
    return shapes | {f"{body}layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}


def random_bytes(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def there_and_back(source: Path, cwd: Path, banks: str | Path = "banks", back: str | Path = "back") -> None:
    succeeds("import", source, banks, "--unverified", cwd=cwd)
    succeeds("export", banks, back, cwd=cwd)
    assert content(cwd / back) == content(source)


@pytest.mark.parametrize("start", [0, 1, 2, 5])
def test_every_dtype_shape_and_value_wherever_the_data_start(tmp_path: Path, start: int) -> None:
    """Random bits (NaN payloads, -0, infinities, subnormals) in the decoder, and beside it every dtype of the format,
    as scalars, as vectors and with no element."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(ROUTED))
    names = [*dtypes.NUMPY, *dtypes.PACKED_BITS]
    assert len(names) >= 18
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for seed, (name, shape) in enumerate(gemma3_shapes().items()):
        tensors[name] = ("BF16", shape, random_bytes(2 * int(np.prod(shape)), seed))
    for seed, dtype in enumerate(names):
        for kind, shape in {"scalar": (), "vector": (8,), "none": (0, 3), "ones": (1, 1, 8, 1)}.items():
            size = dtypes.nbytes(dtype, shape)
            if size is not None:
                held = random_bytes(size, 1000 + seed)
                tensors[f"vision_tower.{kind}.{dtype} é"] = (dtype, shape, held)
    assert any(shape == () for _, shape, _ in tensors.values())
    write_shard(source / "model.safetensors", tensors, start)
    there_and_back(source, tmp_path)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_special_values_of_every_float_pass_through_the_decoders_own_weights(tmp_path: Path, dtype: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(ROUTED))
    width = dtypes.NUMPY[dtype].itemsize
    kind = {2: "<u2", 4: "<u4", 8: "<u8"}[width]
    exponent = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF << 52}[dtype]
    sign = 1 << (8 * width - 1)
    special = np.array(
        [exponent, exponent | sign, exponent | 1, exponent | 3 | sign, sign, 1, 1 | sign, 0], kind
    )  # infinities, signalling NaNs, -0, subnormals
    tensors = {name: (dtype, shape, np.resize(special, shape).tobytes()) for name, shape in gemma3_shapes().items()} | {
        "vision_tower.x": ("F32", (1,), bytes(4))
    }
    write_shard(source / "model.safetensors", tensors)
    there_and_back(source, tmp_path)


def test_names_of_spaces_and_letters_of_other_scripts(tmp_path: Path) -> None:
    where = tmp_path / "модель 模型 [1] *"
    where.mkdir()
    source = where / "un nom à espaces"
    shutil.copytree(TINY, source)
    (source / "chat template ü.jinja").write_text("{{ x }}")
    (source / "-leading").write_text("dash")
    there_and_back(source, where, "bänke 1", "zurück 2")
    assert as_json("diff", source, "zurück 2", cwd=where)["equal"] is True


def test_a_source_that_cannot_be_written_to(tmp_path: Path) -> None:
    mounted = tmp_path / "read-only"
    mounted.mkdir()
    bound = subprocess.run(["mount", "--bind", TINY, mounted], capture_output=True)
    if bound.returncode == 0:
        subprocess.run(["mount", "-o", "remount,ro,bind", mounted], check=True)
    else:  # without the right to mount: as good as permissions make it
        mounted.rmdir()
        shutil.copytree(TINY, mounted)
        for path in (*mounted.rglob("*"), mounted):
            path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        there_and_back(mounted, tmp_path)
        if bound.returncode == 0:
            message = fails("import", mounted, mounted / "out", "--unverified", cwd=tmp_path)
            assert "overlaps" in message
    finally:
        if bound.returncode == 0:
            subprocess.run(["umount", mounted], check=True)
        else:
            for path in (mounted, *mounted.rglob("*")):
                path.chmod(0o755)


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on another file system than the tests' own."""
    at = tmp_path / "disk"
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", at], capture_output=True)
    if mounted.returncode:
        at = Path("/dev/shm") / f"dewconv-test-{os.getpid()}"
        at.mkdir()
        if at.stat().st_dev == tmp_path.stat().st_dev:
            at.rmdir()
            pytest.skip("there is no other file system")
    yield at
    if mounted.returncode:
        shutil.rmtree(at)
    else:
        subprocess.run(["umount", at], check=True)


def test_out_on_another_disk(tmp_path: Path, other_disk: Path) -> None:
    assert other_disk.stat().st_dev != TINY.stat().st_dev
    there_and_back(TINY, tmp_path, other_disk / "banks", other_disk / "back")
    succeeds("import", TINY, other_disk / "banks", "--unverified", "--overwrite", cwd=tmp_path)
    assert sorted(path.name for path in other_disk.iterdir()) == ["back", "banks"]


def test_out_through_a_link_to_a_directory_on_another_disk(tmp_path: Path, other_disk: Path) -> None:
    (tmp_path / "big").symlink_to(other_disk)
    there_and_back(TINY, tmp_path, "big/banks", "big/back")
    assert (other_disk / "banks" / "dewconv.json").is_file()


FEW = """
import resource, sys
from dewconv.cli import run
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
sys.exit(run(sys.argv[1:]))
"""


def test_ten_thousand_shards_with_a_thousand_open_files(tmp_path: Path) -> None:
    import sys

    source = tmp_path / "source"
    source.mkdir()
    config = {key: value for key, value in ROUTED["text_config"].items() if key != "num_hidden_layers"}
    layers = 769
    config |= {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": layers, "hidden_size": 4, "head_dim": 2}
    config |= {"intermediate_size": 4, "vocab_size": 8, "query_pre_attn_scalar": 2}
    (source / "config.json").write_text(json.dumps(config))
    layer = {
        "self_attn.q_proj": (4, 4),
        "self_attn.k_proj": (2, 4),
        "self_attn.v_proj": (2, 4),
        "self_attn.o_proj": (4, 4),
        "self_attn.q_norm": (2,),
        "self_attn.k_norm": (2,),
        "mlp.gate_proj": (4, 4),
        "mlp.up_proj": (4, 4),
        "mlp.down_proj": (4, 4),
    }
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    layer |= dict.fromkeys(norms, (4,))
    shapes = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,), "lm_head.weight": (8, 4)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in layer.items()}
    assert len(shapes) == 10_000
    weight_map = {}
    for number, (name, shape) in enumerate(shapes.items(), 1):
        shard = f"model-{number:05d}-of-{len(shapes):05d}.safetensors"
        write_shard(source / shard, {name: ("BF16", shape, random_bytes(2 * int(np.prod(shape)), number))})
        weight_map[name] = shard
    index = {"metadata": {}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    for arguments in (("import", source, "banks", "--unverified", "--bank-layers", "400"), ("export", "banks", "back")):
        command = [sys.executable, "-c", FEW, *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert content(tmp_path / "back") == content(source)


class TestHubCache:
    """A hub cache's folders, given as directories."""

    @pytest.fixture
    def repository(self, tmp_path: Path) -> Path:
        root = tmp_path / "hub" / "models--org--tiny"
        for number, commit in enumerate(("a" * 40, "b" * 40)):
            snapshot = root / "snapshots" / commit
            snapshot.mkdir(parents=True)
            (root / "blobs").mkdir(exist_ok=True)
            for at, path in enumerate(sorted(TINY.iterdir())):
                blob = root / "blobs" / f"{1000 * number + at:064x}"
                shutil.copy(path, blob)
                (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text("a" * 40)
        return root

    def test_the_repository_folder_means_its_main_snapshot(self, repository: Path, tmp_path: Path) -> None:
        made = as_json("import", repository, "banks", "--unverified", cwd=tmp_path)
        assert made["source"]["repo"] == "org/tiny"
        assert made["source"]["revision"] == "a" * 40
        succeeds("export", "banks", "back", cwd=tmp_path)
        assert content(tmp_path / "back") == content(TINY)
        named = as_json("import", repository, "other", "--revision", "b" * 40, "--unverified", cwd=tmp_path)
        assert named["source"]["revision"] == "b" * 40
        message = fails("import", repository, "none", "--revision", "c" * 40, cwd=tmp_path)
        assert "a" * 40 in message

    def test_links_in_the_bank_directory_are_none(self, repository: Path, tmp_path: Path) -> None:
        succeeds("import", repository / "snapshots" / ("a" * 40), "banks", "--unverified", cwd=tmp_path)
        assert not any(path.is_symlink() for path in (tmp_path / "banks").rglob("*"))

    def test_a_download_that_did_not_finish(self, repository: Path, tmp_path: Path) -> None:
        snapshot = repository / "snapshots" / ("a" * 40)
        blob = (snapshot / "model.safetensors").resolve()
        blob.rename(blob.with_suffix(".incomplete"))
        message = fails("import", repository, "banks", "--unverified", cwd=tmp_path)
        assert "model.safetensors" in message
        assert "does not exist" in message
        assert not (tmp_path / "banks").exists()


class TestAllFiles:
    """What of a directory comes along, with and without being asked to."""

    LEFT = ("model.gguf", "onnx/model.onnx", "consolidated.safetensors", "other.safetensors.index.json")
    WEIGHTS = ("model.gguf", "onnx/model.onnx", "consolidated.safetensors")
    NEVER = ("modeling_x.py", "evil.bin", "evil.pt", "array.npy", "run.sh", ".git/config", "link.txt", "dir/link.gguf")

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        source = tmp_path / "source"
        shutil.copytree(TINY, source)
        outside = tmp_path / "secret.txt"
        outside.write_text("secret")
        for name in (*self.LEFT, *self.NEVER):
            (source / name).parent.mkdir(exist_ok=True)
            if "link" in name:
                (source / name).symlink_to(outside)
            else:
                (source / name).write_bytes(name.encode())
        return source

    def test_nothing_but_the_checkpoint_unasked(self, source: Path, tmp_path: Path) -> None:
        done = succeeds("import", source, "banks", "--unverified", cwd=tmp_path)
        succeeds("export", "banks", "back", cwd=tmp_path)
        assert content(tmp_path / "back") == content(TINY)
        for name in (*self.LEFT, "modeling_x.py"):
            assert name in done.stderr

    def test_on_request_what_is_neither_code_nor_pickle_nor_behind_a_link(self, source: Path, tmp_path: Path) -> None:
        made = as_json("import", source, "banks", "--all-files", "--unverified", cwd=tmp_path)
        assert set(made["side_files"]) >= set(self.LEFT)
        succeeds("export", "banks", "back", cwd=tmp_path)
        wanted = content(TINY) | {name: name.encode() for name in self.LEFT}
        assert content(tmp_path / "back") == wanted
        held = content(tmp_path / "banks")
        assert not any(name.endswith(self.NEVER) or b"secret" in data for name, data in held.items())
        (tmp_path / "banks" / "source" / "model.gguf").write_bytes(b"model.gguF")
        assert "source/model.gguf" in fails("export", "banks", "again", cwd=tmp_path)

    def test_of_a_hub_id_they_are_fetched(self, source: Path, tmp_path: Path) -> None:
        for path in (source / "link.txt", source / "dir" / "link.gguf"):
            path.unlink()
        imported = ("import", "org/tiny", "banks", "--all-files", "--unverified")
        with running({"org/tiny": Repository(source)}) as hub:
            env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
            plain = as_json("import", "org/tiny", "plain", "--unverified", cwd=tmp_path, env=env)
            assert not set(plain["side_files"]) & set(self.LEFT)
            assert not set(hub.sent) & {*self.WEIGHTS, *self.NEVER}
            assert "--stream" in fails(*imported, "--stream", cwd=tmp_path, env=env)
            assert set(as_json(*imported, cwd=tmp_path, env=env)["side_files"]) >= set(self.LEFT)
            assert not set(hub.sent) & set(self.NEVER)
        shutil.rmtree(tmp_path / "banks")
        assert set(as_json(*imported, cwd=tmp_path)["side_files"]) >= set(self.LEFT), "from the cache, offline"
        succeeds("export", "banks", "back", cwd=tmp_path)
        assert content(tmp_path / "back") == content(TINY) | {name: name.encode() for name in self.LEFT}

    def test_a_plan_says_which(self, source: Path, tmp_path: Path) -> None:
        plain = as_json("import", source, "x", "--dry-run", "--unverified", cwd=tmp_path)
        full = as_json("import", source, "x", "--dry-run", "--all-files", "--unverified", cwd=tmp_path)
        assert {item["file"] for item in plain["skipped"]} - {item["file"] for item in full["skipped"]} == set(
            self.LEFT
        )
