"""How many drafts each drafter offers and how many of them each tier keeps, estimated by route and position;
routes that were not tried are predicted from related ones [SmartSpec's acceptance, DEL's shadow tokens]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import TRAITS, GoodputConfig
from .choice import Ints, Observation, Route, Shadow
from .hazards import Floats, HazardTable, shift_log_odds, survival
from .request_acceptance import RequestAcceptance

COMPUTED, LOOKED_UP = 0, 1
DRAFT, VERIFY = 0, 1
MOST_TENTATIVE = 96  # tentative tokens of a round that are told apart
MOST_CHECKS = 16  # of a round
# Priors: share of drafts that a drafter which may stop early offers; share of hybrid cycles served by lookup;
# share of checks that are sure enough for another cycle.
_OFFERED, _FOUND, _GOES_ON = 0.8, 0.3, 0.7
# Evidence from other routes and from shadows counts at most so many prior weights ...
_RELATED, _SHADOWED = 4.0, 16.0
_TRUSTED = 0.5  # ... and each of its counts as much as this of the route's own.
_LEAST_COUNTS = 4.0  # that an estimate rests on, however old: keeps optimism bounded
_MAX_OPTIMISTIC = 0.98


@dataclass(frozen=True)
class Estimates:
    """Hazards by route and position, from position 1 on.

    kept               [routes, drafts] P(the tier above keeps the draft | it kept those before)
    accepted           [routes, MOST_TENTATIVE] the same of tentative tokens and verify, for routes with a
                       check
    computed, looked   [routes, drafts] P(the draft is offered | those before were), by who drafts
    found              [routes] share of cycles that prompt lookup serves
    goes_on            [routes, MOST_CHECKS - 1] P(another cycle follows | there was room for one)
    """

    kept: Floats
    accepted: Floats
    computed: Floats
    looked: Floats
    found: Floats
    goes_on: Floats


class AcceptanceModel:
    """Estimates by route, request and exit. `round_index` counts rounds of the engine."""

    def __init__(self, routes: Sequence[Route], config: GoodputConfig) -> None:
        self.routes, self._config = tuple(routes), config
        # A drafter is a route without its check and sizes.
        of_routes = [
            replace(route, check_layer=None, most_drafts=1, most_checks=1, is_gated=False) for route in routes
        ]
        self._drafters = list(dict.fromkeys(of_routes))
        self._drafter_of = np.array([self._drafters.index(each) for each in of_routes], np.int64)
        self._layers = sorted(
            {layer for route in routes for layer in (route.draft_layer, route.check_layer) if layer}
        )
        num, most = len(routes), max((route.most_drafts for route in routes), default=1)
        table = partial(HazardTable, window=config.window, weight=config.prior_weight)
        self.kept, self.accepted = table(num, most), table(num, MOST_TENTATIVE)
        self._shares = table(2 * num, 1)  # drafts kept, tentative tokens accepted: for reports
        self._offered, self._found = table(2 * len(self._drafters), most), table(len(self._drafters), 1)
        self._goes_on = table(num, MOST_CHECKS - 1)
        self._right = table(len(self._layers), 1)
        self._agreed = table(len(self._drafters) * len(self._layers), 1)
        self.requests = RequestAcceptance(2, config.window, config.prior_weight)
        self._cached: Estimates | None = None
        self._relate_routes()

    def _relate_routes(self) -> None:
        """Which routes and exits are evidence for which routes, as 0/1 matrices."""
        routes, num = self.routes, len(self.routes)
        self._has_check = np.array([route.check_layer is not None for route in routes], bool)
        self._is_gated = np.array([route.is_gated for route in routes], bool)
        self._is_hybrid = np.array([route.traits.is_mixed for route in routes], bool)
        index = {layer: at for at, layer in enumerate(self._layers)}
        # -1 reads the zero that is appended behind all layers.
        self._draft_at = np.array([index.get(route.draft_layer, -1) for route in routes], np.int64)
        self._check_at = np.array([index.get(route.check_layer or 0, -1) for route in routes], np.int64)
        others = ~np.eye(num, dtype=bool)
        self._same_drafter = 1.0 * ((self._drafter_of[:, None] == self._drafter_of[None, :]) & others)
        same_check = (self._check_at[:, None] == self._check_at[None, :]) & self._has_check & others
        self._same_check = 1.0 * same_check
        # Drafts of a two-tier route show how often its exit is right.
        drafts_by_exit = [route.traits.in_trunk and not route.traits.looks_up for route in routes]
        is_exit = np.array(drafts_by_exit, bool) & ~self._has_check
        self._shows_layer = 1.0 * ((np.arange(len(self._layers))[:, None] == self._draft_at) & is_exit)
        always = [TRAITS[drafter.kind].computes and not drafter.has_confidence for drafter in self._drafters]
        self._offered_prior = np.array([[1.0 if each else _OFFERED, _OFFERED] for each in always]).reshape(-1)

    # Observations

    def add(
        self, route: int, seen: Sequence[Observation], round_index: float, rounds: int, estimates: Estimates
    ) -> None:
        """Observations of one route, of `rounds` rounds in all; estimates: those before them, which single
        requests are compared with."""
        self._cached = None
        caps, drafted, kept = _joined(seen, "caps"), _joined(seen, "drafted"), _joined(seen, "kept")
        if len(caps):
            self.kept.add(route, kept, caps, round_index, rounds)
            self._shares.add_counts(2 * route + DRAFT, *_sums(kept, drafted), round_index, rounds)
            self._add_offered(route, drafted, caps, _joined(seen, "looked_up"), round_index, rounds)
            self._add_requests(DRAFT, _joined(seen, "numbers"), kept, caps, estimates.kept[route])
        tentative, accepted = _joined(seen, "tentative"), _joined(seen, "accepted")
        if self._has_check[route] and len(tentative):
            self.accepted.add(route, accepted, tentative, round_index, rounds)
            self._shares.add_counts(2 * route + VERIFY, *_sums(accepted, tentative), round_index, rounds)
            self._add_requests(VERIFY, _joined(seen, "rows"), accepted, tentative, estimates.accepted[route])
            went_on, asked = _joined(seen, "went_on"), _joined(seen, "asked")
            self._goes_on.add(route, went_on, asked, round_index, rounds)

    def add_shadows(
        self, route: int | None, shadows: Iterable[Shadow], round_index: float, rounds: int
    ) -> None:
        """Predictions of exits that were not in use, while `route` was."""
        self._cached = None
        for shadow in shadows:
            if shadow.layer not in self._layers:
                continue
            at = self._layers.index(shadow.layer)
            self._right.add_counts(at, *_sums(shadow.right, shadow.places), round_index, rounds)
            if route is not None:
                at += int(self._drafter_of[route]) * len(self._layers)
                self._agreed.add_counts(at, *_sums(shadow.agreed, shadow.drafts), round_index, rounds)

    def _add_offered(
        self, route: int, drafted: Ints, caps: Ints, looked_up: Ints, round_index: float, rounds: int
    ) -> None:
        drafter, traits = int(self._drafter_of[route]), self.routes[route].traits
        looked = looked_up > 0 if traits.is_mixed else np.full(len(caps), traits.looks_up)
        if traits.is_mixed:
            self._found.add_counts(drafter, *_sums(looked, np.ones(len(looked))), round_index, rounds)
        most = self.routes[route].most_computed
        for source, which, limits in ((COMPUTED, ~looked, np.minimum(caps, most)), (LOOKED_UP, looked, caps)):
            if which.any():
                at = 2 * drafter + source
                self._offered.add(at, drafted[which], limits[which], round_index, rounds)

    def _add_requests(self, tier: int, numbers: Ints, lengths: Ints, caps: Ints, hazards: Floats) -> None:
        tries = np.minimum(np.minimum(lengths + 1, caps), len(hazards))
        expected = np.concatenate([[0.0], np.cumsum(hazards)])[tries]
        self.requests.add(tier, numbers, tries, np.minimum(lengths, tries), expected)

    # Estimates

    def estimates(self) -> Estimates:
        """Estimates from all observations, however old."""
        if self._cached is None:
            (drafts, draft_counts), (verified, verify_counts) = self._priors(None)
            weight = self._config.prior_weight
            self._cached = self._with_offers(
                self.kept.hazards(drafts, weight + _TRUSTED * draft_counts),
                self.accepted.hazards(verified, weight + _TRUSTED * verify_counts),
            )
        return self._cached

    def optimistic(self, round_index: float, deviations: float) -> Estimates:
        """Upper confidence bounds: `deviations` standard errors above the estimates. Errors grow with the age
        of what was seen; newer evidence from related routes and shadows makes them smaller."""
        raised = [
            _upper_bound(table.hazards(prior), table.counts(round_index), prior, prior_counts, deviations)
            for table, (prior, prior_counts) in zip(
                (self.kept, self.accepted), self._priors(round_index), strict=True
            )
        ]
        return self._with_offers(*raised)

    def _with_offers(self, kept: Floats, accepted: Floats) -> Estimates:
        offered = self._offered.hazards(self._offered_prior).reshape(
            len(self._drafters), 2, self.kept.at_risk.shape[1]
        )
        ngram = [
            2 * at + LOOKED_UP
            for at, drafter in enumerate(self._drafters)
            if not TRAITS[drafter.kind].computes
        ]
        survived, risk = self._offered.survived[ngram, 0].sum(), self._offered.at_risk[ngram, 0].sum()
        weight = self._config.prior_weight
        prior = np.full(len(self._drafters), (survived + weight * _FOUND) / (risk + weight))
        found = self._found.pooled(prior)[self._drafter_of]
        computed, looked = offered[self._drafter_of, COMPUTED], offered[self._drafter_of, LOOKED_UP]
        table = self._goes_on
        risk = table.at_risk.sum() + weight
        usual = np.full(len(self.routes), (table.survived.sum() + weight * _GOES_ON) / risk)
        goes_on = np.where(self._is_gated[:, None], table.hazards(usual), 1.0)
        return Estimates(kept, accepted, computed, looked, np.where(self._is_hybrid, found, 0.0), goes_on)

    def _priors(self, round_index: float | None) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """For drafts and for tentative tokens: the hazard of each route [routes] by the evidence of other
        routes and shadows, and on how many counts it rests; these are discounted up to round_index (None =
        not)."""
        weight = self._config.prior_weight
        base = np.full(len(self.routes), self._config.prior_acceptance), np.zeros(len(self.routes))

        def total(table: HazardTable) -> tuple[Floats, Floats]:
            risk = table.at_risk.sum(1)
            counts = risk if round_index is None else table.counts(round_index)
            return np.where(risk > 0, counts * table.survived.sum(1) / np.maximum(risk, 1e-9), 0.0), counts

        kept, kept_counts = total(self.kept)
        accepted, accepted_counts = total(self.accepted)
        right, right_counts = (
            np.append(shadows + self._shows_layer @ drafts, 0.0)
            for shadows, drafts in zip(total(self._right), (kept, kept_counts), strict=True)
        )
        checked, unchecked = 1.0 * self._has_check, 1.0 * ~self._has_check
        verified = self._blend(base, right[self._check_at], right_counts[self._check_at], _SHADOWED)
        same_check = self._same_check @ accepted, self._same_check @ accepted_counts
        verified = self._blend(verified, *same_check, _RELATED)
        passed = (accepted + weight * verified[0]) / (accepted_counts + weight)
        passed = np.where(self._has_check, passed, 1.0)
        of_layer = unchecked * right[self._draft_at], unchecked * right_counts[self._draft_at]
        drafts = self._blend(base, *of_layer, _SHADOWED)
        same_drafter = self._same_drafter @ (kept * passed), self._same_drafter @ kept_counts
        drafts = self._blend(drafts, *same_drafter, _RELATED)
        if self._layers:
            shape = len(self._drafters), len(self._layers)
            agreed, agreed_counts = (
                checked * values.reshape(shape)[self._drafter_of, self._check_at]
                for values in total(self._agreed)
            )
            drafts = self._blend(drafts, agreed, agreed_counts, _SHADOWED)
        return drafts, verified

    def _blend(
        self, prior: tuple[Floats, Floats], survived: Floats, at_risk: Floats, most: float
    ) -> tuple[Floats, Floats]:
        """A prior, (mean, counts), updated by counts of something related, of which at most `most` prior
        weights are taken -> (mean, counts)."""
        (mean, counts), weight = prior, self._config.prior_weight
        taken = np.minimum(at_risk, most * weight)
        share = np.where(at_risk > 0, survived / np.maximum(at_risk, 1e-9), 0.0)
        return (mean * (counts + weight) + taken * share) / (counts + weight + taken), counts + taken

    # Statistics

    def stats(self, round_index: float) -> dict[str, Any]:
        """Every estimate, and the counts that it rests on."""
        estimates, offered = self.estimates(), self._offered.counts(round_index).reshape(-1, 2).sum(1)
        counts, verify_counts = self.kept.counts(round_index), self.accepted.counts(round_index)
        out: dict[str, Any] = {}
        for at, route in enumerate(self.routes):
            out[str(route)] = entry = {
                "draft": _rounded(estimates.kept[at]),
                "draft_counts": float(counts[at]),
                "offered": _rounded((estimates.computed if route.traits.computes else estimates.looked)[at]),
                "offered_counts": float(offered[self._drafter_of[at]]),
            }
            if route.traits.is_mixed:
                entry["offered_looked_up"] = _rounded(estimates.looked[at])
                entry["found"] = float(estimates.found[at])
            if route.check_layer is not None:
                entry["check"] = _rounded(estimates.accepted[at, : 2 * route.most_drafts])
                entry["check_counts"] = float(verify_counts[at])
            if route.is_gated:
                entry["goes_on"] = _rounded(estimates.goes_on[at, : route.most_checks - 1])
        return {"routes": out, "exits": self._exit_stats(round_index), "requests": len(self.requests)}

    def shares(self) -> dict[str, dict[str, float]]:
        """By route that was run: the share of drafts that the tier above kept, and of tentative tokens that
        verify kept, of recent rounds; as `hispec report` counts both."""
        names = (DRAFT, "draft_kept"), (VERIFY, "tentative_accepted")
        out: dict[str, dict[str, float]] = {}
        for at, route in enumerate(self.routes):
            for tier, name in names:
                if (share := _success_rate(self._shares, 2 * at + tier)) is not None:
                    out.setdefault(str(route), {})[name] = share
        return out

    def _exit_stats(self, round_index: float) -> dict[str, Any]:
        counts, agreed = self._right.counts(round_index), self._agreed.counts(round_index)
        out: dict[str, Any] = {}
        for at, layer in enumerate(self._layers):
            rows = {drafter: index * len(self._layers) + at for index, drafter in enumerate(self._drafters)}
            out[str(layer)] = {
                "right": _success_rate(self._right, at),
                "counts": float(counts[at]),
                "agreed": {
                    str(drafter): {"share": share, "counts": float(agreed[row])}
                    for drafter, row in rows.items()
                    if (share := _success_rate(self._agreed, row)) is not None
                },
            }
        return out


def expected_kept(hazards: Floats, shifts: Floats, most: int) -> Floats:
    """[n, most + 1]: P(at least j drafts kept), j = 0 to `most`, of n requests whose log odds are shifted by
    `shifts` [n]; hazards [drafts]."""
    return survival(shift_log_odds(hazards[None, :most], shifts[:, None]))


def _upper_bound(
    hazards: Floats, counts: Floats, related: Floats, related_counts: Floats, deviations: float
) -> Floats:
    """Hazards [routes, width] that rest on `counts` [routes], averaged with related evidence [routes], plus
    `deviations` standard errors (Agresti-Coull)."""
    counts = np.maximum(counts, _LEAST_COUNTS)
    both = (counts + related_counts)[:, None]
    mean = (hazards * counts[:, None] + (related * related_counts)[:, None]) / both
    careful = (mean * both + 1.0) / (both + 2.0)
    bound = mean + deviations * np.sqrt(careful * (1.0 - careful) / (both + 1.0))
    return np.maximum(np.minimum(bound, _MAX_OPTIMISTIC), mean)


def _sums(survived: NDArray[Any], at_risk: NDArray[Any]) -> tuple[Floats, Floats]:
    return np.array([survived.sum()], np.float64), np.array([at_risk.sum()], np.float64)


def _joined(seen: Sequence[Observation], name: str) -> Ints:
    arrays = [getattr(each, name) for each in seen]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _success_rate(table: HazardTable, index: int) -> float | None:
    risk = table.at_risk[index].sum()
    return float(table.survived[index].sum() / risk) if risk > 0 else None


def _rounded(values: Floats) -> list[float]:
    return [round(float(value), 4) for value in values]
