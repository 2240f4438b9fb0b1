"""Which known activation a model's own gate is: decided by its values, never by its name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from moe_core.activation import ActivationSpec
from moe_core.kernels.activation import activation_function
from moe_core.payloads import ActivationFn, Tensor

# Both sides of every bend that known activations have, dense where they curve, and far out where clamps and tails act.
_MAGNITUDES = (0.0, 0.01, 0.1, 0.3, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 9.5, 11.0, 14.0, 20.0, 50.0, 300.0)
_KINDS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")
# The sigmoid approximation of GELU, as in gpt-oss.
_ALPHAS = (1.0, 1.702)


def recognise(
    function: ActivationFn,
    intermediate_size: int,
    *,
    gated: bool,
    row_order: str = "gate_up",
    limits: tuple[float, ...] = (),
    alphas: tuple[float, ...] = (),
    device: torch.device | None = None,
) -> ActivationSpec | None:
    """The known activation that equals `function` on every probe value, or None.

    Compared with float64 on all pairs of gate and up values from a grid, shuffled over rows and channels: a function
    that looks at its neighbours, at the channel or at the row is no known activation.

    Args:
        function: `[rows, 2I]` (`[rows, I]` when not gated) -> `[rows, I]`; probed in fp32.
        intermediate_size: I.
        gated: Whether it takes gate and up together.
        row_order: How gate and up lie in its input.
        limits: Clamp limits to try besides none.
        alphas: Factors in the sigmoid to try besides the usual ones.
        device: Where to probe.
    """
    gate, up = _probe_values(intermediate_size, gated, limits)
    if not gated:
        rows = gate
    elif row_order == "gate_up":
        rows = torch.cat([gate, up], dim=-1)
    else:
        rows = torch.stack([gate, up], dim=-1).flatten(-2)
    try:
        with torch.no_grad():
            found = function(rows.to(device)).double().cpu()
    except (RuntimeError, TypeError, ValueError, AttributeError):
        # It wants another dtype or more arguments: nothing can be said about its values.
        return None
    # Relative to the result: a few roundings of fp32 (6e-8 each). Absolute: where the result cancels to nothing while
    # the function's inner value is one (the tails of GELU), which up multiplies.
    tolerance = 3e-6 * (1.0 + (up.abs().double() if gated else 0.0))
    for spec in _candidates(gated, row_order, limits, alphas):
        expected = activation_function(spec)(rows.double())
        if found.shape == expected.shape and bool(
            ((found - expected).abs() <= 1e-5 * expected.abs() + tolerance).all()
        ):
            return spec
    return None


def _probe_values(intermediate_size: int, gated: bool, limits: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    magnitudes = [*_MAGNITUDES, *(limit * factor for limit in limits for factor in (0.98, 1.02))]
    values = torch.tensor(sorted({sign * value for value in magnitudes for sign in (1.0, -1.0)}))
    gate, up = torch.meshgrid(values, values if gated else values[:1], indexing="ij")
    num_rows = max(2, -(-gate.numel() // intermediate_size))
    generator = torch.Generator().manual_seed(0)
    index = torch.randperm(num_rows * intermediate_size, generator=generator) % gate.numel()
    shape = (num_rows, intermediate_size)
    return gate.reshape(-1)[index].view(shape), up.reshape(-1)[index].view(shape)


def _candidates(
    gated: bool, row_order: str, limits: tuple[float, ...], alphas: tuple[float, ...]
) -> Iterator[ActivationSpec]:
    """Every known variant within reach, plain ones first."""
    variants: list[tuple[float | None, float, str]] = [(None, 0.0, "before")]
    if gated:
        clamps = [(limit, clamp) for limit in limits for clamp in ("before", "after")]
        variants = [(limit, beta, clamp) for limit, clamp in ((None, "before"), *clamps) for beta in (0.0, 1.0)]
    for (limit, beta, clamp), kind in itertools.product(variants, _KINDS):
        for alpha in dict.fromkeys((*_ALPHAS, *alphas)) if kind == "silu" else (1.0,):
            yield ActivationSpec(
                kind=kind, gated=gated, alpha=alpha, limit=limit, beta=beta, clamp=clamp, row_order=row_order
            )
