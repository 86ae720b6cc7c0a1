"""What the stages of a round cost: a linear model, its fit, and the profile on disk. No torch here."""
