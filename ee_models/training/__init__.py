"""Training: exits distilled on a frozen trunk (Kangaroo), a model together with its exits, and LayerSkip's
training of whole models."""
