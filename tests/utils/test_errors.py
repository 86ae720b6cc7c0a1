"""Errors that are raised on purpose have one base, by which a program tells them from bugs."""

from __future__ import annotations

import pytest

from ee_models.checkpoint.ee_package import PackageError
from ee_models.checkpoint.exit_files import ExitsError
from ee_models.errors import CheckpointError, TrainingError, UnsupportedModelError
from hispec import LLM, HiSpecError, errors


@pytest.mark.parametrize(
    "kind", [CheckpointError, ExitsError, PackageError, TrainingError, UnsupportedModelError]
)
def test_errors_of_models_are_errors_of_hispec_and_value_errors(kind: type[Exception]) -> None:
    assert issubclass(kind, HiSpecError) and issubclass(kind, ValueError)


def test_a_model_that_is_not_there_is_an_error_of_hispec(tmp_path: object) -> None:
    with pytest.raises(HiSpecError) as raised:
        LLM(f"{tmp_path}/nothing")
    assert isinstance(raised.value, errors.CheckpointError)
