"""Which tensors of a checkpoint are experts, whether they lie one by one or all of a layer in one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import attrs

from moe_core.errors import SpecError, WeightsError
from moe_core.expert_names import HALVES, INTERLEAVED, PROJECTIONS, expert_name, is_of_experts, layer_index
from moe_core.payloads import TORCH_DTYPES, Tensor
from moe_core.quantizer.layout import Layout
from moe_core.weights.checkpoint import TensorSource


@attrs.frozen(eq=False, kw_only=True)
class Projection:
    """One projection of one expert, not read yet.

    Attributes:
        name: What its tensors are called, without suffix: `model.layers.0.mlp.experts.3.gate_proj`.
        source: What it is read from.
        tensor: Name of the tensor that holds it.
        index: Where in that: a slice for each axis.
        shape: Output x input.
    """

    name: str
    source: TensorSource
    tensor: str
    index: tuple[slice, ...]
    shape: tuple[int, int]

    def read(self) -> Tensor:
        """The weight, output x input.

        Raises:
            WeightsError: It holds infinities or NaN.
        """
        weight = self.source.read(self.tensor, self.index).reshape(self.shape)
        if not weight.isfinite().all():
            raise WeightsError(f"{self.name}: the weight holds infinities or NaN; it cannot be quantized")
        return weight


@attrs.frozen(eq=False, kw_only=True)
class ExpertSource:
    """One expert.

    Attributes:
        module: Name of the experts module it is in.
        index: Its place there.
        projections: Half -> projection, for every half it has.
    """

    module: str
    index: int
    projections: Mapping[str, Projection]

    @property
    def layer(self) -> int | None:
        """Index of the decoder layer, as far as the name tells."""
        return layer_index(self.module)


def find_experts(source: TensorSource) -> list[ExpertSource]:
    """All experts of a checkpoint, in the order of its tensors.

    Raises:
        SpecError: There are none.
        WeightsError: Lists every tensor inside experts modules that is not understood, and every incomplete expert.
    """
    found: dict[tuple[str, int], dict[str, Projection]] = {}
    problems: list[str] = []
    for name in filter(is_of_experts, source.names):
        projections = list(_projections(source, name))
        if (parts := expert_name(name)) is not None and parts.projection in INTERLEAVED:
            problems.append(f"{name}: its rows of gate and up lie by turns; only gate first, then up is quantized")
        elif not projections:
            problems.append(f"{name} {list(source.shape(name))}: not understood as weights of experts")
        elif (dtype := source.dtype(name)) not in TORCH_DTYPES.values():
            problems.append(f"{name}: holds {dtype}, expected one of {', '.join(TORCH_DTYPES)}")
        for module, expert, half, projection in projections:
            found.setdefault((module, expert), {})[half] = projection
    if not found and not problems:
        raise SpecError(
            "no experts in this checkpoint: no tensor is called like one of a module with experts; is it a "
            "Mixture-of-Experts model?"
        )
    experts = [
        ExpertSource(module=module, index=index, projections={half: halves[half] for half in HALVES if half in halves})
        for (module, index), halves in found.items()
    ]
    problems += [problem for expert in experts if (problem := _shape_problem(expert)) is not None]
    problems += _gaps(experts)
    if problems:
        raise WeightsError.listing("expert tensors or experts cannot be quantized:", problems)
    return experts


def require_sizes(experts: list[ExpertSource], layout: Layout) -> None:
    """Raise `SpecError` if the layout cannot store the experts' sizes; lists every size once."""
    problems = {
        problem
        for expert in experts
        for half, projection in expert.projections.items()
        for problem in _size_problems(half, projection.shape, layout)
    }
    if problems:
        raise SpecError(
            f"scheme {layout.stored.scheme.label!r} cannot store these experts:\n  " + "\n  ".join(sorted(problems))
        )


def _projections(source: TensorSource, tensor: str) -> Iterator[tuple[str, int, str, Projection]]:
    """Module, expert, half and projection of everything that one tensor holds; nothing if it is not understood."""
    name, shape = expert_name(tensor), source.shape(tensor)
    if name is None or name.rest not in ("weight", ""):
        return
    part = partial(Projection, source=source, tensor=tensor)
    if name.expert is not None and tensor.endswith(".weight") and len(name.halves) == 1 and len(shape) == 2:
        whole = part(name=tensor.removesuffix(".weight"), index=(slice(None), slice(None)), shape=shape)
        yield name.module, name.expert, name.halves[0], whole
    if name.expert is None and len(shape) == 3 and shape[1] % len(name.halves) == 0:
        rows = shape[1] // len(name.halves)
        for expert in range(shape[0]):
            for place, half in enumerate(name.halves):
                called = f"{name.module}.{expert}.{PROJECTIONS[half][0]}"
                index = (slice(expert, expert + 1), slice(place * rows, (place + 1) * rows), slice(None))
                yield name.module, expert, half, part(name=called, index=index, shape=(rows, shape[2]))


def _gaps(experts: Iterable[ExpertSource]) -> Iterator[str]:
    """Experts that a module lacks between its first and its last."""
    indices: dict[str, set[int]] = {}
    for expert in experts:
        indices.setdefault(expert.module, set()).add(expert.index)
    for module, found in indices.items():
        missing = sorted(set(range(max(found) + 1)) - found)
        if missing:
            yield f"{module}: experts {missing} are missing"


def _shape_problem(expert: ExpertSource) -> str | None:
    name = f"{expert.module}.{expert.index}"
    halves = tuple(expert.projections)
    if halves not in (HALVES, HALVES[1:]):
        return f"{name}: has {', '.join(halves)}; expected gate, up and down, or up and down"
    shapes = {half: projection.shape for half, projection in expert.projections.items()}
    inner, hidden = shapes["up"]
    if shapes["down"] != (hidden, inner) or shapes.get("gate", (inner, hidden)) != (inner, hidden):
        listed = ", ".join(f"{half} {list(shape)}" for half, shape in shapes.items())
        # Input x output never fits output x input in both tensors of a gated expert.
        return f"{name}: {listed}; expected gate and up [I, H] and down [H, I], output x input"
    return None


def _size_problems(half: str, shape: tuple[int, int], layout: Layout) -> Iterator[str]:
    rows, columns = shape
    if rows % layout.row_multiple:
        yield f"{half}: {rows} outputs, expected a multiple of {layout.row_multiple}"
    multiple = layout.column_multiple if half != "down" else max(layout.column_multiple, layout.down_column_multiple)
    if columns % multiple:
        yield f"{half}: {columns} inputs, expected a multiple of {multiple}"
