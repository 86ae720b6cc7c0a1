"""Adaptive speculation: acceptance estimates, expected goodput, and the plan that each round runs. No torch."""
