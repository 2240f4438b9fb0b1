"""Kept kernels are launched for the arguments of each call, and again only where Triton would choose them again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import TOLERANCE, layer, make_params, make_tokens, relative_error
from triton_layers import DEVICE

from moe_core.activation import SWIGLU

pytest.importorskip("triton", reason="needs triton")
from moe_core.kernels.triton import launch, sort_kernels
from moe_core.kernels.triton.combine import combine
from moe_core.kernels.triton.gemm import GroupedGemm
from moe_core.kernels.triton.ids import checked_ids
from moe_core.kernels.triton.one_token import OneToken
from moe_core.kernels.triton.sort import sort_slots
from moe_core.kernels.triton.tiles import Tile, VectorTile
from moe_core.kernels.triton.weights import GroupedWeight

#: The interpreter keeps nothing.
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")

EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 48, 32
#: Descriptors need rows of 16 bytes, and are not used for others.
TILES = [Tile(16, 32, 32), Tile(16, 32, 32, tma=True, tma_rows=True)]


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, no longer on 16 bytes."""
    room = tensor.new_empty(tensor.numel() + 1)
    return room[1:].view(tensor.shape).copy_(tensor)


def _wider(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with one unused element after each row."""
    room = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 1)
    return room[..., :-1].copy_(tensor)


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of wider rows."""
    room = tensor.new_empty(*tensor.shape, 2)
    return room[..., 0].copy_(tensor)


#: What may change between two calls, by name: which argument (0 to 2), and what becomes of it.
CHANGES: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "nothing": (0, torch.clone),
    "alignment of the rows": (0, _shifted),
    "strides of the rows": (0, _wider),
    "ids in 32 bits": (1, lambda ids: ids.int()),
    "alignment of the ids": (1, _shifted),
    "strides of the ids": (1, _spread),
    "weights in bf16": (2, lambda weights: weights.bfloat16()),
    "alignment of the weights": (2, _shifted),
    "strides of the weights": (2, _spread),
}


def _weights(params: dict[str, Any]) -> tuple[GroupedWeight, GroupedWeight]:
    return GroupedWeight(data=params["w13"].to(DEVICE)), GroupedWeight(data=params["w2"].to(DEVICE))


class _Layer:
    """Both GEMMs and what is around them, with everything kept that is kept between calls."""

    def __init__(self, params: dict[str, Any], tile: Tile) -> None:
        w13, w2 = _weights(params)
        self.tile, self.first, self.second = tile, GroupedGemm(w13, activation=SWIGLU), GroupedGemm(w2)

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        slots = sort_slots(ids, EXPERTS, self.tile.m)
        inside, rows = hidden.new_empty(ids.numel(), INNER), hidden.new_empty(ids.numel(), HIDDEN)
        self.first(hidden, slots.tiles, inside, self.tile, order=slots.order, top_k=TOP_K)
        self.second(_shifted(inside) if hidden.data_ptr() % 16 else inside, slots.tiles, rows, self.tile)
        return combine(rows, slots.row_map, weights, torch.bfloat16)


def _one_token(params: dict[str, Any], tile: Tile) -> OneToken:
    return OneToken(*_weights(params), SWIGLU, (VectorTile(4, 32), VectorTile(8, 32)))


def _ids(params: dict[str, Any], tile: Tile) -> Callable[..., None]:
    """Ids checked, below several limits and by several tables."""
    table = torch.arange(EXPERTS, device=DEVICE)
    tables = None, table, _shifted(table), table.int()

    def call(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        # One token is contiguous, whatever its stride.
        one = ids.repeat(1, 8)[:1, :TOP_K]
        for given in (ids, ids[:1], one, ids[:, :1], ids.repeat(16, 1).T.contiguous().T):
            for names in tables:
                checked_ids(given, EXPERTS, names)
            checked_ids(given, 16)

    return call


def _case(tokens: int) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    params = make_params(EXPERTS, HIDDEN, INNER, torch.bfloat16)
    return params, make_tokens(tokens, HIDDEN, EXPERTS, TOP_K, torch.bfloat16)


def _agree(make: Callable[..., Any], tokens: int, tile: Tile, index: int, change: Callable[..., Any]) -> None:
    params, first = _case(tokens)
    subject = make(params, tile)
    changed = list(_case(tokens)[1])
    changed[index] = change(changed[index].to(DEVICE))
    # The kept kernels, other ones, and the kept ones again.
    for arguments in (first, changed, first):
        got = subject(*(argument.to(DEVICE) for argument in arguments)).cpu()
        want = layer(*(argument.cpu() for argument in arguments), params, SWIGLU)
        assert relative_error(got, want) < TOLERANCE[torch.bfloat16]


@needs_gpu
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tile", TILES, ids=["pointers", "descriptors"])
def test_arguments_that_change_between_calls(tile: Tile, change: str) -> None:
    _agree(_Layer, 3, tile, *CHANGES[change])


@needs_gpu
@pytest.mark.parametrize("change", CHANGES)
def test_arguments_that_change_between_calls_of_one_token(change: str) -> None:
    _agree(_one_token, 1, TILES[0], *CHANGES[change])


@needs_gpu
def test_a_compiled_caller_and_an_eager_one() -> None:
    params, tokens = _case(3)
    subject = _Layer(params, TILES[0])
    arguments = [tensor.to(DEVICE) for tensor in tokens]
    want = layer(*tokens, params, SWIGLU)
    for call in (torch.compile(subject.__call__, backend="eager"), subject, subject):
        assert relative_error(call(*arguments).cpu(), want) < TOLERANCE[torch.bfloat16]


@needs_gpu
def test_results_of_another_dtype() -> None:
    params, (hidden, ids, _) = _case(3)
    gemm = GroupedGemm(_weights(params)[0])
    slots = sort_slots(ids.to(DEVICE), EXPERTS, 16)
    hidden = hidden.to(DEVICE)
    results = [hidden.new_empty(3 * TOP_K, 2 * INNER, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    for out in (*results, results[0]):
        gemm(hidden, slots.tiles, out, TILES[0], order=slots.order, top_k=TOP_K)
    # One rounding to bf16, at most half a unit of its last place.
    assert relative_error(results[0].cpu(), results[1].double().cpu()) < 2**-8


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_one_kernel_on_two_devices() -> None:
    _, tokens = _case(3)
    for index in (0, 1, 0):
        with torch.cuda.device(index):
            hidden, ids, weights = (tensor.to(f"cuda:{index}") for tensor in tokens)
            slots = sort_slots(ids, EXPERTS, 16)
            rows = hidden.repeat_interleave(TOP_K, dim=0)[slots.order.long()]
            got = combine(rows, slots.row_map, weights, torch.bfloat16)
        want = tokens[0].double() * tokens[2].double().sum(dim=1, keepdim=True)
        assert relative_error(got.cpu(), want) < TOLERANCE[torch.bfloat16]


# From here on, without a GPU: a stub of Triton says what is compiled and what is launched.


class _Kernel:
    """A function of `triton.jit`, and what it compiles to."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.function, self.packed_metadata = "function", "metadata"

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def call(*arguments: Any, **constants: Any) -> _Kernel:
            self.compiled.append((grid, arguments, constants))
            return self

        return call

    def run(self, *arguments: Any) -> None:
        self.launched.append(arguments)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Triton's driver and hooks, on device 0 and stream 70."""
    active = SimpleNamespace(device=0, get_current_stream=lambda device: 70 + device)
    active.get_current_device = lambda: active.device
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[]))
    monkeypatch.setattr(launch, "JITFunction", _Kernel)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "knobs", SimpleNamespace(runtime=hooks))
    return SimpleNamespace(active=active, hooks=hooks)


def _constants() -> tuple[dict[str, Any], dict[str, Any]]:
    return {"BM": 16, "BN": 32}, {"num_warps": 4}


def test_a_known_key_is_launched_with_the_arguments_of_its_call(stub: SimpleNamespace) -> None:
    kernel = _Kernel()
    launches = launch.Launches(kernel)
    launches("a", (5, 1, 1), (1, 2), _constants)
    launches("a", (6, 1, 1), (3, 4), pytest.fail)
    assert kernel.compiled == [((5, 1, 1), (1, 2), {"BM": 16, "BN": 32, "num_warps": 4})]
    # Placeholders for the two constants, not for the option.
    assert kernel.launched == [(6, 1, 1, 70, "function", "metadata", None, None, None, 3, 4, None, None)]


@pytest.mark.parametrize(("key", "device"), [("b", 0), ("a", 1)])
def test_another_key_or_device_is_compiled(stub: SimpleNamespace, key: str, device: int) -> None:
    kernel = _Kernel()
    launches = launch.Launches(kernel)
    launches("a", (1, 1, 1), (), _constants)
    stub.active.device = device
    launches(key, (1, 1, 1), (), _constants)
    assert (len(kernel.compiled), kernel.launched) == (2, [])
    launches(key, (1, 1, 1), (), _constants)
    assert kernel.launched[0][3] == 70 + device


def test_nothing_is_kept_under_torch_compile(stub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _Kernel()
    launches = launch.Launches(kernel)
    with monkeypatch.context() as inside:
        inside.setattr(torch.compiler, "is_compiling", lambda: True)
        for _ in range(2):
            launches("a", (1, 1, 1), (), _constants)
    launches("a", (1, 1, 1), (), _constants)
    assert (len(kernel.compiled), kernel.launched) == (3, [])


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_profilers_hear_of_every_launch(stub: SimpleNamespace, hook: str) -> None:
    kernel = _Kernel()
    launches = launch.Launches(kernel)
    launches("a", (1, 1, 1), (), _constants)
    getattr(stub.hooks, hook).calls.append("a profiler's")
    launches("a", (2, 1, 1), (), _constants)
    # By Triton's own launch, which calls hooks.
    assert (kernel.launched, kernel.compiled[1]) == ([], ((2, 1, 1), (None, None), {}))


def _specialized(argument: Any) -> Any:
    """What Triton looks at, argument by argument: type and alignment, and of integers whether they are 1."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return "1" if argument == 1 else argument % 16 == 0
    return type(argument)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[Any, ...], set[Any]]:
    """(kernel, key) -> the different things that Triton would look at; more than one of them is one too many."""
    found: dict[tuple[Any, ...], set[Any]] = {}
    ignored = {"num_row_tiles", *sort_kernels._SIZES}
    real = launch.Launches.__call__

    def record(self: Any, key: Any, grid: Any, arguments: Any, constants: Any) -> None:
        names = self._kernel.arg_names
        looked_at = tuple(_specialized(a) for n, a in zip(names, arguments, strict=False) if n not in ignored)
        values, options = constants()
        found.setdefault((self, key), set()).add((looked_at, *sorted({**values, **options}.items())))
        real(self, key, grid, arguments, constants)

    monkeypatch.setattr(launch.Launches, "__call__", record)
    return found


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests see wrong kernels there")
@pytest.mark.parametrize(("make", "tokens"), [(_Layer, 3), (_one_token, 1), (_ids, 3)])
def test_what_triton_looks_at_changes_the_key(make: Any, tokens: int, seen: dict[tuple[Any, ...], set[Any]]) -> None:
    params, arguments = _case(tokens)
    subject = make(params, TILES[0])
    for index, change in CHANGES.values():
        changed = list(arguments)
        changed[index] = change(changed[index])
        subject(*changed)
    assert len(seen) > 8
    for (owner, key), variants in seen.items():
        assert len(variants) == 1, (owner._kernel, key, variants)
