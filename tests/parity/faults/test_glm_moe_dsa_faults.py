import pytest
from seeded_faults import SeededFaults

from dewconv.families import glm_moe_dsa


@pytest.mark.faults
class TestGlmMoeDsa(SeededFaults):
    family = glm_moe_dsa.FAMILY
