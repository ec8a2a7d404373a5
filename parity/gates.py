"""Gates G0 and G1: released configs and released tensor names, closed without any weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..converters.closing import choose_spelling, close, respell_statements
from ..converters.codecs import Logical
from ..families.errors import ConversionError, FindingsError
from ..families.family import Family
from ..families.rules import leaf_shapes
from .decoders import leaf_differences

CONFIGS = "configs"
NAMES = "released_names.json"


def released_configs(family: Family, directory: Path) -> dict[str, dict[str, Any]]:
    """Release -> config.json for each `configs/<org>__<name>.json` under `directory` that is the family's. How its
    weights are quantised is a codec's business: `quantization_config` is a key like another."""
    owned = (*family.model_types, *(family.wrapper.model_types if family.wrapper else ()))
    found = {}
    for path in sorted((directory / CONFIGS).glob("*.json")):
        config = json.loads(path.read_text())
        if config.get("model_type") in owned:
            found[path.stem] = config
    return found


def close_config(family: Family, config: Mapping[str, Any]) -> list[str]:
    """G0 for one config: every key is read, the fields written back are the config, and a config written for the
    fields reads as the same fields. The findings, a line each."""
    try:
        fields, _ = family.read(config)
    except FindingsError as error:
        return [str(finding) for finding in error.findings]
    except ConversionError as error:
        return [str(error)]
    findings = []
    rewritten = family.rewrite(config, fields)
    if rewritten != dict(config):
        keys = sorted(key for key in {*config, *rewritten} if config.get(key) != rewritten.get(key))
        findings.append(f"config keys written back otherwise than they were read: {', '.join(keys)}")
    again, _ = family.read(family.write(fields))
    if again != fields:
        before, after = fields.to_json(), again.to_json()
        names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        findings.append(f"decoder fields that do not survive being written as a config: {', '.join(names)}")
    return findings


def released_names(family: Family, directory: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Release -> tensor name -> shape, from `released_names.json` under `directory`: lists taken from the releases'
    published layouts, with sizes stated there and no rule of the family used.

    A family's lists: `top`; `layer`, of every layer; `dense`, of a release's first `dense` layers, and `sparse`, of
    the others, with `{e}` for every expert; `indexer`, of those not among a release's `sharing` layers; `depth`, of the
    release's `depths` layers past the last. A release is `without` some of them.
    """
    table = json.loads((directory / NAMES).read_text()).get(family.name)
    if table is None:
        return {}
    releases = {}
    for release, record in table["releases"].items():
        sizes, without = record["sizes"], set(record.get("without", ()))
        depths = range(sizes["L"], sizes["L"] + record.get("depths", 0))

        def shape(axes: list[str], sizes: Mapping[str, int] = sizes) -> tuple[int, ...]:
            return tuple(math.prod(sizes[factor] for factor in axis.split("*")) for axis in axes)

        tensors = {record["prefix"] + name: shape(axes) for name, axes in table["top"].items()}
        for layer in range(depths.stop):
            parts = ["layer", "dense" if layer < record.get("dense", 0) else "sparse"]
            parts += ["indexer"] if layer not in record.get("sharing", ()) else []
            names = {name: axes for part in parts for name, axes in table.get(part, {}).items()}
            names |= table["depth"] if layer in depths else {}
            for name, axes in names.items():
                if name not in without:
                    stem = f"{record['prefix']}layers.{layer}."
                    experts = range(sizes["E"]) if "{e}" in name else (0,)
                    tensors |= {stem + name.replace("{e}", str(expert)): shape(axes) for expert in experts}
        if record.get("head"):
            tensors[record["head"]] = shape(["V", "H"])
        tensors |= {name: tuple(axes) for name, axes in record.get("beside", {}).items()}
        releases[release] = tensors
    return releases


def close_names(family: Family, config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> list[str]:
    """G1 for one release: its names and shapes, the rules' and the decoder's own tree are one set. The findings."""
    fields, _ = family.read(config)
    statements = [*family.weights(fields), *family.carried(family.canonical(config).text)]
    logical = {name: Logical(name, "BF16", shape, (name,)) for name, shape in tensors.items()}
    spelling, findings = choose_spelling(family, statements, logical)
    beside = family.wrapper.carried if family.wrapper is not None and "text_config" in config else ()
    closing = close(respell_statements(statements, spelling), beside, logical)
    lines = [str(finding) for finding in (*findings, *closing.findings)]
    if not lines:
        lines += leaf_differences(fields, leaf_shapes(closing.placements))
    return lines
