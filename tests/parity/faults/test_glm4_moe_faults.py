import pytest
from seeded_faults import SeededFaults

from dewconv.families import glm4_moe


@pytest.mark.faults
class TestGlm4Moe(SeededFaults):
    family = glm4_moe.FAMILY
