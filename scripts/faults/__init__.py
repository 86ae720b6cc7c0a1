"""The faults that `make faults` plants, a file for each part of the code."""

from __future__ import annotations

from . import attention, decoding, drafters, figures, jobs, kernels, linked, models, runner, serving
from .fault import Fault

__all__ = ["FAULTS", "Fault"]

FAULTS: tuple[Fault, ...] = (
    *decoding.FAULTS,
    *linked.FAULTS,
    *drafters.FAULTS,
    *runner.FAULTS,
    *serving.FAULTS,
    *figures.FAULTS,
    *kernels.FAULTS,
    *attention.FAULTS,
    *models.FAULTS,
    *jobs.FAULTS,
)
