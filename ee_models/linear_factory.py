"""LinearMaker: makes all linears of a model of one kind: in panels, in narrow numbers, plain, row-invariant
or quantized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from .huge_pages import HugePages
from .kernels import runs_numba
from .linear import Linear, PlainLinear
from .quantized import Quantization, check_quantization, quantized_linear

if TYPE_CHECKING:
    from .kernels.threads import KernelThreads
    from .narrow_linear import NarrowLinear
    from .panel_linear import PanelLinear


@dataclass(frozen=True)
class LinearMaker:
    """Makes the Linears of a model, its exits and its draft model from weights [out, in] and biases [out].

    quantization  "int8" or "int4", every matrix product included; None = the weights as they are
    exact         on a GPU, kernels in which rows keep their bits; those of a CPU give that by themselves
    weights_dtype what weights have been rounded to; None = dtype. of bfloat16, a CPU that has products in
                  it rounds tokens, too, and adds up in float32; any other computes in dtype
    Raises ValueError for what cannot be combined, or cannot run on `device` in `dtype`.
    """

    device: torch.device
    dtype: torch.dtype
    quantization: Quantization | None = None
    exact: bool = False
    weights_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.quantization is None:
            return
        if self.exact and self.device.type != "cpu" and self.quantization == "int4":
            raise ValueError(
                f"exact_verify and quantization='int4' cannot be combined on {self.device}; leave one of them"
                " out, or set quantization to int8"
            )
        check_quantization(self.quantization, self.device, self.dtype)

    @property
    def makes_panels(self) -> bool:
        """Whether linears are PanelLinears or NarrowLinears: what several layers run over in one call."""
        return runs_numba(self.device) and self.dtype == torch.float32

    @property
    def bits(self) -> Literal[8, 4] | None:
        """Those of a quantized model's weights."""
        return None if self.quantization is None else 8 if self.quantization == "int8" else 4

    @cached_property
    def is_bfloat16(self) -> bool:
        """Whether linears are NarrowLinears in bfloat16."""
        if self.quantization is not None or self.weights_dtype != torch.bfloat16 or not self.makes_panels:
            return False
        from .kernels.numba_narrow import multiplies_bfloat16

        return multiplies_bfloat16()

    @cached_property
    def attends_in_bfloat16(self) -> bool:
        """Whether attention over KV in bfloat16 multiplies in it, which rounds queries and weights: a model
        in narrow numbers loses little more by it."""
        if not self.makes_panels or not (self.is_bfloat16 or self.quantization is not None):
            return False
        from .kernels.numba_narrow import multiplies_bfloat16

        return multiplies_bfloat16()

    @cached_property
    def threads(self) -> KernelThreads:
        """Those that linears of a CPU run on."""
        from .kernels.threads import KernelThreads

        return KernelThreads()

    @cached_property
    def pages(self) -> HugePages:
        """Those that weights of a CPU lie in."""
        return HugePages()

    def head(self, weight: Tensor) -> Linear:
        """The Linear of a head [vocab, hidden]. On a CPU it stays in int8 where layers are in int4: what is
        lost in it is lost for every token, and files in four bits keep it in more, too."""
        if self.bits is not None and self.device.type == "cpu":
            return self._narrow_linear(weight, None, 8)
        return self(weight, None)

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self.bits is not None and self.device.type == "cpu":
            return self._narrow_linear(weight, bias, self.bits)
        if self.bits is not None:
            return quantized_linear(weight, bias, self.bits, self.exact)
        if self.exact and self.device.type != "cpu":
            from .kernels.triton_linear import InvariantLinear

            return InvariantLinear(weight, bias)
        if self.is_bfloat16:
            return self._narrow_linear(weight, bias, 16)
        if self.makes_panels:
            from .panel_linear import PanelLinear

            return self._placed(PanelLinear(weight, bias, self.threads))
        return PlainLinear(weight, bias)

    def _narrow_linear(self, weight: Tensor, bias: Tensor | None, bits: Literal[16, 8, 4]) -> Linear:
        from .narrow_linear import NarrowLinear

        return self._placed(NarrowLinear(weight, bias, bits, self.threads))

    def _placed(self, linear: PanelLinear | NarrowLinear) -> Linear:
        linear.panels = self.pages.keep(linear.panels)
        return linear
