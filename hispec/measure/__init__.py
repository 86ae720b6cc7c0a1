"""What stages cost here: single stages of a round, run again and again, and the latency profile that is made
of them."""
