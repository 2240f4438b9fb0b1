"""A rank's share of one layer's experts, from a checkpoint or from canonical tensors, into canonical `RawWeights`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs
import torch

from moe_core.activation import ActivationSpec
from moe_core.errors import SpecError, WeightsError, counted, some_of
from moe_core.payloads import RawWeights, Tensor, bias_name
from moe_core.quant import LayerQuant, QuantScheme, StoredLayer, StoredScheme
from moe_core.request import LayerRequest
from moe_core.weights.bands import StoredLayout, part_shape
from moe_core.weights.checkpoint import InMemory, TensorSource
from moe_core.weights.filling import Filler
from moe_core.weights.names import Part, canonical_parts, find_parts, names_below
from moe_core.weights.reads import Read, ReadPlanner, left_over, matrix_size
from moe_core.weights.storages import TENSORS

#: `(bytes read, bytes to read)`, after each piece.
Progress: TypeAlias = Callable[[int, int], None]


def load_experts(
    source: TensorSource,
    module: str,
    request: LayerRequest,
    stored: StoredLayer,
    *,
    ep_rank: int = 0,
    tp_rank: int = 0,
    layout: StoredLayout | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> RawWeights:
    """Read one rank's experts of one layer; of every tensor only the part that this rank holds.

    Names, shapes and dtypes are checked before anything is read. Memory: the canonical tensors and one expert's piece.

    Args:
        source: An open `Checkpoint`.
        module: Dotted name of the experts module; `names.experts_module` finds it.
        request: The layer. `ep_size` and `tp_size` say how it is split.
        stored: How both projections are stored.
        ep_rank: This rank among the expert-parallel ones.
        tp_rank: This rank among the tensor-parallel ones; rank 0 alone gets `b2`, since their outputs are summed.
        layout: What names and shapes do not tell; default: rows as the activation says, `[out, in]`.
        device: Where the result lies.
        progress: Called after each piece.

    Returns:
        Canonical tensors of `request.local_experts(ep_rank)`, handed over. Activation scales are the largest over all
        experts, those of other ranks included: results must not depend on how experts are spread. Padding rows and
        columns of the last tensor-parallel ranks have codes that mean zero and scales of one.

    Raises:
        SpecError: A rank outside the request's sizes.
        WeightsError: Lists every tensor that is missing, misshapen, mistyped, unknown or of unusable content.
    """
    _check_request(request, stored, tp_rank)
    experts = request.local_experts(ep_rank)
    # The request says what is done to activations, and with it whether their scales are needed.
    asked = StoredLayer(
        attrs.evolve(stored.w13, scheme=request.quant.w13), attrs.evolve(stored.w2, scheme=request.quant.w2)
    )
    below = names_below(source, module)
    parts = find_parts(below, module, asked, gated=request.activation.gated, bias=request.bias)
    unknown = left_over(below, parts, request.num_experts)
    problems = [
        f"{name}: nothing of a layer with {counted(request.num_experts, 'expert')} reads it" for name in unknown
    ]
    job = _Job(
        source=source,
        where=module,
        names=below,
        parts=parts,
        request=request,
        num_experts=request.num_experts,
        experts=experts,
        tp_rank=tp_rank,
        layout=layout or StoredLayout(),
        device=device,
        progress=progress,
    )
    return RawWeights(tensors=_load(job, problems), handed_over=True)


def cut(
    tensors: dict[str, Tensor], request: LayerRequest, tp_rank: int = 0, *, layout: StoredLayout | None = None
) -> dict[str, Tensor]:
    """One tensor-parallel rank's share of canonical tensors, with scales in the blocks of `request.local_quant`.

    Args:
        tensors: Canonical tensors of the whole width I and any number of experts, in the order and the orientation
            that `layout` says; scales in the blocks of `request.quant`.
        request: The layer.
        tp_rank: The rank.
        layout: What the shapes do not tell; default as in `load_experts`. How `w13_scale` counts tiles of rows is
            needed where I is no multiple of them.

    Returns:
        Tensors as `load_experts` gives them, new ones but for weights of which the rank takes everything as it is.

    Raises:
        SpecError: A rank outside the request's sizes.
        WeightsError: As for `load_experts`.
    """
    stored = StoredLayer(StoredScheme(request.quant.w13), StoredScheme(request.quant.w2))
    _check_request(request, stored, tp_rank)
    given: dict[str, Any] = dict(tensors)
    strangers = [name for name, tensor in given.items() if not isinstance(tensor, torch.Tensor)]
    if strangers:
        raise WeightsError(f"canonical tensors: {some_of(strangers)} are no tensors; nothing was cut")
    parts = canonical_parts(stored, gated=request.activation.gated, bias=request.bias)
    count = next((tensor.shape[0] for tensor in tensors.values() if tensor.dim()), 1)
    names = frozenset(tensors)
    problems = [f"{name}: unknown" for name in left_over(names, parts, count)]
    device = next(iter(tensors.values())).device if tensors else "cpu"
    job = _Job(
        source=InMemory(tensors),
        where="canonical tensors",
        names=names,
        parts=parts,
        request=request,
        num_experts=count,
        experts=tuple(range(count)),
        tp_rank=tp_rank,
        layout=layout or StoredLayout(),
        device=device,
        kept=_unchanged(tensors, request, layout or StoredLayout()),
    )
    return _load(job, problems)


def _unchanged(tensors: dict[str, Tensor], request: LayerRequest, layout: StoredLayout) -> dict[str, Tensor]:
    """The weights that a copy would only double."""
    in_order = layout.rows in (None, request.activation.row_order) and layout.orientation == "out_in"
    return {name: tensors[name] for name in ("w13", "w2") if name in tensors and in_order and request.tp_size == 1}


def load_matrix(source: TensorSource, module: str, stored: StoredScheme) -> dict[str, Tensor]:
    """One matrix outside the experts (of attention, of a shared expert) as the canonical tensors of one expert's `w2`.

    Args:
        source: An open `Checkpoint`.
        module: Dotted name of the module that holds it.
        stored: How it is stored.

    Returns:
        `w2 [1, N, K]` in the stored form of the scheme, `w2_scale` and so on; a bias is not among them.

    Raises:
        WeightsError: Lists every tensor that is missing, misshapen, mistyped, unknown or of unusable content.
    """
    names = source.under(module)
    part = Part(
        projection="w2", halves=(0,), base=module, stacked=False, storage=stored, tensors=TENSORS[stored.storage]
    )
    rows, columns = matrix_size(source, names, part)
    try:
        request = LayerRequest(
            num_experts=1,
            top_k=1,
            hidden_size=rows,
            intermediate_size=columns,
            activation=ActivationSpec(gated=False),
            quant=LayerQuant(QuantScheme.from_name("bf16"), stored.scheme),
        )
    except SpecError as error:
        raise WeightsError(f"{module}: {error}") from error
    unknown = [name for name in left_over(names, [part], 1) if name != f"{module}.bias"]
    problems = [f"{name}: nothing of a matrix in storage {stored.storage} reads it" for name in unknown]
    job = _Job(
        source=source,
        where=module,
        names=names,
        parts=[part],
        request=request,
        num_experts=1,
        experts=(0,),
        tp_rank=0,
        layout=StoredLayout(),
        device="cpu",
    )
    return _load(job, problems)


@attrs.frozen(kw_only=True)
class _Job:
    """What is read from where for which rank, and what is given back unread; words as in `load_experts`."""

    source: TensorSource
    where: str
    names: frozenset[str]
    parts: Sequence[Part]
    request: LayerRequest
    num_experts: int
    experts: tuple[int, ...]
    tp_rank: int
    layout: StoredLayout
    device: torch.device | str
    progress: Progress | None = None
    kept: dict[str, Tensor] = attrs.field(factory=dict)


def _load(job: _Job, problems: list[str]) -> dict[str, Tensor]:
    """Plan, check, allocate, read; `problems` are those that are known before."""
    projections = frozenset(part.projection for part in job.parts)
    filler = Filler(job.request, job.experts, job.layout, job.device, projections)
    reads = _planned(job, problems)
    _refuse(job.where, problems)
    bias_dtypes = _bias_dtypes(job, reads)
    reads = [read for read in reads if read.name not in job.kept]
    filler.allocate(bias_dtypes, without=job.kept)
    # Weights last: where zero points fill padding they must be there, and bad scales are cheaper to find first.
    reads.sort(key=lambda read: (read.tensor.role == "weight", filler.order.get(read.expert, -1)))
    _run(job, reads, filler)
    _refuse(job.where, filler.problems)
    return {**filler.tensors, **job.kept}


def _planned(job: _Job, problems: list[str]) -> list[Read]:
    """Every read of a job, part by part; what is wrong is added to `problems`."""
    planner = ReadPlanner(
        source=job.source,
        names=job.names,
        num_experts=job.num_experts,
        layout=job.layout,
        takes_b2=job.tp_rank == 0,
        problems=problems,
    )
    # An expert that is placed twice is read once.
    experts = tuple(dict.fromkeys(job.experts))
    others = frozenset(range(job.num_experts)) - frozenset(experts) if experts else frozenset()
    reads: list[Read] = []
    for part in job.parts:
        try:
            shape = part_shape(part, job.request, job.tp_rank, job.layout)
        except WeightsError as error:
            problems.append(str(error))
            continue
        reads += planner.reads(part, shape, experts, others)
    return reads


def _bias_dtypes(job: _Job, reads: list[Read]) -> dict[str, set[torch.dtype]]:
    """`b13` and `b2` -> dtypes in which they are stored."""
    found: dict[str, set[torch.dtype]] = {}
    for read in reads:
        if read.tensor.role == "bias":
            found.setdefault(bias_name(read.part.projection), set()).add(job.source.dtype(read.name))
    return found


def _run(job: _Job, reads: list[Read], filler: Filler) -> None:
    total, done = _total(reads), 0
    last: tuple[str, tuple[slice, ...]] | None = None
    values = torch.empty(0)
    for read in reads:
        if read.tensor.role == "weight" and filler.problems:
            return
        if last is None or (read.name, read.slices) != last:
            values = job.source.read(read.name, read.slices)
            last = (read.name, read.slices)
            done += read.nbytes
        filler.put(values, read)
        if job.progress is not None:
            job.progress(done, total)


def _total(reads: list[Read]) -> int:
    """Bytes of all reads; two bands of alternating rows are one."""
    total = 0
    for before, read in zip([None, *reads], reads, strict=False):
        if before is None or (before.name, before.slices) != (read.name, read.slices):
            total += read.nbytes
    return total


def _check_request(request: LayerRequest, stored: StoredLayer, tp_rank: int) -> None:
    if not 0 <= tp_rank < request.tp_size:
        raise SpecError(f"tensor-parallel rank {tp_rank} is not in 0..{request.tp_size - 1}")
    for name, asked, found in (
        ("w13", request.quant.w13, stored.w13.scheme),
        ("w2", request.quant.w2, stored.w2.scheme),
    ):
        if _weights_of(asked) != _weights_of(found):
            raise WeightsError(f"{name}: the request has {asked} weights, the checkpoint {found}")


def _weights_of(scheme: QuantScheme) -> tuple[object, ...]:
    """What of a scheme is about stored weights."""
    return (
        scheme.weight_dtype,
        scheme.weight_block,
        scheme.weight_scale,
        scheme.global_scale,
        scheme.zero_point,
    )


def _refuse(where: str, problems: list[str]) -> None:
    if problems:
        raise WeightsError.listing(f"{where}: the weights do not fit; nothing was loaded:", problems)
