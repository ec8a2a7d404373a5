"""The real `generate`: what it refuses, what it notes, and what it leaves alone."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401  makes numpy know bfloat16, which load_file asks it for
import numpy as np
import pytest
from hub_server import Repository, running
from safetensors.numpy import load_file, save_file
from test_cli import TINY, as_json, dewconv_command, fails, succeeds
from test_cli_streams import ASCII


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


class TestInput:
    @pytest.mark.parametrize(
        ("option", "value", "said"),
        [
            ("--temperature", "nan", "'nan' is not a finite number"),
            ("--temperature", "inf", "'inf' is not a finite number"),
            ("--temperature", "x", "'x' is not a number"),
            ("--top-p", "nan", "'nan' is not a finite number"),
            ("--top-k", "a", "'a' is not a whole number"),
            ("--max-new-tokens", "1.5", "'1.5' is not a whole number"),
            ("--max-new-tokens", "99999999999", "99999999999 is not in the range 1<=x<="),
        ],
    )
    def test_numbers(self, option: str, value: str, said: str, banks: Path, tmp_path: Path) -> None:
        message = fails("generate", banks, "--prompt", "A", option, value, cwd=tmp_path)
        assert f"Invalid value for '{option}': {said}" in message

    @pytest.mark.parametrize("seed", ["-1", "4294967296", "99999999999999999999", "x"])
    def test_seeds_are_the_same_everywhere(self, seed: str, banks: Path, tmp_path: Path) -> None:
        drawn = fails("generate", banks, "--prompt", "A", "--temperature", "1", "--seed", seed, cwd=tmp_path)
        verified = fails("verify", banks, "--seed", seed, cwd=tmp_path)
        assert "'--seed'" in drawn
        assert drawn.replace("generate", "verify") == verified

    def test_the_last_seed_is_one_of_its_own(self, banks: Path, tmp_path: Path) -> None:
        drawn = ("--prompt", "A", "--temperature", "3", "--max-new-tokens", "24")
        tokens = [
            as_json("generate", banks, *drawn, "--seed", seed, cwd=tmp_path)["tokens"]
            for seed in ("0", "2147483647", "4294967295")
        ]
        assert len(set(map(tuple, tokens))) == 3

    def test_text_is_utf_8_whatever_the_locale(self, banks: Path, tmp_path: Path) -> None:
        arguments = ("generate", banks, "--prompt", "日本", "--stop", "é", "--max-new-tokens", "2")
        plain = as_json(*arguments, cwd=tmp_path)
        assert plain["prompt"] == "日本"
        there = as_json(*arguments, cwd=tmp_path, env=ASCII)
        assert [there[key] for key in ("prompt", "prompt_tokens", "tokens")] == [
            plain[key] for key in ("prompt", "prompt_tokens", "tokens")
        ]
        for option in ("--prompt", "--stop", "--token", "--revision"):
            more = () if option == "--prompt" else ("--prompt", "A")
            message = fails("generate", banks, *more, option, "日本 \udcff", cwd=tmp_path)
            assert f"Invalid value for '{option}': It is not UTF-8 text." in message
        assert "not UTF-8" in fails("verify", banks, "--prompt", "\udcff", cwd=tmp_path)

    def test_more_than_the_memory_holds(self, banks: Path, tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "dewconv", "generate", banks, "--prompt", "A", "--max-new-tokens", str(2**30)],
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30)),
        )
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == "dewconv: out of memory"
        assert "Traceback" not in done.stderr


class TestNotes:
    def test_options_that_change_nothing_are_said(self, banks: Path, tmp_path: Path) -> None:
        arguments = ("generate", banks, "--prompt", "A", "--max-new-tokens", "2")
        idle = ("--top-k", "3", "--top-p", "0.5", "--seed", "1")
        said = succeeds(*arguments, *idle, cwd=tmp_path).stderr.splitlines()
        assert said[0].startswith("note: no effect at temperature 0")
        assert said[0].endswith(": --top-k, --top-p, --seed")
        assert len(said) == 2
        assert succeeds(*arguments, *idle, "--quiet", cwd=tmp_path).stderr == ""
        assert "no effect" not in succeeds(*arguments, *idle, "--temperature", "1", cwd=tmp_path).stderr

    def test_past_the_context(self, banks: Path, tmp_path: Path) -> None:
        """The tiny config states 512 positions; "A" comes to two tokens."""
        for count, said in ((510, False), (511, True)):
            arguments = ("generate", banks, "--prompt", "A", "--max-new-tokens", str(count))
            done = succeeds(*arguments, cwd=tmp_path)
            assert ("the config states 512 (max_position_embeddings)" in done.stderr) is said
            assert "tokens/s" in done.stderr

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_weights_that_are_no_numbers(self, value: float, tmp_path: Path) -> None:
        source = checkpoint(tmp_path / "source")
        tensors = load_file(source / "model.safetensors")
        name = "model.layers.2.mlp.down_proj.weight"
        tensors[name] = tensors[name].copy()
        tensors[name][3, 4] = value
        save_file(tensors, source / "model.safetensors")
        done = succeeds("generate", source, "--prompt", "Im", cwd=tmp_path, code=2)
        # The prompt is shown before the first token is known; what is said begins a line of its own.
        assert done.stdout == "Im\n"
        assert done.stderr == (
            f"dewconv: {source}: the logits of new token 1 are not finite; the weights hold NaN or infinities\n"
        )
