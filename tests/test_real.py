"""The whole way on real weights: Gemma 3 270M through the command (`make real` builds it and runs this).

The directory is named by DEWCONV_GEMMA3_270M.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

PROMPT = "The capital of France is"
NEW = 64


@pytest.fixture(scope="module")
def source():
    path = os.environ.get("DEWCONV_GEMMA3_270M")
    if not path:
        pytest.skip("DEWCONV_GEMMA3_270M names no checkpoint: run `make real`")
    return Path(path)


@pytest.fixture(scope="module")
def banks(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("real") / "banks"
    run("import", source, out)
    return out


def run(*words, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "dewconv", *map(str, words), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_check_passes_past_the_window(banks, source, dtype, tmp_path):
    report = run("verify", banks, "--against", source, "--tokens", 640, "--dtype", dtype, "--report", tmp_path)
    assert report["passed"]
    ran = {check["name"] for check in report["checks"] if check["passed"]}
    assert ran >= {"logits", "logits:unrolled", "layers", "decode", "padding", "greedy", "round_trip"}
    assert ("gradients" if dtype == "float32" else "rounding") in ran
    assert min(report["probe"]["lengths"]) >= 600
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_greedy_text_is_the_references(banks, source):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    ids = AutoTokenizer.from_pretrained(source)(PROMPT, return_tensors="pt")
    theirs = model.generate(**ids, max_new_tokens=NEW, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
    ours = run("generate", banks, "--prompt", PROMPT, "--max-new-tokens", NEW)
    assert ours["tokens"] == theirs


def test_the_export_is_the_source(banks, source, tmp_path):
    from transformers import AutoModelForCausalLM

    run("export", banks, tmp_path / "back")
    names = sorted(path.name for path in source.iterdir() if path.is_file())
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == names
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes(), name
    assert run("diff", source, tmp_path / "back")["equal"]
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
