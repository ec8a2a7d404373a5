import numpy as np
import pytest

from dewconv.families import ConversionError, families, find
from dewconv.parity.probes import make_probe, packed, padded, prompt_probe, special_ids, thresholds


def probe_of(family, variant, **options):
    owner = find(family)
    spec = owner.variants[variant]
    fields, _ = owner.read(spec.config)
    return make_probe(fields, spec.config, shortest=spec.length, **options)


def test_every_variants_probe_passes_its_thresholds():
    for family in families():
        for name, spec in family.variants.items():
            fields, _ = family.read(spec.config)
            probe = make_probe(fields, spec.config, shortest=spec.length)
            assert not probe.notices, (family.name, name)
            assert probe.length >= spec.length
            assert all(probe.length > position for position in thresholds(fields).values())


def test_special_ids_are_not_drawn():
    spec = find("gemma3").variants["wrapper_hub"]
    drawn = set(np.unique(probe_of("gemma3", "wrapper_hub", rows=40).tokens))
    assert {0, 134} <= set(special_ids(spec.config))
    assert not drawn & set(special_ids(spec.config))
    assert len(drawn) > 100


def test_a_short_probe_says_what_it_does_not_reach():
    assert any("window" in notice for notice in probe_of("gemma3", "text", tokens=5).notices)
    with pytest.raises(ConversionError, match="at least 2"):
        probe_of("gemma3", "text", tokens=1)


@pytest.mark.parametrize("arrange", [lambda p: padded(p, "left"), lambda p: padded(p, "right"), packed])
def test_arranged_documents_are_the_rows_beginnings(arrange):
    probe = probe_of("qwen3", "window")
    rows = arrange(probe)
    seen = np.zeros(rows.tokens.shape, bool)
    for source, row, start, length in rows.places:
        here = (row, slice(start, start + length))
        np.testing.assert_array_equal(rows.tokens[here], probe.tokens[source, :length])
        np.testing.assert_array_equal(rows.positions[here], np.arange(length))
        assert len(set(rows.segments[here])) == 1
        assert not seen[here].any()
        seen[here] = True
    np.testing.assert_array_equal(seen, rows.mask)


def test_packed_rows_hold_several_documents():
    rows = packed(probe_of("qwen3", "window"))
    assert all(len(set(segments)) >= 2 for segments in rows.segments)


def test_a_prompt_is_held_against_the_vocabulary():
    fields, _ = find("qwen3").read(find("qwen3").variants["untied"].config)
    assert prompt_probe(fields, [5, 6, 7]).summary() == {"tokens": 3, "rows": 1, "lengths": [3], "seed": None}
    with pytest.raises(ConversionError, match="vocabulary"):
        prompt_probe(fields, [5, 600])
