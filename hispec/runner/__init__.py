"""Runs rounds: what a plan needs in memory, eager launches and CUDA graphs, prefill, and the results of
rounds."""
