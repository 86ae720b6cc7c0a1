"""Checkpoints on disk: safetensors and GGUF models, their tokenizers, and trained exits. Pickles are never
read."""
