import pytest
from seeded_faults import SeededFaults

from dewconv.families import qwen3_moe


@pytest.mark.faults
class TestQwen3Moe(SeededFaults):
    family = qwen3_moe.FAMILY
