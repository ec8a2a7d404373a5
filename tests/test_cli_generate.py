"""The real `generate`: what it refuses, what it notes, and what it leaves alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hub_server import Repository, running
from test_cli import TINY, dewconv_command, fails, succeeds


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("banks")
    succeeds("import", TINY, "out", "--unverified", cwd=where)
    return where / "out"


def checkpoint(to: Path, but: tuple[str, ...] = ()) -> Path:
    """The tiny checkpoint without some of its files."""
    shutil.copytree(TINY, to, ignore=shutil.ignore_patterns(*but))
    return to


def spelled_out(to: Path) -> Path:
    """The tiny checkpoint with its tokenizer as vocab.json and merges.txt, which transformers reads."""
    checkpoint(to, ("tokenizer*",))
    model = json.loads((TINY / "tokenizer.json").read_text())["model"]
    (to / "vocab.json").write_text(json.dumps(model["vocab"]))
    (to / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in model["merges"]))
    (to / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    return to


class TestTokenizer:
    def test_a_directory_is_never_asked_of_the_hub(self, banks: Path, tmp_path: Path) -> None:
        """The hub has a repository by the name that the directory's path is: its tokenizer is another's."""
        copied = tmp_path / "a"
        shutil.copytree(banks, copied)
        shutil.rmtree(copied / "source")
        checkpoint(tmp_path / "org" / "bare", ("tokenizer*",))
        spelled_out(tmp_path / "org" / "spelled")
        (tmp_path / "org" / "named").mkdir()
        shutil.copy(TINY / "config.json", tmp_path / "org" / "named")
        names = ("a/source", "org/bare", "org/spelled", "org/named")
        with running({name: Repository(TINY) for name in names}) as hub:
            env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url}
            message = fails("generate", "a", "--prompt", "Im", cwd=tmp_path, lines=5, env=env)
            assert "source/tokenizer.json: found no such file" in message
            message = fails("generate", "org/bare", "--prompt", "Im", cwd=tmp_path, env=env)
            assert message == (
                "dewconv: org/bare: has no tokenizer (no tokenizer.json, tokenizer.model, vocab.json or the like)\n"
            )
            succeeds("generate", "org/spelled", "--prompt", "Im", "--max-new-tokens", "2", cwd=tmp_path, env=env)
            assert "no weights" in fails("generate", "org/named", "--prompt", "Im", cwd=tmp_path, env=env)
            assert hub.requests == []
            assert dewconv_command("inspect", "org/bare2", cwd=tmp_path, env=env).returncode == 2
            assert hub.requests

    def test_code_is_not_run(self, tmp_path: Path) -> None:
        source = checkpoint(tmp_path / "source", ("tokenizer*",))
        (source / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["mine.Mine", None]}}))
        (source / "mine.py").write_text("open('ran', 'w')\nclass Mine: pass\n")
        (source / "tiktoken.model").write_bytes(b"IQ== 0\n")
        assert "code of the checkpoint, which is never run" in fails("generate", source, "--prompt", "A", cwd=tmp_path)
        assert not (tmp_path / "ran").exists()

    def test_weights_come_first(self, tmp_path: Path) -> None:
        source = checkpoint(tmp_path / "source", ("tokenizer*", "model.safetensors"))
        message = fails("generate", source, "--prompt", "A", cwd=tmp_path)
        assert "no weights" in message
        assert "tokenizer" not in message
