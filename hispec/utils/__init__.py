"""Files, memory and hardware: helpers that know nothing of decoding."""
