"""The catalogue as a whole, and the kinds that the families run with every change have not. `faults` has the rest."""

from dataclasses import replace
from pathlib import Path

import pytest
from seeded_faults import ABSENT, NARROWEST

import dewconv
from dewconv.families.registry import find
from dewconv.parity.fault_runner import Bench, run_faults
from dewconv.parity.faults import CATALOGUE, listing

ON_EVERY_CHANGE = "qwen3"
"""The family whose faults the whole suite runs. The others' take many times as long and run by themselves
(`make faults`)."""
BESIDE = {
    "gemma3": (ABSENT["qwen3"] - ABSENT["gemma3"], None),
    "deepseek_v32": (ABSENT["qwen3"] & ABSENT["gemma3"] - ABSENT["deepseek_v32"], None),
    "qwen3_moe": ({"correction_bias_invented"}, "experts"),
    "glm_moe_dsa": ({"indexer_choice_of_another"}, "shared"),
}
"""The kinds that it cannot have, each with a family that the suite seeds them in, and the one variant to do it in where
one is enough."""


def test_every_kind_is_seeded_on_every_change():
    kinds = {fault.name for fault in CATALOGUE}
    assert kinds == (kinds - ABSENT[ON_EVERY_CHANGE]).union(*(seeded for seeded, _ in BESIDE.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_kinds_that_other_families_have_come_out_as_the_catalogue_says(name, tmp_path):
    kinds, variant = BESIDE[name]
    family = find(name)
    if variant is not None:
        family = replace(family, variants={variant: family.variants[variant]})
    faults = [fault for fault in CATALOGUE if fault.name in kinds]
    report = run_faults(family, faults=faults, bench=Bench(family, tmp_path))
    assert {outcome.fault for outcome in report.outcomes} == kinds
    assert not report.uncaught
    assert not report.absent
    assert report.passed
    assert report.narrowest is None or report.narrowest.margin > NARROWEST


def test_a_catalogue_of_at_least_forty_kinds_says_what_each_stands_for():
    names = [fault.name for fault in CATALOGUE]
    assert len(set(names)) == len(names) >= 40
    assert all(fault.imitates and fault.needs for fault in CATALOGUE)


def test_the_documentation_lists_the_catalogue():
    text = (Path(dewconv.__file__).parent / "docs" / "faults.md").read_text("utf-8")
    assert text.endswith(listing())


def test_every_family_has_a_file():
    named = {
        path.stem.removeprefix("test_").removesuffix("_faults") for path in Path(__file__).parent.glob("faults/*.py")
    }
    assert named >= ABSENT.keys()
