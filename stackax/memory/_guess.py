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
    what each name between the two changes, in the mean of when it is kept alone and beside all
    others. Two subsets are as far apart as the names between them change at most.

    Args:
        subsets: The subsets; the first is empty.

    Attributes:
        learned: The places of the subsets that were learned, with their working sets.
    """

    def __init__(self, subsets: Sequence[Subset]) -> None:
        names = list(dict.fromkeys(name for subset in subsets for name in subset.names))
        has = [[name in subset.names for name in names] for subset in subsets]
        self._has = np.array(has, bool)
        self._sizes = self._has.sum(axis=1)
        self._kept = np.array([sum(subset.bytes.values()) for subset in subsets], float)
        self._flops = np.array([subset.flops for subset in subsets])
        self.learned: dict[int, float] = {}

    def learn(self, at: int, peak_bytes: int) -> None:
        """Takes the peak of the subset at this place."""
        self.learned[at] = peak_bytes - self._kept[at]

    def to_learn(self) -> list[int]:
        """Places of subsets to learn next: first none, one, all but one and all of the names, then
        what seems to be on the front and was not learned, until all that seems to be there was."""
        most = self._sizes.max()
        first = [at for at, size in enumerate(self._sizes) if size <= 1 or size >= most - 1]
        wanted = self._front() if self.learned else first
        return [at for at in wanted if at not in self.learned]

    def peaks(self) -> list[int]:
        """The peak of each subset, as learned or guessed."""
        places = np.array(list(self.learned))
        learned = np.array(list(self.learned.values()))
        alone, beside_all = self._changes()
        weights = np.maximum(np.abs(alone), np.abs(beside_all))
        weights = weights + _LEAST_WEIGHT * weights.max(initial=1.0)
        nearest = ((self._has[:, None, :] != self._has[places]) @ weights).argmin(axis=1)
        between = self._has.astype(float) - self._has[places[nearest]]
        working = learned[nearest] + between @ (alone + beside_all) / 2
        return (self._kept + working).round().astype(int).tolist()

    def _changes(self) -> tuple[np.ndarray, np.ndarray]:
        """What each name changes of the working set: kept alone, and beside all others."""
        alone, beside_all = np.zeros((2, self._has.shape[1]))
        largest = int(self._sizes.argmax())
        for at, working in self.learned.items():
            if self._sizes[at] == 1:
                alone[self._has[at].argmax()] = working - self.learned[0]
            missing = self._has[largest] & ~self._has[at]
            if missing.sum() == 1 and self._sizes[at] == self._sizes[largest] - 1:
                beside_all[missing.argmax()] = self.learned[largest] - working
        return alone, beside_all

    def _front(self) -> list[int]:
        front, least = [], np.inf
        peaks = self.peaks()
        for at in sorted(range(len(peaks)), key=lambda at: (peaks[at], self._flops[at])):
            if self._flops[at] < _WORTHWHILE * least:
                front.append(at)
                least = self._flops[at]
        return front
