"""The parameters that banks hold: arrays that alias the files, and codes decoded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..dew_core.layers import group_layers
from ..families.errors import ConversionError
from .banks import Banks
from .copying import default_threads
from .decoding import Coded
from .layout import TOP, file_name, is_part, part_leaf, split_key
from .regions import Parameter, stacked_parameter, stored_parameter

Held = np.ndarray | Coded


def parameter_path(bank: str, key: str) -> str:
    """The parameter path of a stored tensor: banks under the run's name, a leaf stored by layer under its layer's."""
    below, layer = split_key(key)
    if bank == TOP:
        return key
    return f"{bank}/{key}" if layer is None else f"layers_{layer}/{below}"


def read_banks(banks: Banks, threads: int | None = None) -> dict[str, np.ndarray]:
    """Parameter path -> array. Arrays alias the files where nothing is decoded."""
    found = bank_parameters(banks)
    with ThreadPoolExecutor(threads or default_threads()) as pool:
        return dict(zip(found, pool.map(Parameter.whole, found.values()), strict=True))


def bank_parameters(banks: Banks) -> dict[str, Parameter]:
    """Parameter path -> parameter; nothing is read yet.

    A run stored layer by layer because only some of its layers are quantised is one array, where decoding leaves all
    of one dtype.
    """
    found: dict[str, Parameter] = {}
    runs: dict[tuple[str, str], dict[int, Held]] = {}
    for bank, key in banks.stored():
        if is_part(key):
            continue
        held = held_leaf(banks, bank, key)
        below, layer = split_key(key)
        if layer is None:
            found[parameter_path(bank, key)] = stored_parameter(held)
        else:
            runs.setdefault((bank, below), {})[layer] = held
    for (bank, below), held in runs.items():
        ordered = [held[layer] for layer in sorted(held)]
        one_kind = len({(item.dtype, item.shape) for item in ordered}) == 1
        whole = sorted(held) == list(group_layers(bank) or ())
        if one_kind and whole and any(isinstance(item, Coded) for item in ordered):
            found[f"{bank}/{below}"] = stacked_parameter(ordered)
        else:
            found |= {f"layers_{layer}/{below}": stored_parameter(item) for layer, item in held.items()}
    return found


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
    return coding.array(banks.array(bank, key), banks.array(bank, scales), f"{bank}: {key}")
