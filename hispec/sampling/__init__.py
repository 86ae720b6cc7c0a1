"""From logits to tokens: the same functions in every tier."""
