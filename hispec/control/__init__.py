"""How much to speculate: what stages cost, what drafts are worth, and the plan that promises the most. No
torch here."""
