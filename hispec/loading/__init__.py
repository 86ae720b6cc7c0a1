"""From a name to a model: known models, downloads, conversion from GGUF, trained exits and draft models."""
