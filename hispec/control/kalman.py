"""What predictions are off by, learnt from what was measured: factors of groups, which take after their kind,
and these after all."""

from __future__ import annotations

import numpy as np

from .hazards import Floats


class LogRatios:
    """log(measured / predicted) = a common part + one of the thing + one of the thing in its group, estimated
    together by a Kalman filter: what is common to all, such as a machine that is busy with something else, is
    found to be so, and changes no order among things.

    Every part drifts back to nothing over `memory` rounds of its own, so that it is re-learnt, too.
    """

    def __init__(
        self,
        num: int,
        num_groups: int,
        most: float,
        deviations: tuple[float, float, float],
        memories: tuple[float, float, float],
    ) -> None:
        """most: factor, up or down, beyond which nothing is believed; deviations, memories: of the common
        part, of things, of groups: standard deviation before anything was seen; rounds."""
        sizes = (1, num, num * num_groups)
        self._num, self._num_groups, self._most = num, num_groups, np.log(most)
        self._prior = np.repeat(np.square(deviations), sizes)
        self._rate = np.repeat(1.0 / np.array(memories), sizes)
        self._mean, self._cov = np.zeros(sum(sizes)), np.diag(self._prior)
        self._seen_at = 0.0

    def add(self, index: int, group: int, log_ratio: float, variance: float, now: float) -> None:
        kept = np.exp(-self._rate * max(now - self._seen_at, 0.0))
        self._seen_at = max(now, self._seen_at)
        self._mean *= kept
        self._cov *= kept[:, None] * kept[None, :]
        self._cov.flat[:: len(kept) + 1] += (1.0 - kept**2) * self._prior
        places = self._places(index, group)
        gain = self._cov[:, places].sum(1)
        spread = gain[places].sum() + variance
        self._mean += gain * ((log_ratio - self._mean[places].sum()) / spread)
        self._cov -= np.outer(gain, gain / spread)

    def logs(self, group: int) -> tuple[Floats, Floats]:
        """Of each thing in this group [num], within sane limits; and by how much each may be off against the
        others (standard deviation)."""
        things = slice(1, 1 + self._num)
        mean, variance = self._mean[0] + self._mean[things], np.diagonal(self._cov)[things]
        if self._num_groups:
            in_group = slice(1 + self._num + group, None, self._num_groups)
            mean, variance = mean + self._mean[in_group], variance + np.diagonal(self._cov)[in_group]
        return np.clip(mean, -self._most, self._most), np.sqrt(np.maximum(variance, 0.0))

    def _places(self, index: int, group: int) -> list[int]:
        return [0, 1 + index] + (
            [1 + self._num + index * self._num_groups + group] if self._num_groups else []
        )
