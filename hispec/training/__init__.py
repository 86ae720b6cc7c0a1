"""`hispec train`: from prompts to exits, in stages that each go on where they were interrupted."""
