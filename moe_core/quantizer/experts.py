"""Which tensors of a checkpoint are experts, whether they lie one by one or all of a layer in one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import attrs

from moe_core.errors import SpecError, WeightsError
from moe_core.payloads import Tensor
from moe_core.quantizer.source import FLOATS, SourceTensor
from moe_core.quantizer.storage import ROLES, Storage

_INSIDE = re.compile(r"^(?P<module>.*\.experts)\.(?P<rest>.+)$")
_SINGLE = re.compile(r"^(?P<expert>\d+)\.(?P<projection>\w+)\.weight$")
_LAYER = re.compile(r"\blayers?\.(\d+)\.")
#: Names of one expert's projections.
_ROLE = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
#: Names that experts of a fused tensor get.
_NAME = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@attrs.frozen(eq=False, kw_only=True)
class Projection:
    """One projection of one expert, not read yet.

    Attributes:
        name: What its tensors are called, without suffix: `model.layers.0.mlp.experts.3.gate_proj`.
        source: The tensor that holds it.
        index: Where in it; empty for the whole tensor.
        shape: Output x input.
    """

    name: str
    source: SourceTensor
    index: tuple[int | slice, ...]
    shape: tuple[int, int]

    def read(self) -> Tensor:
        """The weight, output x input.

        Raises:
            WeightsError: It holds infinities or NaN.
        """
        weight = self.source.read(*self.index)
        if not weight.isfinite().all():
            raise WeightsError(f"{self.name}: the weight holds infinities or NaN; it cannot be quantized")
        return weight


@attrs.frozen(eq=False, kw_only=True)
class ExpertSource:
    """One expert.

    Attributes:
        module: Name of the experts module it is in.
        index: Its place there.
        projections: Role -> projection, for every role it has.
    """

    module: str
    index: int
    projections: Mapping[str, Projection]

    @property
    def layer(self) -> int | None:
        """Index of the decoder layer, as far as the name tells."""
        found = _LAYER.search(self.module)
        return int(found[1]) if found else None


def is_expert_tensor(name: str) -> bool:
    """Whether a tensor belongs to an experts module."""
    return _INSIDE.match(name) is not None


def find_experts(tensors: Mapping[str, SourceTensor]) -> list[ExpertSource]:
    """All experts of a checkpoint, in the order of its tensors.

    Raises:
        SpecError: There are none.
        WeightsError: Lists every tensor inside experts modules that is not understood, and every incomplete expert.
    """
    found: dict[tuple[str, int], dict[str, Projection]] = {}
    problems: list[str] = []
    for name, tensor in tensors.items():
        inside = _INSIDE.match(name)
        if inside is None:
            continue
        projections = list(_projections(inside["module"], inside["rest"], tensor))
        problem = None if projections else f"{name} {list(tensor.shape)}: not understood as weights of experts"
        if projections and not tensor.is_float:
            problem = f"{name}: holds {tensor.dtype}, expected one of {', '.join(FLOATS)}"
        if problem:
            problems.append(problem)
        for expert, role, projection in projections:
            found.setdefault((inside["module"], expert), {})[role] = projection
    if not found and not problems:
        raise SpecError(
            "no experts in this checkpoint: no tensor lies in a module called 'experts'; is it a Mixture-of-Experts "
            "model?"
        )
    experts = [
        ExpertSource(module=module, index=index, projections={role: roles[role] for role in ROLES if role in roles})
        for (module, index), roles in found.items()
    ]
    problems += [problem for expert in experts if (problem := _shape_problem(expert)) is not None]
    problems += _gaps(experts)
    if problems:
        listed = "\n  ".join(problems[:20])
        raise WeightsError(f"{len(problems)} expert tensors or experts cannot be quantized:\n  {listed}")
    return experts


def require_sizes(experts: list[ExpertSource], storage: Storage, scheme: str) -> None:
    """Raise `SpecError` if the layout cannot store the experts' sizes; lists every size once."""
    problems = {
        problem
        for expert in experts
        for role, projection in expert.projections.items()
        for problem in _size_problems(role, projection.shape, storage)
    }
    if problems:
        raise SpecError(f"scheme {scheme!r} cannot store these experts:\n  " + "\n  ".join(sorted(problems)))


def _projections(module: str, rest: str, tensor: SourceTensor) -> Iterator[tuple[int, str, Projection]]:
    """Expert, role and projection of everything that one tensor holds; nothing if it is not understood."""
    single = _SINGLE.match(rest)
    if single and single["projection"] in _ROLE and len(tensor.shape) == 2:
        rows, columns = tensor.shape
        name = f"{module}.{rest.removesuffix('.weight')}"
        projection = Projection(name=name, source=tensor, index=(), shape=(rows, columns))
        yield int(single["expert"]), _ROLE[single["projection"]], projection
    if rest not in ("gate_up_proj", "up_proj", "down_proj") or len(tensor.shape) != 3:
        return
    experts, rows, columns = tensor.shape
    parts = {_ROLE[rest]: slice(0, rows)} if rest in _ROLE else {}
    if rest == "gate_up_proj" and rows % 2 == 0:
        parts = {"gate": slice(0, rows // 2), "up": slice(rows // 2, rows)}
    for expert in range(experts):
        for role, part in parts.items():
            yield (
                expert,
                role,
                Projection(
                    name=f"{module}.{expert}.{_NAME[role]}",
                    source=tensor,
                    index=(expert, part),
                    shape=(part.stop - part.start, columns),
                ),
            )


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
    roles = tuple(expert.projections)
    if roles not in (ROLES, ROLES[1:]):
        return f"{name}: has {', '.join(roles)}; expected gate, up and down, or up and down"
    shapes = {role: projection.shape for role, projection in expert.projections.items()}
    inner, hidden = shapes["up"]
    if shapes["down"] != (hidden, inner) or shapes.get("gate", (inner, hidden)) != (inner, hidden):
        listed = ", ".join(f"{role} {list(shape)}" for role, shape in shapes.items())
        # Input x output never fits output x input in both tensors of a gated expert.
        return f"{name}: {listed}; expected gate and up [I, H] and down [H, I], output x input"
    return None


def _size_problems(role: str, shape: tuple[int, int], storage: Storage) -> Iterator[str]:
    rows, columns = shape
    if rows % storage.row_multiple:
        yield f"{role}: {rows} outputs, expected a multiple of {storage.row_multiple}"
    multiple = storage.column_multiple if role != "down" else max(storage.column_multiple, storage.down_column_multiple)
    if columns % multiple:
        yield f"{role}: {columns} inputs, expected a multiple of {multiple}"
