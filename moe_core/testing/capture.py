"""Capture a forward and replay it: into a device graph, or on a CPU into a list of what torch was asked to do.

The list behaves as a device graph does: whatever Python decided or read while it was made stays as it was then.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from moe_core.payloads import Tensor
from moe_core.testing.compare import Tokens
from moe_core.testing.memory import PoisonedMemory, same_bits
from moe_core.testing.outcome import NotRun, require

#: A forward, to be captured.
Forward: TypeAlias = Callable[[Tokens], Tensor]
#: Runs what was captured once more, on what lies in the same memory now.
Replay: TypeAlias = Callable[[], Tensor]
#: `(forward, tokens, other tokens of the same number to warm up with) -> replay`.
Capture: TypeAlias = Callable[[Forward, Tokens, Tokens], Replay]

_WARM_UPS = 3
#: Problems that a message lists.
_SHOWN = 3


def device_graph(forward: Forward, tokens: Tokens, others: Tokens) -> Replay:
    """Capture into a CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            forward(others)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward(tokens)

    def replay() -> Tensor:
        graph.replay()
        torch.cuda.synchronize()
        return output

    return replay


def emulated_graph(forward: Forward, tokens: Tokens, others: Tokens) -> Replay:
    """Capture without a device: record the operations of a forward, and do them again.

    Host reads of data, shapes that depend on it, and tensors that are made of Python values in every forward are
    failures. Whatever checks a forward makes on the host it leaves out here, as it does under `torch.compile`
    (`torch.compiler.is_compiling()`).

    Raises:
        ConformanceError: The forward cannot be captured; the text has the place.
        NotRun: Nothing is wrong so far, but a part of the work is done by kernels that torch does not see.
    """
    forward(others)
    with _as_if_compiled():
        forward(others)
    recorded = _record(forward, tokens)
    # It may lie in a buffer that the next forward writes to.
    output = recorded.output.clone()
    _require_fixed(recorded, _record(forward, others))
    if not same_bits(recorded.replay(), output):
        reason = "some kernels are called past torch's dispatcher; nothing reads data on the host"
        raise NotRun(f"{reason}, a replay needs the device: run this check on it")
    return recorded.replay


#: Device type -> how to capture there.
CAPTURES: dict[str, Capture] = {"cuda": device_graph, "cpu": emulated_graph}


@contextlib.contextmanager
def _as_if_compiled() -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()`: what torch's own export sets while it traces."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@attrs.frozen(eq=False)
class _Call:
    """One operation: what was called, and the very tensors that went in and came out."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def form(self) -> tuple[object, ...]:
        """All that must not depend on data: the operation, its numbers, and the shapes of its tensors."""
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return (str(self.function), *(_form(leaf) for leaf in leaves))


def _form(leaf: object) -> object:
    if isinstance(leaf, torch.UntypedStorage):
        # Its text would be its data.
        return leaf.nbytes()
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)


@attrs.define(eq=False)
class _Recorded:
    """The operations of one forward, in order.

    Attributes:
        calls: The operations.
        problems: What a device graph would refuse, each with its place.
        output: The forward's result.
    """

    calls: list[_Call] = attrs.field(factory=list)
    problems: list[str] = attrs.field(factory=list)
    output: Any = None

    def replay(self) -> Tensor:
        """Do the same with what lies in the memory of the inputs now; unwritten memory is poisoned."""
        made: dict[int, Tensor] = {}

        def now(tensor: Tensor) -> Tensor:
            return made.get(id(tensor), tensor)

        with torch.no_grad(), PoisonedMemory():  # type: ignore[no-untyped-call]
            for call in self.calls:
                args, kwargs = tree_map_only(Tensor, now, (call.args, call.kwargs))
                results = tree_flatten(call.function(*args, **kwargs))[0]
                for then, result in zip(tree_flatten(call.result)[0], results, strict=True):
                    if isinstance(then, Tensor):
                        made[id(then)] = result
        return now(self.output)


def _record(forward: Forward, tokens: Tokens) -> _Recorded:
    recorded = _Recorded()
    with _as_if_compiled(), torch.no_grad(), _Reads(recorded), _Operations(recorded):
        recorded.output = forward(tokens)
    return recorded


def _require_fixed(recorded: _Recorded, again: _Recorded) -> None:
    """Nothing was read on the host, and other data made torch do the same."""
    problems = list(dict.fromkeys([*recorded.problems, *again.problems]))
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    require(not problems, f"a captured forward cannot do this: {'; '.join(problems[:_SHOWN])}{more}")
    forms = [[call.form for call in one.calls] for one in (recorded, again)]
    for first, second in zip(*forms, strict=False):
        require(first == second, f"what is done depends on data: {first} for some tokens, {second} for others")
    require(len(forms[0]) == len(forms[1]), f"what is done depends on data: {len(forms[0])} or {len(forms[1])} steps")


class _Reads(TorchFunctionMode):
    """Notes the reads that never reach torch's dispatcher."""

    _NAMES = ("tolist", "numpy", "__array__", "cpu")

    def __init__(self, recorded: _Recorded) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in self._NAMES:
            self._recorded.problems.append(f"Tensor.{name} reads data on the host, {_place()}")
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation."""

    def __init__(self, recorded: _Recorded) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded = recorded

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self._recorded.calls.append(_Call(function, args, kwargs or {}, result))
        problem = _problem(function, args, kwargs or {}, result)
        if problem:
            self._recorded.problems.append(f"{function.overloadpacket} {problem}, {_place()}")
        return result


def _problem(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> str:
    """Why a device graph cannot hold an operation, or ""."""
    aten = torch.ops.aten
    if torch.Tag.data_dependent_output in function.tags:
        return "reads data on the host"
    if function.overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        return "with a mask has a shape that depends on data" if masks else ""
    if torch.Tag.dynamic_output_shape in function.tags and kwargs.get("output_size") is None:
        return "has a shape that depends on data"
    if function.overloadpacket is aten.lift_fresh and result.dim():
        return "makes a tensor of Python values in every forward"
    return ""


def _place() -> str:
    """`function (file.py:12)` of whoever called torch."""
    own, libraries = Path(__file__), Path(torch.__file__).parent
    for frame in reversed(traceback.extract_stack()):
        file = Path(frame.filename)
        if file != own and libraries not in file.parents:
            return f"{frame.name} ({file.name}:{frame.lineno})"
    return "at an unknown place"
