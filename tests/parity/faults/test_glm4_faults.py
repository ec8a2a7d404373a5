import pytest
from seeded_faults import SeededFaults

from dewconv.families import glm4


@pytest.mark.faults
class TestGlm4(SeededFaults):
    family = glm4.FAMILY
