"""Making exits: distillation into adapters on a frozen trunk (Kangaroo), and the LayerSkip recipe for whole
models."""

OWNER = "hispec"
