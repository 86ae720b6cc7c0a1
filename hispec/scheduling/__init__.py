"""Decides which requests run next, in which rows and with which KV blocks. Imports no torch."""
