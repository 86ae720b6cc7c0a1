"""Tier one: what proposes tokens."""
