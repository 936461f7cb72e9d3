"""A stand-in for the operating system's randomness, the same in every run: what one draw is to show is certain."""

import random


class SeededNoise:
    """A `ddm.privacy.noise.Noise` of a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, bound: int) -> int:
        """Draw a whole number from 0 to `bound - 1`."""
        return self._random.randrange(bound)

    def octets(self, num: int) -> bytes:
        """Draw this many bytes."""
        return self._random.randbytes(num)
