"""An LLM in several processes: each with its share of the cores, all with one copy of the weights."""
