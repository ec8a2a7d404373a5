"""Every key of a tiny config of each family under values of the wrong JSON type, looked at as an import does."""

import copy
import json

import pytest

from dewconv.converters.inspection import inspect_source
from dewconv.converters.plan import find_family, source_codec
from dewconv.converters.source import open_source
from dewconv.families import ConversionError, find
from dewconv.families.fields import shown
from dewconv.families.registry import families

WRONG = ("words", [], [1], {}, {"a": 1}, True, -1, 0.5, 10**30, 10**400, float("inf"), float("nan"), None)
ALSO = ("dtype", "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters", "layer_types", "quantization_config")
INTERNAL = ("Error", "object is not", "unsupported operand", "argument", "sequence element", "<class", "NoneType")


def paths(config, before=()):
    for key, value in config.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


def looked_at(directory, config):
    """(decoder fields, problems) of a config on its own; what ends the reading earlier is a problem."""
    (directory / "config.json").write_text(json.dumps(config))
    try:
        source = open_source(directory)
        family, _ = find_family(source)
        source_codec(source)
        reading = family.examine(source.config)
    except ConversionError as error:
        return None, [str(error)]
    return reading.values, [str(finding) for finding in reading.findings]


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_a_wrong_type_is_told_by_its_key_or_changes_nothing(family, tmp_path):
    """A value of another type is refused in a line that names its key, or changes nothing of the decoder."""
    by_keys = sorted(family.variants.values(), key=lambda variant: len(list(paths(dict(variant.config)))))
    for variant in (by_keys[0], by_keys[-1]):
        whole = json.loads(json.dumps(dict(variant.config)))
        reference, problems = looked_at(tmp_path, whole)
        assert problems == []
        for path in dict.fromkeys((*paths(whole), *((key,) for key in ALSO))):
            for value in WRONG:
                config = copy.deepcopy(whole)
                holder = config
                for key in path[:-1]:
                    holder = holder[key]
                stated = holder.get(path[-1])
                holder[path[-1]] = value
                decoder, problems = looked_at(tmp_path, config)
                told = f"{family.name} {'.'.join(path)} = {value!r:.40}: {problems}"
                for problem in problems:
                    assert not any(phrase in problem for phrase in INTERNAL), told
                    assert len(problem) < 1000, told
                if isinstance(value, float) and value != value:
                    assert problems == [f"{tmp_path}: config.json: holds NaN, which is no value a config can have"], (
                        told
                    )
                elif problems:
                    # A member of the old rope_scaling is named as transformers 5 spells it.
                    names = {*path, *(("rope_parameters",) if "rope_scaling" in path else ())}
                    names |= {f"{key!r}" for key in value} if isinstance(value, dict) else set()
                    assert any(name in problem for problem in problems for name in names), told
                elif value in ("words", {"a": 1}) or (value is True and not isinstance(stated, bool)):
                    assert decoder == reference, told


@pytest.mark.parametrize("digits", [5000])
def test_a_number_longer_than_python_reads_is_no_traceback(digits, tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": ' + "9" * digits + "}")
    with pytest.raises(ConversionError, match=r"config\.json: is not valid JSON"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("dtype", "bf17", "one of bfloat16"),
        ("torch_dtype", 16, "one of bfloat16"),
        ("rope_parameters", "yarn", "an object or null"),
        ("rope_scaling", [4.0], "an object or null"),
        ("rope_theta", "1e6", "a finite number above 0"),
        ("text_config", "qwen3", "an object"),
        ("vocab_size", 2**31, "at most 2147483647"),
    ],
)
def test_what_is_needed_is_said(tiny, tmp_path, key, value, needed):
    config = tiny.qwen3_config()
    for other in ("dtype", "torch_dtype", "rope_theta", "rope_scaling"):
        if other != key:
            config.pop(other, None)
    _, problems = looked_at(tmp_path, {**config, key: value})
    assert len(problems) == 1
    assert problems[0].startswith(f"config key {key!r}: found {shown(value)}, needed ")
    assert needed in problems[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.float16", "float32", None])
def test_dtypes_that_are(tiny, tmp_path, dtype):
    _, problems = looked_at(tmp_path, {**tiny.qwen3_config(), "torch_dtype": dtype})
    assert problems == []


@pytest.mark.parametrize("experts", [10**6, 2**31 - 1])
def test_absurd_numbers_of_experts_are_refused_before_a_name_is_made_for_each(tmp_path, experts):
    config = dict(next(iter(find("qwen3_moe").variants.values())).config)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": experts, "num_hidden_layers": 100}))
    problems = inspect_source(open_source(tmp_path)).problems
    assert any("'num_experts'" in problem and "at most 10000 experts" in problem for problem in problems)
