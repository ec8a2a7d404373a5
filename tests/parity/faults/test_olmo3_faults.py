import pytest
from seeded_faults import SeededFaults

from dewconv.families import olmo3


@pytest.mark.faults
class TestOlmo3(SeededFaults):
    family = olmo3.FAMILY
