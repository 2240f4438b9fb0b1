"""What a machine allows, measured: how fast it reads memory, and how fast it multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import torch

from moe_core.payloads import TORCH_DTYPES, Tensor
from moe_core.request import LayerRequest
from moe_core.tuning.timing import Call, measure

#: Elements of the fp32 buffer that is read, and rows and columns of the square products: enough to hide a launch on an
#: accelerator, and to be no matter of caches.
_BUFFER = {"cpu": 1 << 26}
_BIG_BUFFER = 1 << 29
_SQUARE = {"cpu": 512}
_BIG_SQUARE = 8192
_REPEATS = 5


@attrs.frozen(kw_only=True)
class Ceilings:
    """The rates of one machine, in the run that measured them.

    Attributes:
        bytes_per_us: Bytes that are read, or written, in a microsecond.
        flops_per_us: Word of the operands (`bf16`, `fp8`, ...) -> operations in a microsecond of a large product.
    """

    bytes_per_us: float
    flops_per_us: dict[str, float]

    def floor(self, num_bytes: float, num_flops: float, operands: str) -> float:
        """Microseconds of reading so many bytes or of multiplying, whichever takes longer: nothing is much faster.

        A read can be a little faster than the one that was measured, so that figures may lie a little below.

        Raises:
            KeyError: The rate of these operands was not measured.
        """
        return max(num_bytes / self.bytes_per_us, num_flops / self.flops_per_us[operands])

    def __str__(self) -> str:
        """`3.04 TB/s, 795 TFLOP/s bf16`; GB and GFLOP on slower machines."""
        rates = [f"{_si(rate)}FLOP/s {word}" for word, rate in self.flops_per_us.items()]
        return ", ".join((f"{_si(self.bytes_per_us)}B/s", *rates))


def operands_of(request: LayerRequest) -> str:
    """Word of what the products of a layer multiply: rounded activations where there is hardware for them."""
    word = request.quant.w13.activation_dtype
    return word if word in ("fp8", "int8") else request.dtype


def measure_ceilings(device: str, operands: Iterable[str] = ("bf16",), clock: str = "wall") -> Ceilings:
    """Measure the machine.

    Args:
        device: Type of the device.
        operands: Words of `operands_of` that floors will be asked for.
        clock: As in `timing.prepare`.
    """
    rates = {word: _product_rate(word, device, clock) for word in dict.fromkeys(operands)}
    return Ceilings(bytes_per_us=_read_rate(device, clock), flops_per_us=rates)


def _si(per_us: float) -> str:
    """A rate per microsecond as one per second, with a prefix."""
    return f"{per_us / 1e6:.3g} T" if per_us >= 1e6 else f"{per_us / 1e3:.3g} G"


def _time(call: Call, device: str, clock: str) -> float:
    return measure([call], device, repeats=_REPEATS, clock=clock).smallest


def _read_rate(device: str, clock: str) -> float:
    """The better of a read and a copy."""
    source = torch.ones(_BUFFER.get(device, _BIG_BUFFER), dtype=torch.float32, device=device)
    size = source.nbytes
    # As integers: on CPU the largest float is sought with checks for NaN.
    words = source.view(torch.int32).view(1 << 10, -1)
    read = size / _time(lambda: words.amax(dim=1), device, clock)
    target = torch.empty_like(source)
    return max(read, 2 * size / _time(lambda: target.copy_(source), device, clock))


def _product_rate(word: str, device: str, clock: str) -> float:
    """Operations per microsecond; of the layer's floats where the machine has no product of such operands."""
    size = _SQUARE.get(device, _BIG_SQUARE)
    # Without instructions for it a CPU multiplies half precision more slowly than fp32, which runners then use.
    words = {"fp32", word} if device == "cpu" else {word}
    products = {name: _product(name, size, device) for name in words}
    return max(2 * size**3 / _time(product, device, clock) for product in products.values())


def _product(word: str, size: int, device: str) -> Call:
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    quantized = {"fp8": _fp8_product, "int8": _int8_product}
    if word in quantized and device != "cpu":
        product = quantized[word](left, right)
        if _runs(product):
            return product
    dtype = TORCH_DTYPES.get(word, torch.float32 if device == "cpu" else torch.bfloat16)
    left, right = left.to(dtype), right.to(dtype)
    return lambda: left @ right


def _fp8_product(left: Tensor, right: Tensor) -> Call:
    one = torch.ones((), device=left.device)
    first, second = (matrix.to(torch.float8_e4m3fn) for matrix in (left, right))
    return lambda: torch._scaled_mm(first, second.t(), one, one, out_dtype=torch.bfloat16)


def _int8_product(left: Tensor, right: Tensor) -> Call:
    first, second = (matrix.to(torch.int8) for matrix in (left, right))
    return lambda: torch._int_mm(first, second.t())


def _runs(call: Callable[[], object]) -> bool:
    try:
        call()
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True
