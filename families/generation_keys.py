"""The generation and task settings that transformers 4 wrote into every config.json it saved."""

from __future__ import annotations

from .fields import Config, Line, Unreadable, inert, via


def generation_keys() -> tuple[Line, ...]:
    """The keys of transformers 4 `PretrainedConfig` beside `blocks.bookkeeping`'s, as a config that states every
    default has them (Kimi K2.5's text_config). Those that would make another model must be off."""

    def off(key: str, why: str) -> Line:
        def read(config: Config) -> dict[str, object]:
            if config.get(key):
                raise Unreadable(key, config[key], "nothing, or false", why)
            return {}

        return via((key,), read, lambda d: {}, why)

    return (
        inert(
            "bad_words_ids",
            "begin_suppress_tokens",
            "diversity_penalty",
            "do_sample",
            "early_stopping",
            "encoder_no_repeat_ngram_size",
            "exponential_decay_length_penalty",
            "length_penalty",
            "max_length",
            "min_length",
            "no_repeat_ngram_size",
            "num_beam_groups",
            "num_beams",
            "num_return_sequences",
            "output_scores",
            "prefix",
            "remove_invalid_values",
            "repetition_penalty",
            "return_dict_in_generate",
            "suppress_tokens",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
            why="how text is generated, not what the model computes",
        ),
        inert("tokenizer_class", why="names a tokenizer"),
        inert("tf_legacy_loss", "torchscript", "use_bfloat16", why="other frameworks' switches"),
        off("cross_attention_hidden_size", "a decoder-only model does not cross-attend"),
        off("pruned_heads", "pruned heads are not supported"),
        off("tie_encoder_decoder", "a decoder-only model"),
    )
