"""What drafts are worth: how many are offered, how many of them each tier keeps, by route and place, and what
is not tried is predicted from what is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import TRAITS, GoodputConfig
from .choice import Ints, Observation, Route, Shadow
from .hazards import Floats, HazardTable, shifted, survival
from .request_acceptance import Requests

COMPUTED, LOOKED_UP = 0, 1
DRAFT, VERIFY = 0, 1
MOST_TENTATIVE = 96  # tentative tokens of a round that are told apart
_OFFERED = 0.8  # of drafts that a drafter may leave out, before any was seen
_FOUND = 0.3  # likewise of cycles that prompt lookup serves
_RELATED, _WATCHED = (
    4.0,
    16.0,
)  # what other routes, and exits that were watched, count for at most, in prior weights
_TRUSTED = 0.5  # what such counts are worth against a route's own
_LEAST_COUNTS = 4.0  # by which old knowledge is judged at least: what was seen once is not forgotten quite
_SUREST = 0.98


@dataclass(frozen=True)
class Estimates:
    """Hazards by route, and by place from the first on.

    kept               [routes, drafts]: a draft is kept by the tier above
    accepted           [routes, MOST_TENTATIVE]: a tentative token is accepted by verify; of routes with a
                       check
    computed, looked   [routes, drafts]: a draft is offered, by who drafts
    found              [routes]: share of cycles that prompt lookup serves
    """

    kept: Floats
    accepted: Floats
    computed: Floats
    looked: Floats
    found: Floats


class Acceptance:
    """Estimates by route, request and exit. Rounds are counted by `now`, whose unit is one round of the
    engine."""

    def __init__(self, routes: Sequence[Route], config: GoodputConfig) -> None:
        self.routes, self._config = tuple(routes), config
        num, most, weight = (
            len(routes),
            max((route.most_drafts for route in routes), default=1),
            config.prior_weight,
        )
        drafters = [
            (route.kind, route.draft_layer, route.num_exit_tokens, route.has_confidence, route.lookup)
            for route in routes
        ]
        self._drafters = list(dict.fromkeys(drafters))
        self._drafter_of = np.array([self._drafters.index(each) for each in drafters], np.int64)
        self._layers = sorted(
            {layer for route in routes for layer in (route.draft_layer, route.check_layer) if layer}
        )

        def table(size: int, width: int) -> HazardTable:
            return HazardTable(size, width, config.window, weight)

        self.kept, self.accepted = table(num, most), table(num, MOST_TENTATIVE)
        self._offered, self._found = table(2 * len(self._drafters), most), table(len(self._drafters), 1)
        self._right, self._agreed = (
            table(len(self._layers), 1),
            table(len(self._drafters) * len(self._layers), 1),
        )
        self.requests = Requests(2, config.window, weight)
        self._estimated: Estimates | None = None  # of what was seen so far
        self._relate()

    def _relate(self) -> None:
        """Which routes tell of which."""
        routes, num = self.routes, len(self.routes)
        self._has_check = np.array([route.check_layer is not None for route in routes], bool)
        self._is_hybrid = np.array([route.traits.is_mixed for route in routes], bool)
        reads_exit = np.array(
            [
                route.traits.in_trunk and not route.traits.looks_up and route.check_layer is None
                for route in routes
            ],
            bool,
        )
        same_drafter = self._drafter_of[:, None] == self._drafter_of[None, :]
        self._same_drafter = np.where(same_drafter & ~np.eye(num, dtype=bool), 1.0, 0.0)
        checks = np.array([route.check_layer or -1 for route in routes])
        same_check = (checks[:, None] == checks[None, :]) & self._has_check & ~np.eye(num, dtype=bool)
        self._same_check = np.where(same_check, 1.0, 0.0)
        # -1 reads the zeros that are put behind all layers
        self._draft_at = np.array(
            [self._layers.index(route.draft_layer) if route.draft_layer else -1 for route in routes], np.int64
        )
        self._check_at = np.array(
            [self._layers.index(route.check_layer) if route.check_layer else -1 for route in routes], np.int64
        )
        self._tells_of_layer = np.zeros((len(self._layers), num))  # two-tier routes whose drafts an exit says
        for route in np.flatnonzero(reads_exit):
            self._tells_of_layer[self._draft_at[route], route] = 1.0
        always = np.array(
            [
                TRAITS[kind].computes and not has_confidence
                for kind, _, _, has_confidence, _ in self._drafters
            ],
            bool,
        )
        self._offered_prior = np.stack(
            [np.where(always, 1.0, _OFFERED), np.full(len(self._drafters), _OFFERED)], 1
        ).reshape(-1)

    # What was seen

    def add(
        self, route: int, seen: Sequence[Observation], now: float, rounds: int, estimates: Estimates
    ) -> None:
        """Observations of rounds of one route, `rounds` in all; estimates: those until now, by which single
        requests are judged."""
        self._estimated = None
        caps, drafted, kept = _joined(seen, "caps"), _joined(seen, "drafted"), _joined(seen, "kept")
        if len(caps):
            self.kept.add(route, kept, caps, now, rounds)
            self._add_offered(route, drafted, caps, _joined(seen, "looked_up"), now, rounds)
            self._add_requests(DRAFT, _joined(seen, "numbers"), kept, caps, estimates.kept[route])
        if self._has_check[route]:
            tentative, accepted = _joined(seen, "tentative"), _joined(seen, "accepted")
            if len(tentative):
                self.accepted.add(route, accepted, tentative, now, rounds)
                self._add_requests(
                    VERIFY, _joined(seen, "rows"), accepted, tentative, estimates.accepted[route]
                )

    def add_shadows(self, route: int | None, shadows: Iterable[Shadow], now: float, rounds: int) -> None:
        """What exits that were not in use would have said, while this route was."""
        self._estimated = None
        for shadow in shadows:
            if shadow.layer not in self._layers:
                continue
            layer = self._layers.index(shadow.layer)
            self._right.count(layer, *_sums(shadow.right, shadow.places), now, rounds)
            if route is not None:
                self._agreed.count(
                    self._drafter_of[route] * len(self._layers) + layer,
                    *_sums(shadow.agreed, shadow.drafts),
                    now,
                    rounds,
                )

    def _add_offered(
        self, route: int, drafted: Ints, caps: Ints, looked_up: Ints, now: float, rounds: int
    ) -> None:
        drafter, traits = int(self._drafter_of[route]), self.routes[route].traits
        looked = looked_up > 0 if traits.is_mixed else np.full(len(caps), traits.looks_up)
        if traits.is_mixed:
            self._found.count(
                drafter,
                np.array([looked.sum()], np.float64),
                np.array([len(looked)], np.float64),
                now,
                rounds,
            )
        most = self.routes[route].num_exit_tokens or self.routes[route].most_drafts
        for source, which, limits in ((COMPUTED, ~looked, np.minimum(caps, most)), (LOOKED_UP, looked, caps)):
            if which.any():
                self._offered.add(2 * drafter + source, drafted[which], limits[which], now, rounds)

    def _add_requests(self, tier: int, numbers: Ints, lengths: Ints, caps: Ints, hazards: Floats) -> None:
        most = len(hazards)
        tries = np.minimum(np.minimum(lengths + 1, caps), most)
        expected = np.concatenate([[0.0], np.cumsum(hazards)])[tries]
        self.requests.add(tier, numbers, tries, np.minimum(lengths, tries), expected)

    # What follows

    def estimates(self) -> Estimates:
        """From all that was seen, however long ago."""
        if self._estimated is None:
            self._estimated = self._estimate()
        return self._estimated

    def _estimate(self) -> Estimates:
        (drafts, draft_counts), (verified, verify_counts) = self._priors(None)
        kept = self.kept.hazards(drafts, self._config.prior_weight + _TRUSTED * draft_counts)
        return self._estimates(
            kept, self.accepted.hazards(verified, self._config.prior_weight + _TRUSTED * verify_counts)
        )

    def optimistic(self, now: float, deviations: float) -> Estimates:
        """So many standard errors above what is known, which grow with its age. What related routes and exits
        show since counts too."""
        (drafts, draft_counts), (verified, verify_counts) = self._priors(now)
        kept = _raised(self.kept.hazards(drafts), self.kept.counts(now), drafts, draft_counts, deviations)
        return self._estimates(
            kept,
            _raised(
                self.accepted.hazards(verified),
                self.accepted.counts(now),
                verified,
                verify_counts,
                deviations,
            ),
        )

    def _estimates(self, kept: Floats, accepted: Floats) -> Estimates:
        offered = self._offered.hazards(self._offered_prior).reshape(
            len(self._drafters), 2, self.kept.at_risk.shape[1]
        )
        ngram = [
            2 * index + LOOKED_UP
            for index, (kind, *_) in enumerate(self._drafters)
            if not TRAITS[kind].computes
        ]
        survived, risk = self._offered.survived[ngram, 0].sum(), self._offered.at_risk[ngram, 0].sum()
        weight = self._config.prior_weight
        found = self._found.pooled(
            np.full(len(self._drafters), (survived + weight * _FOUND) / (risk + weight))
        )[self._drafter_of]
        computed, looked = offered[self._drafter_of, COMPUTED], offered[self._drafter_of, LOOKED_UP]
        return Estimates(kept, accepted, computed, looked, np.where(self._is_hybrid, found, 0.0))

    def _priors(self, now: float | None) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Of drafts and of tentative tokens: what other routes and watched exits say of each route's hazard
        [routes], and on how many counts that stands; now = None: however old these are."""
        weight = self._config.prior_weight
        base = np.full(len(self.routes), self._config.prior_acceptance)

        def total(table: HazardTable) -> tuple[Floats, Floats]:
            risk = table.at_risk.sum(1)
            counts = risk if now is None else table.counts(now)
            return np.where(risk > 0, counts * table.survived.sum(1) / np.maximum(risk, 1e-9), 0.0), counts

        kept, kept_counts = total(self.kept)
        accepted, accepted_counts = total(self.accepted)
        right, right_counts = (
            with_none(a + self._tells_of_layer @ b)
            for a, b in zip(total(self._right), (kept, kept_counts), strict=True)
        )
        agreed, agreed_counts = (
            values.reshape(len(self._drafters), len(self._layers)) for values in total(self._agreed)
        )
        verified = self._blend(base, right[self._check_at], right_counts[self._check_at], _WATCHED)
        verified = self._blend(
            verified, self._same_check @ accepted, self._same_check @ accepted_counts, _RELATED
        )
        passed = np.where(
            self._has_check, (accepted + weight * verified[0]) / (accepted_counts + weight), 1.0
        )
        unchecked = np.where(self._has_check, 0.0, 1.0)
        drafts = self._blend(
            base, unchecked * right[self._draft_at], unchecked * right_counts[self._draft_at], _WATCHED
        )
        drafts = self._blend(
            drafts, self._same_drafter @ (kept * passed), self._same_drafter @ kept_counts, _RELATED
        )
        if self._layers:
            at = self._drafter_of, self._check_at
            drafts = self._blend(
                drafts,
                np.where(self._has_check, agreed[at], 0.0),
                np.where(self._has_check, agreed_counts[at], 0.0),
                _WATCHED,
            )
        return drafts, verified

    def _blend(
        self, prior: Floats | tuple[Floats, Floats], survived: Floats, at_risk: Floats, most: float
    ) -> tuple[Floats, Floats]:
        """A prior and counts, of which there may be too many: they are of something else -> their mean, and
        the counts in it."""
        mean, counts = prior if isinstance(prior, tuple) else (prior, np.zeros(len(prior)))
        weight = self._config.prior_weight
        taken = np.minimum(at_risk, most * weight)
        share = np.where(at_risk > 0, survived / np.maximum(at_risk, 1e-9), 0.0)
        return (mean * (counts + weight) + taken * share) / (counts + weight + taken), counts + taken

    # For people

    def stats(self, now: float) -> dict[str, Any]:
        """Every estimate, and on how many counts it stands."""
        estimates, counts, verify_counts = self.estimates(), self.kept.counts(now), self.accepted.counts(now)
        offered = self._offered.counts(now).reshape(-1, 2)
        out: dict[str, Any] = {}
        for index, route in enumerate(self.routes):
            entry: dict[str, Any] = {
                "draft": _listed(estimates.kept[index]),
                "draft_counts": float(counts[index]),
            }
            entry["offered"] = _listed(
                (estimates.computed if route.traits.computes else estimates.looked)[index]
            )
            entry["offered_counts"] = float(offered[self._drafter_of[index]].sum())
            if route.traits.is_mixed:
                entry["offered_looked_up"], entry["found"] = (
                    _listed(estimates.looked[index]),
                    float(estimates.found[index]),
                )
            if route.check_layer is not None:
                entry["check"], entry["check_counts"] = (
                    _listed(estimates.accepted[index, : 2 * route.most_drafts]),
                    float(verify_counts[index]),
                )
            out[str(route)] = entry
        return {"routes": out, "exits": self._exit_stats(now), "requests": len(self.requests)}

    def tiers(self) -> dict[str, dict[str, float]]:
        """Of each route that was run: the share of drafts that the tier above kept, of those that it judged;
        likewise of verify."""
        out = {}
        for index, route in enumerate(self.routes):
            if (tried := self.kept.at_risk[index].sum()) > 0:
                out[str(route)] = {"draft": float(self.kept.survived[index].sum() / tried)}
                if (tried := self.accepted.at_risk[index].sum()) > 0:
                    out[str(route)]["check"] = float(self.accepted.survived[index].sum() / tried)
        return out

    def _exit_stats(self, now: float) -> dict[str, Any]:
        counts, agreed = self._right.counts(now), self._agreed.counts(now)
        out: dict[str, Any] = {}
        for at, layer in enumerate(self._layers):
            entry: dict[str, Any] = {
                "right": _share(self._right, at),
                "counts": float(counts[at]),
                "agreed": {},
            }
            for index, drafter in enumerate(self._drafters):
                place = index * len(self._layers) + at
                if self._agreed.at_risk[place].sum() > 0:
                    kind, draft_layer, _, _, lookup = drafter
                    name = " ".join(
                        [
                            kind,
                            *([lookup] if lookup is not None else []),
                            *([f"D={draft_layer}"] if draft_layer else []),
                        ]
                    )
                    entry["agreed"][name] = {
                        "share": _share(self._agreed, place),
                        "counts": float(agreed[place]),
                    }
            out[str(layer)] = entry
        return out


def with_none(values: Floats) -> Floats:
    """With a zero behind, which index -1 reads."""
    return np.concatenate([values, [0.0]])


def expected_kept(hazards: Floats, shifts: Floats, most: int) -> Floats:
    """[n, most + 1]: the chance that a request whose log odds are shifted by so much [n] has so many drafts
    kept at least; hazards [drafts]."""
    return survival(shifted(hazards[None, :most], shifts[:, None]))


def _raised(
    hazards: Floats, counts: Floats, fresh: Floats, fresh_counts: Floats, deviations: float
) -> Floats:
    """Hazards [routes, width] that stand on `counts`, drawn towards what is known since [routes], and raised
    by standard errors."""
    counts = np.maximum(counts, _LEAST_COUNTS)
    both = counts + fresh_counts
    mean = (hazards * counts[:, None] + (fresh * fresh_counts)[:, None]) / both[:, None]
    careful = (mean * both[:, None] + 1.0) / (both[:, None] + 2.0)
    return np.maximum(
        np.minimum(mean + deviations * np.sqrt(careful * (1.0 - careful) / (both[:, None] + 1.0)), _SUREST),
        mean,
    )


def _sums(survived: Ints, at_risk: Ints) -> tuple[Floats, Floats]:
    return np.array([survived.sum()], np.float64), np.array([at_risk.sum()], np.float64)


def _joined(seen: Sequence[Observation], name: str) -> Ints:
    return (
        getattr(seen[0], name) if len(seen) == 1 else np.concatenate([getattr(each, name) for each in seen])
    )


def _share(table: HazardTable, index: int) -> float | None:
    risk = table.at_risk[index].sum()
    return float(table.survived[index].sum() / risk) if risk > 0 else None


def _listed(values: Floats) -> list[float]:
    return [round(float(value), 4) for value in values]
