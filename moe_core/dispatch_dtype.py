"""The rules for the dtype in which tokens reach the experts.

Always inside what the dispatcher sends and the runner reads; a pin outside it is an error, never a
substitute, except for two documented adjustments. Order: pin, deprecated variable, the scheme's input global
scale, the runner's preference for this mode (the order of its `reads`).
"""

from __future__ import annotations

from moe_core.findings import DtypeChoice, Reason
from moe_core.request import LayerRequest
from moe_core.specs import DispatcherSpec, RunnerSpec, TokenDtype
from moe_core.vocabulary import FLOAT_DTYPES

#: (device type, pinned dtype) -> dtype used instead, where it can be sent and read.
ADJUSTMENTS = {("npu", "fp8"): "int8", ("cuda", "int8"): "fp8"}


def candidates(request: LayerRequest, dispatcher: DispatcherSpec | None, runner: RunnerSpec) -> tuple[TokenDtype, ...]:
    """What can be sent and read, in the runner's order; float tokens only in the layer's own dtype.

    Both members of a pair count: element type and scale layout. A fused runner has no dispatcher to agree with.
    """
    readable = tuple(t for t in runner.reads if t.dtype not in FLOAT_DTYPES or t.dtype == request.dtype)
    return readable if dispatcher is None else tuple(t for t in readable if t in dispatcher.sends)


def choose(
    request: LayerRequest,
    device_type: str,
    dispatcher: DispatcherSpec | None,
    runner: RunnerSpec,
    pin: str | None = None,
) -> DtypeChoice | Reason:
    """The dispatch dtype of one pair, or the reason why it has none.

    Args:
        request: The layer.
        device_type: Decides which documented adjustments exist.
        dispatcher: None for a fused runner.
        runner: The runner.
        pin: The dtype that the user pinned, if that pin holds here.
    """
    options = candidates(request, dispatcher, runner)
    if not options:
        return _nothing_in_common(request, dispatcher, runner)
    if pin is not None:
        return _pinned(request, device_type, options, pin)
    return _preferred(request, options, dispatcher, runner)


def _nothing_in_common(request: LayerRequest, dispatcher: DispatcherSpec | None, runner: RunnerSpec) -> Reason:
    readable = _listed(candidates(request, None, runner)) or f"{_listed(runner.reads)} (layer dtype {request.dtype})"
    sendable = _listed(dispatcher.sends) if dispatcher else f"a fused call in {request.dtype}"
    sent = {token.dtype for token in dispatcher.sends} if dispatcher else set()
    same = sorted(sent & {token.dtype for token in runner.reads} - set(FLOAT_DTYPES))
    hint = f"{' and '.join(same)}: the scale layouts differ" if same else ""
    return Reason("dispatch-dtype", f"the runner to read one of {sendable}", f"it reads {readable}", hint)


def _pinned(request: LayerRequest, device_type: str, options: tuple[TokenDtype, ...], pin: str) -> DtypeChoice | Reason:
    ignored = (
        ("deprecated bf16 variable ignored: a dispatch dtype is pinned",) if request.bf16_dispatch_variable else ()
    )
    exact = _first(options, pin)
    if exact is not None:
        return DtypeChoice(token_dtype=exact, rule="pin", notes=ignored)
    adjusted = ADJUSTMENTS.get((device_type, pin))
    other = _first(options, adjusted) if adjusted else None
    if other is None:
        hint = f"pin {' or '.join(dict.fromkeys(token.dtype for token in options))}, or none"
        return Reason("dispatch-dtype", f"pinned {pin}", f"only {_listed(options)} can be sent and read", hint)
    if request.strict:
        hint = f"pin {other.dtype}, or leave strict=True out"
        return Reason("dispatch-dtype", f"pinned {pin}", f"{device_type} uses {other} instead", hint)
    note = f"pinned {pin} is {other.dtype} on {device_type}"
    return DtypeChoice(token_dtype=other, rule="pin", requested=pin, notes=(*ignored, note))


def _preferred(
    request: LayerRequest, options: tuple[TokenDtype, ...], dispatcher: DispatcherSpec | None, runner: RunnerSpec
) -> DtypeChoice:
    wishes = [("variable", "bf16")] if request.bf16_dispatch_variable else []
    if request.quant.w13.has_input_global_scale:
        wishes.append(("input-global-scale", "nvfp4"))
    wishes += [("runner", token.dtype) for token in runner.reads if token.dtype not in FLOAT_DTYPES or token in options]
    # A dtype that two rules prefer is impossible once, for the first of them.
    skipped: dict[str, str] = {}
    for rule, dtype in wishes:
        wanted = _first(options, dtype)
        if wanted is not None:
            return DtypeChoice(token_dtype=wanted, rule=rule, notes=tuple(skipped.values()))
        why_not = _why_not(dtype, dispatcher, runner)
        skipped.setdefault(dtype, f"{dtype} (preferred by {rule}) is not possible: {why_not}")
    return DtypeChoice(token_dtype=options[0], rule="runner", notes=tuple(skipped.values()))


def _why_not(dtype: str, dispatcher: DispatcherSpec | None, runner: RunnerSpec) -> str:
    read = tuple(token for token in runner.reads if token.dtype == dtype)
    sent = tuple(token for token in dispatcher.sends if token.dtype == dtype) if dispatcher else read
    if not read:
        return f"the runner reads only {_listed(runner.reads)}"
    if dispatcher is not None and not sent:
        return f"the dispatcher sends only {_listed(dispatcher.sends)}"
    return f"sent as {_listed(sent)}, read as {_listed(read)}" if sent != read else "the layer has another dtype"


def _first(options: tuple[TokenDtype, ...], dtype: str) -> TokenDtype | None:
    return next((token for token in options if token.dtype == dtype), None)


def _listed(tokens: tuple[TokenDtype, ...]) -> str:
    return ", ".join(map(str, tokens))
