from seeded_faults import SeededFaults

from dewconv.families import gemma3


class TestGemma3(SeededFaults):
    family = gemma3.FAMILY
