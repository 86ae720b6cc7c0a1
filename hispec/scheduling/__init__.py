"""Which requests run next. Integers only: no torch here."""
