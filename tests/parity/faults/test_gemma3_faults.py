import pytest
from seeded_faults import SeededFaults

from dewconv.families import gemma3


@pytest.mark.faults
class TestGemma3(SeededFaults):
    family = gemma3.FAMILY
