"""`hispec profile`: measures exits and stages on a job's prompts, predicts every plan, runs the best, and
keeps one as a preset."""
