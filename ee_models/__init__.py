"""Early-exit models: configuration, checkpoints, the decoder, exits and their training.

Import from the submodules (`ee_models.checkpoint.loader`, `ee_models.decoder`, ...); this package imports
nothing itself, so that reading one part does not pay for the others.
"""

OWNER = "hispec"  # hispec checks this on import: another package of this name would shadow ours
