import pytest
from seeded_faults import SeededFaults

from dewconv.families import glm4_moe_lite


@pytest.mark.faults
class TestGlm4MoeLite(SeededFaults):
    family = glm4_moe_lite.FAMILY
