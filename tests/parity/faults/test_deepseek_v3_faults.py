import pytest
from seeded_faults import SeededFaults

from dewconv.families import deepseek_v3


@pytest.mark.faults
class TestDeepseekV3(SeededFaults):
    family = deepseek_v3.FAMILY
