"""Without a GPU, Triton's kernels run on the CPU by its interpreter, if it is told so before anybody imports
it."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
