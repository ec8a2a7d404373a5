import pytest
from seeded_faults import SeededFaults

from dewconv.families import deepseek_v32


@pytest.mark.faults
class TestDeepseekV32(SeededFaults):
    family = deepseek_v32.FAMILY
