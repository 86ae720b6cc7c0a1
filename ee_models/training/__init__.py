"""Training of exits: adapters distilled on a frozen trunk (Kangaroo), and LayerSkip training of whole
models."""

OWNER = "hispec"
