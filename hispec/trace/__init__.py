"""Traces of an engine: written while it runs, read back, summarized and drawn by `hispec report`."""
