"""Where values fall between adjacent BF16 numbers, and how unevenly.

For a real number x with the BF16 neighbours a ≤ x < b, its position is u = (x − a) / (b − a), in [0, 1): 0 if x is a BF16 number, 0.5 if
rounding it is a tie. The unevenness of many positions is read off their Fourier coefficients

    φ(k) = mean exp(2πi·k·u),   k = 1 … 16,      score = sqrt(mean |φ(k)|²)

after "Where Rounding Happens Matters": the root mean square of the first 16 magnitudes of the Fourier transform of the distribution.
φ is the distribution's characteristic function at 2πk. All φ(k) are 0 for the uniform distribution on [0, 1), and 1 for a constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FREQUENCIES = 16
"""Coefficients that make the score."""
BINS = 1024
"""Bins of a histogram of positions. Positions on a grid of 1/1024 or coarser (products of BF16 numbers are on one of 1/256) keep their
coefficients exactly; those of a smooth distribution come out too small by at most sin(z)/z at z = 16π/1024, a factor of 0.9996."""
SHOWN_BINS = 64
"""Bins of the histogram that is kept, the first centred on 0."""
LARGEST = float.fromhex("0x1.fep+127")
"""The largest BF16 number."""
SMALLEST_NORMAL = 2.0**-126
SUBNORMAL_SPACING = 2.0**-133
"""BF16 numbers below the smallest normal one are the multiples of this."""
FRACTION_BITS = 45
"""FP64 has 52 bits of fraction, BF16 has 7 of them."""
CHUNK = 1 << 19
"""Elements that are counted at a time."""

Floats = NDArray[np.float64]


def positions(x: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Position of every element between its BF16 neighbours, of which the lower is the one towards −∞.

    Args:
        x: FP64, any shape.

    Returns:
        Positions in [0, 1], and which of them exist, in the shape of `x`: NaN, infinities and numbers beyond the largest of BF16 have none.
        0 means that the value is a BF16 number. 1 stands for a value so close below one that FP64 cannot hold 1 − u.
    """
    x = np.ascontiguousarray(x)
    bits = x.view(np.int64)
    above = (bits & ((1 << FRACTION_BITS) - 1)) * 2.0**-FRACTION_BITS  # beyond the neighbour that lies towards zero
    size = np.abs(x)
    tiny = size < SMALLEST_NORMAL
    if tiny.any():
        scaled = size[tiny] / SUBNORMAL_SPACING
        above[tiny] = scaled - np.floor(scaled)
    return np.where((x < 0) & (above > 0), 1 - above, above), size <= LARGEST


@dataclass
class Tally:
    """Positions of many values, as sums from which the score is computed. Tallies of different values add up."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(SHOWN_BINS, dtype=np.int64))
    """By the nearest multiple of 1/64, on the circle."""
    sums: NDArray[np.complex128] = field(default_factory=lambda: np.zeros(FREQUENCIES, dtype=np.complex128))
    """Σ exp(2πi·k·u) over all values."""
    squares: Floats = field(default_factory=lambda: np.zeros(FREQUENCIES))
    """Σ over units of |Σ exp(2πi·k·u) over the unit's values|²."""
    pairs: float = 0.0
    """Σ over units of its number of values, squared."""
    exact: int = 0
    """Values that are BF16 numbers (zeros too)."""
    zeros: int = 0
    ties: int = 0
    """Values exactly in the middle."""
    outside: int = 0
    """Values without a position: not finite, or too large for BF16."""
    agreeing: int = 0
    """Values that round to what the op returned."""

    @property
    def n(self) -> int:
        """Values that have a position."""
        return int(self.counts.sum())

    def add(self, x: Floats) -> None:
        """Count values, FP64, [units, values]: what belongs to one unit (a token) may be correlated, units are taken as independent."""
        for rows in _chunks(x):
            u, valid = positions(rows)
            place = np.rint(u * BINS).astype(np.int64)
            place[place == BINS] = 0
            place += np.arange(len(rows))[:, None] * BINS
            self.exact += int(np.count_nonzero((u == 0) & valid))
            self.ties += int(np.count_nonzero(u == 0.5))
            self.zeros += int(np.count_nonzero(rows == 0))
            if not valid.all():
                place = place[valid]
                self.outside += valid.size - place.size
            found = np.bincount(place.reshape(-1), minlength=len(rows) * BINS).reshape(len(rows), BINS)
            sums = np.fft.rfft(found, axis=1)[:, 1 : FREQUENCIES + 1].conj()  # NumPy's transform has exp(−2πi·k·u)
            self.counts += np.roll(found.sum(axis=0), BINS // SHOWN_BINS // 2).reshape(SHOWN_BINS, -1).sum(axis=1)
            self.sums += sums.sum(axis=0)
            self.squares += (np.abs(sums) ** 2).sum(axis=0)
            self.pairs += float((found.sum(axis=1).astype(np.float64) ** 2).sum())

    def merge(self, other: Tally) -> None:
        """Add another tally's values."""
        self.counts = self.counts + other.counts
        self.sums = self.sums + other.sums
        self.squares = self.squares + other.squares
        self.pairs += other.pairs
        self.exact += other.exact
        self.zeros += other.zeros
        self.ties += other.ties
        self.outside += other.outside
        self.agreeing += other.agreeing


def rounded(x: Floats) -> NDArray[np.uint16]:
    """Bit patterns of the BF16 numbers that FP64 values round to by way of FP32, ties to even, as PyTorch's kernels do; not for NaN."""
    bits = x.astype(np.float32).view(np.uint32)
    nearest: NDArray[np.uint16] = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return nearest


def _chunks(x: Floats) -> Iterator[Floats]:
    """Rows of `x`, a few at a time. A row that is too long for that goes alone."""
    step = max(1, CHUNK // max(1, x.shape[1], BINS))
    for start in range(0, len(x), step):
        yield x[start : start + step]
