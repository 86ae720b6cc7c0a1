"""Names of models and files as they are found from everywhere: by presets, and by other machines."""

from __future__ import annotations

from ..config import SpeculativeConfig
from ..utils.files import expanded
from .ee_packages import packages
from .known_models import KNOWN_MODELS


def whole_path(name_or_path: str) -> str:
    """The path of a file or folder that is here, from the root; a name that `hispec fetch` knows, or a hub's,
    as it is."""
    if name_or_path in {*KNOWN_MODELS, *packages()} or not (path := expanded(name_or_path)).exists():
        return name_or_path
    return str(path.absolute())


def with_whole_paths(plan: SpeculativeConfig | None) -> SpeculativeConfig | None:
    """The plan, whose n-grams, exits and draft model are found from everywhere."""
    if plan is None:
        return None
    draft, check = plan.draft, plan.check
    if (ngram := draft.ngram) is not None and ngram.guess_path is not None:
        ngram = ngram.model_copy(update={"guess_path": whole_path(str(ngram.guess_path))})
    draft = draft.model_copy(update={"ngram": ngram, "path": _whole(draft.path)})
    if check is not None:
        check = check.model_copy(update={"path": _whole(check.path)})
    return plan.model_copy(update={"draft": draft, "check": check})


def _whole(path: str | None) -> str | None:
    return None if path is None else whole_path(path)
