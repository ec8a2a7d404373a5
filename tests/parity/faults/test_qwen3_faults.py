from seeded_faults import SeededFaults

from dewconv.families import qwen3


class TestQwen3(SeededFaults):
    family = qwen3.FAMILY
