"""The torch side: a checkpoint in its reference class, and everything that is compared with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..converters.source import open_source
from ..dew_core.fields import DecoderFields
from ..dew_core.layers import layer_plan
from ..dew_core.records import MLA
from ..families.errors import ConversionError, Finding, FindingsError
from ..families.family import Family
from .choices import Choices, stacked_keys, stacked_routes
from .fixtures import CORRECTION, architecture, model_class
from .replay import choosing, repeating
from .selection import Selected
from .torch_experts import both_forms, in_memory
from .torch_storage import plain_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WIDER = {"float32": "float64", "bfloat16": "float32", "float16": "float32"}
"""The precision above each compute dtype."""
INDEXER = ".self_attn.indexer."
"""What the names of an indexer's tensors contain."""


@dataclass(frozen=True)
class Routed:
    """What one layer's router chose by itself: experts [B, S, k], and of the reference its logits [B, S, E], float32,
    and the bias [E] it adds to its scores for the choice, None for none."""

    experts: np.ndarray
    logits: np.ndarray | None = None
    bias: np.ndarray | None = None


@dataclass(frozen=True)
class Forward:
    """One forward of either side, float32 numpy: logits [B, S, vocab], and the residual stream [B, S, D] as it
    enters layer 0 and as it leaves each layer, before the final norm (layers + 1 arrays).

    routed: layer -> what its router did, for the layers that have one. selected: layer -> what its indexer did.
    """

    logits: np.ndarray
    streams: tuple[np.ndarray, ...] = ()
    routed: Mapping[int, Routed] = field(default_factory=dict)
    selected: Mapping[int, Selected] = field(default_factory=dict)

    @property
    def routes(self) -> np.ndarray | None:
        """The chosen experts [B, S, layers, k] by decoder layer, as `routed_experts` takes them, dense layers' unread;
        None when no layer routes."""
        return stacked_routes({layer: one.experts for layer, one in self.routed.items()}, len(self.streams) - 1)

    @property
    def choices(self) -> Choices:
        """All that was chosen: experts, and keys."""
        keys = {layer: (one.keys,) for layer, one in self.selected.items()}
        return Choices(self.routes, stacked_keys(keys, len(self.streams) - 1))

    def routes_for(self, fields: DecoderFields) -> Choices | None:
        """What was chosen as far as a decoder of `fields` can repeat it, None where it can nothing of it."""
        mixture, made = fields.mixture, self.choices
        experts, keys = made.experts, made.keys
        if mixture is None or experts is None or experts.shape[2:] != (fields.num_layers, mixture.top_k):
            experts = None
        if keys is None or keys.shape[2] != fields.num_layers or not chooses_keys(fields):
            keys = None
        return None if experts is None and keys is None else Choices(experts, keys)


def chooses_keys(fields: DecoderFields) -> bool:
    """Whether every layer of a decoder attends keys that an indexer chose."""
    kinds = layer_plan(fields).kinds.values()
    return all(isinstance(kind.mixer, MLA) and kind.mixer.indexer is not None for kind in kinds)


@dataclass
class TorchReference:
    """A reference model in one dtype, eager attention, evaluation mode.

    model: the causal model. decoder: its text half, which has `layers`. prefix: the decoder's path in the model.
    """

    model: Any
    decoder: Any
    prefix: str
    dtype: str
    notices: tuple[str, ...] = field(default=())

    @property
    def layers(self) -> int:
        return len(self.decoder.layers)

    def widened(self) -> TorchReference:
        """The same weights computed one precision up, as far as the class lets them: it holds norms and softmax in
        float32. What it differs by is the reference's own rounding."""
        wide = copy.deepcopy(self)
        wide.model.to(getattr(torch, WIDER[self.dtype]))
        return wide

    @contextmanager
    def watching(self) -> Iterator[list[torch.Tensor]]:
        """The residual stream of each forward inside: what enters layer 0, then what leaves each layer."""
        streams: list[torch.Tensor] = []

        def entering(module: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
            streams.append((args[0] if args else kwargs["hidden_states"]).detach())

        def leaving(module: Any, args: tuple, output: Any) -> None:
            streams.append((output[0] if isinstance(output, tuple) else output).detach())

        hooks = [self.decoder.layers[0].register_forward_pre_hook(entering, with_kwargs=True)]
        hooks += [layer.register_forward_hook(leaving) for layer in self.decoder.layers]
        try:
            yield streams
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def routers(self) -> dict[int, Any]:
        """The sparse layers' routers, by layer."""
        return {
            index: layer.mlp.gate
            for index, layer in enumerate(self.decoder.layers)
            if hasattr(getattr(layer, "mlp", None), "experts")
        }

    @property
    def indexers(self) -> dict[int, Any]:
        """The indexers of the layers that have one of their own, by layer."""
        found = {
            index: getattr(getattr(layer, "self_attn", None), "indexer", None)
            for index, layer in enumerate(self.decoder.layers)
        }
        return {index: indexer for index, indexer in found.items() if indexer is not None}

    @contextmanager
    def watching_routers(self) -> Iterator[dict[int, list[Routed]]]:
        """What each sparse layer's router does in every forward inside, by layer: routers return their logits, the
        chosen experts' weights and the experts (transformers 5.24 `Qwen3MoeTopKRouter`, `Glm4MoeTopkRouter`)."""
        routers = self.routers
        found: dict[int, list[Routed]] = {layer: [] for layer in routers}

        def watch(layer: int) -> Any:
            def routing(module: Any, args: tuple, output: Any) -> None:
                # Routers see rows of tokens: the batch's shape is put back by the caller.
                bias = getattr(module, CORRECTION, None)
                found[layer].append(
                    Routed(output[2].numpy(), as_float32(output[0]), None if bias is None else as_float32(bias))
                )

            return routing

        hooks = [router.register_forward_hook(watch(index)) for index, router in routers.items()]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def forward(
        self,
        tokens: np.ndarray,
        positions: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        streams: bool = False,
        packed: bool = False,
        routes: Choices | np.ndarray | None = None,
    ) -> Forward:
        """Logits, and with `streams` the residual stream, of tokens [B, S].

        positions [B, S] default to 0, 1, …; mask [B, S] to all ones. packed: rows hold several documents whose
        positions restart, which transformers reads from the positions when there is no mask. routes: what to take in
        place of the routers' and indexers' own choices (experts [B, S, layers, k] alone, or both).
        """
        ids = torch.from_numpy(np.asarray(tokens, np.int64))
        if positions is None:
            positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        call: dict[str, Any] = {"position_ids": torch.from_numpy(np.array(positions, np.int64)), "use_cache": False}
        if not packed:
            call["attention_mask"] = torch.from_numpy(np.ones(ids.shape) if mask is None else np.asarray(mask)).long()
        given = Choices.of(routes)
        with (
            torch.no_grad(),
            self.watching() as seen,
            self.watching_routers() as routed,
            repeating(self.routers, given.experts),
            choosing(self.indexers, given.keys) as selected,
        ):
            logits = self.model(ids, **call).logits
        if not streams:
            return Forward(as_float32(logits))
        rows = {
            layer: Routed(
                one.experts.reshape(*ids.shape, -1),
                None if one.logits is None else one.logits.reshape(*ids.shape, -1),
                one.bias,
            )
            for layer, (one,) in routed.items()
        }
        keys = {layer: one for layer, (one,) in selected.items()}
        return Forward(as_float32(logits), tuple(map(as_float32, seen)), rows, keys)

    def cached(self, tokens: np.ndarray, prefill: int = 1, routes: Choices | np.ndarray | None = None) -> np.ndarray:
        """Logits [B, S, vocab] of tokens [B, S] through the cache: the first `prefill` at once, then one a step.
        routes as in `forward`."""
        ids = torch.from_numpy(np.asarray(tokens, np.int64))
        batch, length = ids.shape
        parts, cache = [], None
        pieces = [(0, prefill), *((i, i + 1) for i in range(prefill, length))]
        for start, stop in pieces:
            taken = Choices.of(routes).columns(start, stop, stop)
            with torch.no_grad(), repeating(self.routers, taken.experts), choosing(self.indexers, taken.keys):
                out = self.model(
                    ids[:, start:stop],
                    position_ids=torch.arange(start, stop)[None].expand(batch, -1),
                    attention_mask=torch.ones(batch, stop, dtype=torch.long),
                    cache=cache,
                    use_cache=True,
                )
            cache = out.cache
            parts.append(out.logits)
        return as_float32(torch.cat(parts, dim=1))

    def greedy(self, prompt: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`count` greedy tokens [B, count] after prompt [B, S], through `generate`, and the logits [B, count, vocab]
        they were taken from. No end of sequence stops it."""
        ids = torch.from_numpy(np.asarray(prompt, np.int64))
        settings = self.model.generation_config
        kept = settings.eos_token_id, settings.do_sample
        settings.eos_token_id, settings.do_sample = None, False
        try:
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                top_k=None,
                top_p=None,
                return_dict_in_generate=True,
                output_logits=True,
            )
        finally:
            settings.eos_token_id, settings.do_sample = kept
        return out.sequences[:, ids.shape[1] :].numpy(), as_float32(torch.stack(out.logits, dim=1))

    def gradients(self, tokens: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        """The mean next-token cross entropy of tokens [B, S] and its gradient for every weight, by the rules' names
        (`model.…`, `lm_head.weight`; a tied head's is its table's; fused experts' both fused and by expert)."""
        ids = torch.from_numpy(np.asarray(tokens, np.int64))
        self.model.zero_grad(set_to_none=True)
        positions = torch.arange(ids.shape[1])[None].expand(ids.shape[0], -1)
        mask = torch.ones_like(ids)
        logits = self.model(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
        loss = next_token_loss(logits, ids)
        loss.backward()
        gradients = {name: as_float32(weight.grad) for name, weight in self.weights() if weight.grad is not None}
        # The choice of keys has no gradient, and an indexer makes nothing else.
        gradients |= {
            name: np.zeros(weight.shape, np.float32)
            for name, weight in self.weights()
            if weight.grad is None and INDEXER in name
        }
        self.model.zero_grad(set_to_none=True)
        # A router's correction bias is a buffer, which the loss does not reach.
        gradients |= {
            f"model.{name}": np.zeros(buffer.shape, np.float32)
            for name, buffer in self.decoder.named_buffers()
            if name.endswith(CORRECTION)
        }
        return float(loss.detach()), both_forms(gradients)

    def weights(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The decoder's parameters by the rules' names."""
        for name, parameter in self.decoder.named_parameters():
            yield f"model.{name}", parameter
        head = self.model.get_output_embeddings()
        if head is not None and head.weight is not self.model.get_input_embeddings().weight:
            yield "lm_head.weight", head.weight

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding table, as the loaded model has it."""
        return self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy, float64, of tokens [B, S] after the first given logits [B, S, vocab].

    In float64 whatever the model computes in: torch 2.13's float32 log_softmax on a CPU sums a row in few
    accumulators, and over Gemma's 262144 logits its probabilities sum to 1 - 8e-5, hundreds of roundings of the
    model itself, in every gradient.
    """
    return torch.nn.functional.cross_entropy(logits[:, :-1].double().flatten(0, 1), tokens[:, 1:].flatten())


def as_float32(tensor: torch.Tensor) -> np.ndarray:
    """A tensor of any dtype as float32 numpy."""
    return tensor.detach().float().cpu().numpy()


def carried_names(directory: str | Path, family: Family, config: Mapping[str, Any]) -> set[str]:
    """The tensors in `directory` that the family carries of a decoder, by the names transformers has for them."""
    prefixes = tuple(item.prefix for item in family.carried(family.canonical(config).text))
    if not prefixes:
        return set()
    return {in_memory(name) for name in open_source(directory).tensors if name.startswith(prefixes)}


def class_config(kind: Any, config: Mapping[str, Any]) -> Any:
    """The config a class loads with when config.json calls its model by another name (`kimi_k2`, DeepSeek V3 in all but
    name), None when it does not. transformers chooses the renaming of a checkpoint's tensors by that name."""
    own = kind.config_class.model_type
    if config.get("model_type", own) == own:
        return None
    return kind.config_class.from_dict({**config, "model_type": own})


def load_reference(directory: str | Path, family: Family, config: Mapping[str, Any], dtype: str) -> TorchReference:
    """The checkpoint in `directory` in its reference class, computing in `dtype`.

    from_pretrained casts weights and leaves rotary frequencies in float32 (`model.to(bfloat16)` would not), which
    is checked. Raises FindingsError when transformers finds tensors missing, unexpected or of another shape. What
    the family carries and does not compute (prediction depths) may be unexpected, tensor by tensor: transformers
    ignores it by layer numbers of the releases, which other depths do not have. Quantised weights are decoded first
    (`torch_storage`).
    """
    where, _, name = family.reference.partition(":")
    if where == "transformers":
        kind: Any = model_class(architecture(config, family))
    elif where == "dewconv":
        module, _, attribute = name.rpartition(".")
        kind = getattr(import_module(f"dewconv.{module}"), attribute)
    else:
        raise ConversionError(f"the reference {family.reference!r} is neither transformers:Class nor dewconv:…")
    with plain_checkpoint(directory, config) as (plain, plain_config):
        model, info = kind.from_pretrained(
            str(plain),
            config=class_config(kind, plain_config),
            dtype=DTYPES[dtype],
            attn_implementation="eager",
            # The grouped kernels ask for sizes that are multiples of 16.
            experts_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        carried = carried_names(plain, family, config)
    findings = [
        Finding(f"tensor {key!r}", f"{problem} by transformers", "none", "the checkpoint does not load as it stands")
        for problem, keys in (
            ("found missing", info["missing_keys"]),
            ("found unexpected", info["unexpected_keys"]),
            ("found of another shape", info["mismatched_keys"]),
        )
        for key in sorted(map(str, keys))
        if not (problem == "found unexpected" and key in carried)
    ]
    if findings:
        raise FindingsError(str(directory), findings)
    for buffer_name, buffer in model.named_buffers():
        if "inv_freq" in buffer_name and buffer.dtype != torch.float32:
            raise ConversionError(f"transformers holds {buffer_name} in {buffer.dtype}; parity needs it in float32")
    model.eval()
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    return TorchReference(model, decoder, prefix, dtype)
