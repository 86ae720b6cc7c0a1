"""The paper: the round, what it runs over, and how each tier accepts tokens."""
