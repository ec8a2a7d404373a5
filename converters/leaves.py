"""The parameters that banks hold: arrays that alias the files, and codes decoded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ..dew_core.layers import group_layers
from ..families.errors import ConversionError
from ..families.rules import View
from .banks import Banks
from .copying import Part, aligned_empty, default_threads, gather
from .decoding import Coded
from .layout import TOP, file_name, is_part, part_leaf, split_key

Held = np.ndarray | Coded


@dataclass(frozen=True)
class _Stack:
    """The layers of a run, each held by itself."""

    layers: tuple[Held, ...]

    def gather(self, name: str) -> np.ndarray:
        row = self.layers[0]
        view, count = View.of(*row.shape), len(self.layers)
        parts = [Part(view.prepend(at, count), lambda held=held: held) for at, held in enumerate(self.layers)]
        return gather((count, *row.shape), row.dtype, parts, name)


def parameter_path(bank: str, key: str) -> str:
    """The parameter path of a stored tensor: banks under the run's name, a leaf stored by layer under its layer's."""
    below, layer = split_key(key)
    if bank == TOP:
        return key
    return f"{bank}/{key}" if layer is None else f"layers_{layer}/{below}"


def read_banks(banks: Banks, threads: int | None = None) -> dict[str, np.ndarray]:
    """Parameter path -> array. Arrays alias the files where nothing is decoded.

    A run stored layer by layer because only some of its layers are quantised is one array, where decoding leaves all
    of one dtype.
    """
    found: dict[str, Held | _Stack] = {}
    runs: dict[tuple[str, str], dict[int, Held]] = {}
    for bank, key in banks.stored():
        if is_part(key):
            continue
        held = held_leaf(banks, bank, key)
        below, layer = split_key(key)
        if layer is None:
            found[parameter_path(bank, key)] = held
        else:
            runs.setdefault((bank, below), {})[layer] = held
    for (bank, below), held in runs.items():
        ordered = [held[layer] for layer in sorted(held)]
        one_kind = len({(item.dtype, item.shape) for item in ordered}) == 1
        whole = sorted(held) == list(group_layers(bank) or ())
        if one_kind and whole and any(isinstance(item, Coded) for item in ordered):
            found[f"{bank}/{below}"] = _Stack(tuple(ordered))
        else:
            found |= {f"layers_{layer}/{below}": item for layer, item in held.items()}

    def array(item: tuple[str, Held | _Stack]) -> np.ndarray:
        path, held = item
        if isinstance(held, np.ndarray):
            return held
        if isinstance(held, _Stack):
            return held.gather(path)
        decoded = aligned_empty(held.shape, held.dtype)
        held.write(decoded)
        return decoded

    with ThreadPoolExecutor(threads or default_threads()) as pool:
        return dict(zip(found, pool.map(array, found.items()), strict=True))


def held_leaf(banks: Banks, bank: str, key: str) -> Held:
    """What is stored under `key`: an array, or codes and scales as the array they decode to."""
    coding = banks.manifest.coded.get(file_name(bank), {}).get(key)
    if coding is None:
        return banks.array(bank, key)
    below, layer = split_key(key)
    scales = part_leaf(below, "scale") if layer is None else f"{part_leaf(below, 'scale')}@{layer}"
    if not banks.has(bank, scales):
        raise ConversionError(
            f"{banks.path}: {file_name(bank)} holds {key} and not {scales}; import the checkpoint again"
        )
    return coding.array(banks.array(bank, key), banks.array(bank, scales))
