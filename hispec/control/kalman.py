"""A hierarchical Kalman filter of cost ratios: by what factor predictions are off, learnt from
measurements."""

from __future__ import annotations

import numpy as np

from .hazards import Floats


class CostRatioFilter:
    """log(measured / predicted) = common effect + effect of the item + effect of the item within its group,
    three levels estimated jointly by one Kalman filter. An error common to all items, such as a busy machine,
    is found to be common and changes no order among them.

    Every effect decays towards 0 (a mean-reverting random walk) over its level's `memories` rounds.
    """

    def __init__(
        self,
        num_items: int,
        num_groups: int,
        max_factor: float,
        deviations: tuple[float, float, float],
        memories: tuple[float, float, float],
    ) -> None:
        """num_groups: 0 = no third level; max_factor: estimates are clipped to [1 / max_factor, max_factor];
        deviations, memories: prior standard deviation, and rounds of memory, of the common effect, items,
        items within groups."""
        sizes = (1, num_items, num_items * num_groups)
        self._num_items, self._num_groups, self._max_log = num_items, num_groups, np.log(max_factor)
        self._prior = np.repeat(np.square(deviations), sizes)
        self._rate = np.repeat(1.0 / np.array(memories), sizes)
        self._mean, self._cov = np.zeros(sum(sizes)), np.diag(self._prior)
        self._last_round = 0.0

    def add(self, item: int, group: int, log_ratio: float, variance: float, round_index: float) -> None:
        """Predicts the state up to `round_index`, then updates it with a measurement of this variance."""
        kept = np.exp(-self._rate * max(round_index - self._last_round, 0.0))
        self._last_round = max(round_index, self._last_round)
        self._mean *= kept
        self._cov *= kept[:, None] * kept[None, :]
        self._cov.flat[:: len(kept) + 1] += (1.0 - kept**2) * self._prior
        observed = [0, 1 + item]
        if self._num_groups:
            observed.append(1 + self._num_items + item * self._num_groups + group)
        gain = self._cov[:, observed].sum(1)
        spread = gain[observed].sum() + variance
        self._mean += gain * ((log_ratio - self._mean[observed].sum()) / spread)
        self._cov -= np.outer(gain, gain / spread)

    def logs(self, group: int) -> tuple[Floats, Floats]:
        """[items]: estimated log ratio in this group, clipped; and its standard deviation relative to the
        other items (that of the common effect left out)."""
        items = slice(1, 1 + self._num_items)
        mean, variance = self._mean[0] + self._mean[items], np.diagonal(self._cov)[items]
        if self._num_groups:
            in_group = slice(1 + self._num_items + group, None, self._num_groups)
            mean, variance = mean + self._mean[in_group], variance + np.diagonal(self._cov)[in_group]
        return np.clip(mean, -self._max_log, self._max_log), np.sqrt(np.maximum(variance, 0.0))
