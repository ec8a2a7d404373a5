"""Make the checkpoint in examples/tiny-qwen3: a Qwen3 of 100 thousand parameters that has learned a few sentences.

bfloat16, a tied head, a byte-level tokenizer without merges. The weights are trained from seeded values, so that
none of them is neutral and greedy decoding has something to say. Another torch build or processor may round
differently and write other bytes; the committed file is the one the demo and the tests use.

    python examples/make_tiny_qwen3.py examples/tiny-qwen3
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import Qwen3Config, Qwen3ForCausalLM

SENTENCES = (
    "A bank holds one array per parameter of a run, with the layers stacked on axis 0.",
    "A rule is a view of a tensor and a view of a parameter, and it reads both ways.",
    "Import moves elements and never does arithmetic on them.",
    "Export gives back every tensor, name, dtype and byte.",
    "The same weights give the same numbers in torch and in JAX.",
)
STEPS = 400
END, START = "<|end|>", "<|start|>"


def tokenizer() -> Tokenizer:
    """A token per byte, and two special tokens; a text is encoded with START before it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    start = made.token_to_id(START)
    made.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", pair=f"{START} $A {START} $B", special_tokens=[(START, start)]
    )
    return made


def config(letters: Tokenizer) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=264,  # some rows more than the tokenizer has entries, as released checkpoints have
        hidden_size=48,
        intermediate_size=112,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=letters.token_to_id(START),
        eos_token_id=letters.token_to_id(END),
    )


def rows(letters: Tokenizer) -> torch.Tensor:
    """The sentences as rows [N, S] of START, the text, END; padded with -100."""
    end = letters.token_to_id(END)
    texts = [torch.tensor([*letters.encode(sentence).ids, end]) for sentence in SENTENCES]
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)


def train(model: Qwen3ForCausalLM, tokens: torch.Tensor) -> float:
    """Learn the rows of `tokens`; returns the last loss."""
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.data.add_(0.2 * torch.randn(weight.shape))
    # Smoothed labels and decay keep the function smooth: a memorised text alone ends in weights that amplify rounding.
    steps = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.3)
    rate = torch.optim.lr_scheduler.OneCycleLR(steps, max_lr=4e-3, total_steps=STEPS)
    inputs, loss = tokens.clamp(min=0), torch.zeros(())
    for _ in range(STEPS):
        logits = model(input_ids=inputs).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), label_smoothing=0.1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        rate.step()
        steps.zero_grad()
    return loss.item()


def make(out: Path) -> None:
    """Write the checkpoint to `out`."""
    torch.set_num_threads(1)
    torch.manual_seed(20)
    letters = tokenizer()
    model = Qwen3ForCausalLM(config(letters))
    loss = train(model, rows(letters))
    model.to(torch.bfloat16).save_pretrained(out)
    letters.save(str(out / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START,
        "eos_token": END,
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
    print(f"{out}: {model.num_parameters()} parameters, loss {loss:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    make(parser.parse_args().out)
