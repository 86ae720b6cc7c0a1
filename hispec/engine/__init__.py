"""Requests and KV blocks: the step API that `LLM` and other serving systems drive."""

from .engine import Engine

__all__ = ["Engine"]
