"""Guesses of the peak under subsets of names, from those of the few subsets that were traced."""

from collections.abc import Sequence

import numpy as np

from ._choices import Subset

# A choice that repeats hardly less than the one before it is not worth the bytes that it needs.
_WORTHWHILE = 0.98
# The least that a name counts in a distance, over the largest change that one makes.
_LEAST_WEIGHT = 0.05


class Guesses:
    """Peaks of subsets: what each keeps is known, and what else is alive is learned.

    That, the working set, is guessed as that of the nearest subset which was learned, changed by
    what each name between the two changes on its own. Two subsets are as far apart as the names
    between them change the working set on their own.

    Args:
        subsets: The subsets; the first is empty.

    Attributes:
        learned: The places of the subsets that were learned, with their working sets.
    """

    def __init__(self, subsets: Sequence[Subset]) -> None:
        names = list(dict.fromkeys(name for subset in subsets for name in subset.names))
        self._has = np.array([[name in subset.names for name in names] for subset in subsets])
        self._kept = np.array([sum(subset.bytes.values()) for subset in subsets], float)
        self._flops = np.array([subset.flops for subset in subsets])
        self.learned: dict[int, float] = {}

    def learn(self, at: int, peak_bytes: int) -> None:
        """Takes the peak of the subset at this place."""
        self.learned[at] = peak_bytes - self._kept[at]

    def to_learn(self) -> list[int]:
        """Places of subsets to learn next: first the extremes, then what seems to be on the front
        and was not learned. None are left when all that seems to be there was."""
        sizes = self._has.sum(axis=1)
        first = [at for at, size in enumerate(sizes) if size <= 1 or size == sizes.max()]
        wanted = self._front() if self.learned else first
        return [at for at in wanted if at not in self.learned]

    def peaks(self) -> list[int]:
        """The peak of each subset, as learned or guessed."""
        places = np.array(list(self.learned))
        learned = np.array(list(self.learned.values()))
        changes = self._changes()
        weights = np.abs(changes) + _LEAST_WEIGHT * np.abs(changes).max(initial=1.0)
        far = (self._has[:, None, :] != self._has[places]) @ weights
        nearest = far.argmin(axis=1)
        between = self._has.astype(float) - self._has[places[nearest]]
        return (self._kept + learned[nearest] + between @ changes).round().astype(int).tolist()

    def _changes(self) -> np.ndarray:
        """What each name, kept alone, changes of the working set."""
        alone = {
            int(self._has[at].argmax()): working - self.learned[0]
            for at, working in self.learned.items()
            if self._has[at].sum() == 1
        }
        return np.array([alone.get(name, 0.0) for name in range(self._has.shape[1])])

    def _front(self) -> list[int]:
        front, least = [], np.inf
        peaks = self.peaks()
        for at in sorted(range(len(peaks)), key=lambda at: (peaks[at], self._flops[at])):
            if self._flops[at] < _WORTHWHILE * least:
                front.append(at)
                least = self._flops[at]
        return front
