"""Adaptive speculation: acceptance estimates, expected goodput, and the plan of each round. No torch."""
