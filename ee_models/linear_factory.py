"""LinearMaker: makes all linears of a model of one kind: packed, plain, row-invariant or quantized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .linear import Linear, PackedLinear, PlainLinear, can_pack
from .quantized import Quantization, check_quantization, quantized_linear


@dataclass(frozen=True)
class LinearMaker:
    """Makes the Linears of a model, its exits and its draft model from weights [out, in] and biases [out].

    quantization  weight-only "int8" or "int4", every matrix product included; None = the weights as they are
    exact         on a GPU, kernels in which rows keep their bits; packed linears of a CPU give that by
                  themselves
    Raises ValueError for what cannot be combined, or cannot run on `device` in `dtype`.
    """

    device: torch.device
    dtype: torch.dtype
    quantization: Quantization | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        if self.quantization is None:
            return
        if self.exact and self.device.type != "cpu":
            raise ValueError(
                f"exact_verify and quantization={self.quantization!r} cannot be combined on {self.device};"
                " leave one of them out"
            )
        check_quantization(self.quantization, self.device, self.dtype)

    @cached_property
    def packs(self) -> bool:
        return can_pack(self.device, self.dtype)

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self.quantization is not None:
            return quantized_linear(weight, bias, self.quantization)
        if self.exact and self.device.type != "cpu":
            from .kernels.triton_linear import InvariantLinear

            return InvariantLinear(weight, bias)
        return PackedLinear(weight, bias) if self.packs else PlainLinear(weight, bias)
