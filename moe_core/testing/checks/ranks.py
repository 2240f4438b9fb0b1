"""Several ranks: unequal numbers of tokens and of experts, ranks without tokens, and one sum over all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from moe_core.declared import Candidate
from moe_core.environment import Environment
from moe_core.errors import MoeCoreError
from moe_core.payloads import ExpertGroup
from moe_core.placement import ExpertPlacement
from moe_core.testing.backend import Backend
from moe_core.testing.bench import Bench
from moe_core.testing.cells import Cell, cells_of
from moe_core.testing.checks.shares import placement_with_copies
from moe_core.testing.compare import Tokens, layer_mismatch
from moe_core.testing.outcome import ConformanceError, NotRun, require
from moe_core.testing.pairs import serves_one_rank
from moe_core.testing.ranks import TIMEOUT_SECONDS, RankError, run_on_ranks
from moe_core.testing.sizes import Sizes

#: Sizes of a group, the best first: no divisor of five experts, and few enough for a small machine.
GROUP_SIZES = (3, 2, 4)
#: Tokens of each rank: some, none, one, many.
_RAGGED = (4, 0, 1, 6)
#: Of the tokens of both forwards, one for each rank from these on.
_SEEDS = (50, 0)
#: What layers with little room say of how many tokens a rank brings: enough for all of them.
_FEW_TOKENS = 8
#: A layer may compile kernels of its own, or have them interpreted; this much longer than without layers.
_LAYER_SECONDS = 15.0


def group_sizes(pair: Candidate) -> tuple[int, ...]:
    """The numbers of ranks that both parts allow, the best first."""
    parts = [part for part in (pair.dispatcher, pair.runner) if part is not None]
    limits = [limit for part in parts for limit in part.spec.limits if limit.field == "ep_size"]
    return tuple(size for size in GROUP_SIZES if all(limit.allows(size) for limit in limits))


def _placements(pair: Candidate) -> tuple[str, ...]:
    part = pair.runner if pair.dispatcher is None else pair.dispatcher
    return part.spec.token_placements


def takes_distributed_tokens(pair: Candidate) -> bool:
    """Whether each rank may bring its own tokens."""
    return bool(group_sizes(pair)) and "distributed" in _placements(pair)


def why_untried(pair: Candidate) -> str:
    """Why no check can run this pair on any machine, "" if one can."""
    if serves_one_rank(pair) or takes_distributed_tokens(pair):
        return ""
    *sizes, last = map(str, sorted(GROUP_SIZES))
    several = f"{', '.join(sizes)} or {last} with tokens of their own"
    return f"the kit starts one rank, or {several}: it takes neither"


def takes_replicated_tokens(pair: Candidate) -> bool:
    """Whether every rank may have all tokens."""
    return bool(group_sizes(pair)) and "replicated" in _placements(pair)


def check_replicated_ranks(bench: Bench) -> None:
    """Every rank has all tokens: the parts of the ranks add up to the answer, once, however experts are placed."""
    size = group_sizes(bench.cell.pair)[0]
    cell = attrs.evolve(bench.cell, ep_size=size, token_placement="replicated")
    for placement in _placements_of(cell):
        total, last = torch.zeros(()), None
        for rank in range(size):
            group = ExpertGroup(rank=rank, size=size)
            last = Bench(bench.backend, cell, group=group, placement=placement)
            total = total + last.run(last.tokens()).cpu().double()
        if last is not None:
            text = f"the sum over {size} ranks with {placement.kind} experts"
            last.require(last.tokens(), text, total)


def _placements_of(cell: Cell) -> list[ExpertPlacement]:
    """Experts in their order, dealt out, and in any slots with copies where the limits allow that."""
    found = [ExpertPlacement("contiguous"), ExpertPlacement("round_robin")]
    with contextlib.suppress(NotRun):
        found.append(placement_with_copies(cell))
    return found


def check_distributed_ranks(backend: Backend, pair: Candidate) -> None:
    """Each rank has its own tokens, one has none, experts are uneven: every rank gets its tokens' answers, twice.

    The second forward has something to do between dispatch and combine, so that it receives later than it sends.
    """
    transport = _transport(backend.device)
    if not backend.is_importable:
        raise NotRun(f"module {backend.module.__name__} has no file, so that no other process can import it")
    size = _size_here(pair, backend.device)
    cells = _rank_cells(backend, pair, size)
    layers = _layers(cells, _declared_room(pair, backend.device))
    benches = [Bench(backend, cell, sizes, placement=placement) for cell, sizes, placement in layers]
    arguments = (*backend.names, backend.environment, backend.device, layers)
    try:
        seconds = TIMEOUT_SECONDS + _LAYER_SECONDS * len(layers)
        answers = run_on_ranks(_outputs, [arguments] * size, transport, seconds)
    except TimeoutError as error:
        raise ConformanceError(f"{size} ranks, one without tokens, hang: {error}") from error
    # All of them: where one rank stops, the others only say that it has gone.
    raised = [
        f"rank {rank} of {size}, {_RAGGED[rank]} tokens: it raised {answer.text}"
        for rank, answer in enumerate(answers)
        if isinstance(answer, RankError)
    ]
    require(not raised, "; ".join(raised))
    for index, bench in enumerate(benches):
        for rank in range(size):
            for seed, output in zip(_SEEDS, answers[rank][index], strict=True):
                _compare(bench, rank, size, bench.tokens(_RAGGED[rank], seed=seed + rank), output)


def _size_here(pair: Candidate, device: str) -> int:
    """The best number of ranks that there are devices for; ranks share a CPU."""
    sizes = group_sizes(pair)
    if device == "cpu":
        return sizes[0]
    count = torch.accelerator.device_count()
    for size in sizes:
        if size <= count:
            return size
    raise NotRun(f"{min(sizes)} ranks need as many devices, found {count}")


def _declared_room(pair: Candidate, device: str) -> bool:
    """Whether a layer may have room for as many tokens as is declared.

    On a CPU kernels are emulated, and what makes room for all tokens has its experts go through all of it.
    """
    return device != "cpu" or pair.dispatcher is None or not pair.dispatcher.spec.needs_max_tokens


def _transport(device: str) -> str:
    """What torch.distributed sends through on a device type."""
    try:
        return dist.get_default_backend_for_device(device)
    except (RuntimeError, ValueError):
        # This torch does not know the device type, or nothing serves it.
        raise NotRun(f"no transport between ranks on device {device} is known here") from None


def _compare(bench: Bench, rank: int, size: int, tokens: Tokens, output: Any) -> None:
    where = f"{bench.cell}, {bench.request.placement.kind} experts: rank {rank} of {size}, {_RAGGED[rank]} tokens"
    problem = layer_mismatch(torch.from_numpy(output), bench.stored.reference, tokens, bench.tolerance)
    require(problem is None, f"{where}: {problem}")


def _rank_cells(backend: Backend, pair: Candidate, size: int) -> list[Cell]:
    """The first cell of every layer dtype, dispatch dtype, phase and feature, and of every scheme that needs ranks."""
    alone = any(serves_one_rank(other) for other in backend.pairs if other.runner == pair.runner)
    first: dict[object, Cell] = {}
    for cell in cells_of(pair, size):
        scheme = None if alone else cell.quant
        first.setdefault((scheme, cell.dtype, cell.token_dtype, cell.phase, cell.feature), cell)
    return [cell for cell in first.values() if cell.token_dtype is not None]


def _layers(cells: Sequence[Cell], declared_room: bool) -> list[tuple[Cell, Sizes, ExpertPlacement]]:
    """Every cell, and the first one again with its experts elsewhere.

    At most the first layer's buffers are as large as is declared: the others differ from it in something else, and most
    of a large buffer is memory that nobody uses and emulations write.
    """
    plain = [(cell, ExpertPlacement()) for cell in cells]
    moved = [(cells[0], placement) for placement in _placements_of(cells[0])[1:]] if cells else []
    layers = [(cell, cell.base_sizes(), placement) for cell, placement in (*plain, *moved)]
    num_large = 1 if declared_room else 0
    few = [(cell, _with_few_tokens(sizes), placement) for cell, sizes, placement in layers[num_large:]]
    return layers[:num_large] + few


def _with_few_tokens(sizes: Sizes) -> Sizes:
    bound = sizes.max_tokens
    return sizes if bound is None else attrs.evolve(sizes, max_tokens=min(bound, _FEW_TOKENS))


def _outputs(
    group: ExpertGroup,
    plugin: str,
    companions: tuple[str, ...],
    environment: Environment,
    device: str,
    layers: list[tuple[Cell, Sizes, ExpertPlacement]],
) -> list[Any]:
    """A rank's job: its outputs of two forwards for each layer, as arrays."""
    backend = Backend(plugin, environment=environment, device=device, companions=companions)
    found = []
    for cell, sizes, placement in layers:
        bench = Bench(backend, cell, sizes, group=group, placement=placement)
        try:
            first, second = (bench.tokens(_RAGGED[group.rank], seed=seed + group.rank) for seed in _SEEDS)
            outputs = bench.run(first), bench.run(second, overlap=lambda: None)
        except MoeCoreError as error:
            error.add_note(f"cell {cell}, {placement.kind} experts")
            raise
        found.append([output.detach().double().cpu().numpy() for output in outputs])
    return found
