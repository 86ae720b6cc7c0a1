"""Offline jobs: a YAML file in, one JSON line per prompt out."""

from .load import load_job
from .schema import Job

__all__ = ["Job", "load_job"]
