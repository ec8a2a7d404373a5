"""Headers, indexes, configs and manifests of strangers: taken or refused in plain lines, quickly, in little memory.

More than ten thousand inputs, the same every time; `make fuzz` looks for new ones, guided by coverage.
"""

import json

import fuzzing
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dewconv.converters.importing import run_import
from dewconv.converters.inspection import inspect_source
from dewconv.converters.plan import plan_import
from dewconv.converters.source import open_source
from dewconv.families import deepseek_v3, qwen3
from dewconv.families.registry import families
from dewconv.parity.fixtures import write_checkpoint

INPUTS = st.binary(min_size=4, max_size=96)


def fuzzed(examples):
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True)
def in_little_memory():
    before = fuzzing.resident()
    yield
    assert fuzzing.resident() - before < fuzzing.MEGABYTES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Qwen3 in two shards, so that there is an index."""
    return write_checkpoint(
        tmp_path_factory.mktemp("hostile") / "checkpoint", qwen3.VARIANTS["untied"], qwen3.FAMILY, shards=2
    )


@pytest.fixture(scope="module")
def banks(checkpoint):
    return run_import(plan_import(open_source(checkpoint)), checkpoint.parent / "banks").path


def both(outcomes):
    """Whether some inputs were taken and some refused: a fuzzer whose inputs all end alike looks at one line."""
    assert set(outcomes) == {True, False}


def test_headers(tmp_path):
    outcomes = []

    @fuzzed(5000)
    @given(data=INPUTS)
    def each(data):
        outcomes.append(fuzzing.fuzz_header(data, tmp_path))

    each()
    both(outcomes)


def test_indexes(checkpoint):
    outcomes = []

    @fuzzed(1500)
    @given(data=INPUTS)
    def each(data):
        outcomes.append(fuzzing.fuzz_checkpoint(data, checkpoint, "model.safetensors.index.json"))

    each()
    both(outcomes)


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_configs(tmp_path, family):
    variant = next(iter(family.variants.values()))
    (tmp_path / "source").mkdir()
    source = write_checkpoint(tmp_path / "source", variant, family)
    outcomes = []

    @fuzzed(400)
    @given(data=INPUTS)
    def each(data):
        outcomes.append(fuzzing.fuzz_checkpoint(data, source, "config.json"))

    each()
    both(outcomes)


def test_manifests(banks):
    outcomes = []

    @fuzzed(1500)
    @given(data=INPUTS)
    def each(data):
        outcomes.append(fuzzing.fuzz_manifest(data, banks))

    each()
    both(outcomes)


@pytest.mark.parametrize("count", [10_001, 10**9, 2**63])
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_nextn_predict_layers", "n_routed_experts"])
def test_absurd_counts_are_refused_before_memory_is_taken(tmp_path, key, count):
    config = deepseek_v3.VARIANTS["untied"].config
    (tmp_path / "config.json").write_text(json.dumps(config | {key: count}))
    with fuzzing.limited():
        problems = inspect_source(open_source(tmp_path)).problems
    assert any(key in problem and str(count) in problem for problem in problems)
