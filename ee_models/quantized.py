"""A GPU's quantized linears: int8 in a kernel of our own, int4 by torchao (extra `quantize`); a CPU's are in
`narrow_linear`.

A quantized model is another model: what speculation keeps is plain decoding's output of that same model.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from .errors import install_command
from .kernels import runs_triton
from .linear import Linear, PlainLinear, num_bytes

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig

Quantization = Literal["int8", "int4"]
# A GPU applies int8's scales to finished sums, in which float16 overflows, and its int4 kernel takes
# bfloat16; a CPU does not compute in float16.
_DTYPES = {"int8": (torch.float32, torch.bfloat16), "int4": (torch.bfloat16,)}
_CPU_DTYPES = (torch.float32, torch.bfloat16)
_GROUP_SIZES = (128, 64, 32)  # inputs that share a scale, the fewest scales first

_log = logging.getLogger(__name__)


class QuantizedLinear:
    """A product with a weight [out, in] that torchao holds in int4, with a scale and a zero point per group
    of inputs; x, bias and output keep the weight's dtype."""

    row_invariant = False
    holds_copy = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._product = _quantize(weight, bias)
        self.num_bytes = _num_bytes(self._product.weight) + num_bytes(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)


def quantized_linear(weight: Tensor, bias: Tensor | None, bits: Literal[8, 4], exact: bool = False) -> Linear:
    """A Linear over weight [out, in]; one that int4 does not fit stays in its dtype, which is logged once.
    exact: of int8, whether rows are to keep their bits."""
    if bits == 8:
        from .kernels.triton_int8 import Int8Linear

        return Int8Linear(weight, bias, exact)
    if _group_size(weight) is not None:
        return QuantizedLinear(weight, bias)
    _log_kept(weight.shape[0], weight.shape[1], weight.dtype)
    return PlainLinear(weight, bias)


def check_quantization(quantization: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError, with the way out, if linears cannot be quantized so here."""
    what = f"quantization={quantization!r}"
    if quantization not in _DTYPES:
        raise ValueError(
            f"{what} is unknown; known: {', '.join(_DTYPES)}, or None for the weights as they are"
        )
    known = _CPU_DTYPES if device.type == "cpu" else _DTYPES[quantization]
    if dtype not in known:
        dtypes = [str(each).removeprefix("torch.") for each in known]
        other = ", or quantization to int8" if quantization == "int4" and dtype in _DTYPES["int8"] else ""
        raise ValueError(
            f"{what} computes in {' or '.join(dtypes)}, not in {dtype} on {device}; set dtype to"
            f" {dtypes[-1]}{other}"
        )
    if device.type == "cpu":
        return
    if quantization == "int8":
        if not runs_triton(device):
            # torchao's int8 widens each weight whenever it is used: five bytes are moved instead of two.
            raise ValueError(
                f"{what} needs a CUDA GPU and the package triton, not {device}: anywhere else it would be"
                " slower than the weights as they are; leave quantization out, with dtype bfloat16"
            )
        return
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise ValueError(
            f"{what} needs a GPU of compute capability 8.0 or more, which {device} is not; set quantization"
            " to int8"
        )
    try:
        _config(_GROUP_SIZES[0])
    except ImportError as error:
        raise ValueError(
            f"{what} needs torchao 0.18 or later: {install_command('quantize')} ({error})"
        ) from error


def _quantize(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    config = _config(_group_size(weight))
    from torchao.quantization import quantize_

    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    quantize_(module, config)
    return module


def _config(group_size: int | None) -> AOBaseConfig:
    """torchao's description of the format. Raises ImportError where torchao lacks it."""
    with without_warnings():
        from torchao.quantization import Int4WeightOnlyConfig
    # Without set_inductor_config=False torchao would change the compiler's settings of the whole process.
    return Int4WeightOnlyConfig(  # the one layout whose kernel comes with torch itself
        group_size=group_size, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Silences logging: torchao's import warns of kernels for other GPUs, which are not used here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _group_size(weight: Tensor) -> int | None:
    """The largest group that divides the inputs of a weight [out, in]."""
    return next((size for size in _GROUP_SIZES if weight.shape[1] % size == 0), None)


def _num_bytes(tensor: Tensor) -> int:
    """Size of what a tensor holds; `nbytes` of torchao's tensors is that of the weight they stand for."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    return sum(_num_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


@cache
def _log_kept(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    _log.warning(
        "quantization='int4': linears of %d inputs and %d outputs stay in %s; int4 takes inputs that one of"
        " %s divides",
        inputs,
        outputs,
        dtype,
        ", ".join(map(str, _GROUP_SIZES)),
    )
