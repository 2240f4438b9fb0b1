"""Acceptance cases from public bug reports: what a layer holds from call to call, and what runs beside it."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import reference_moe
import torch
from case_lib import T_, Lib, NotOffered, RefLib, case, expect
from cases_inputs import QUANTIZED_LIMIT, Spec, formats, layer, tensors
from reference_moe import F64


def spoil(ckpt: Spec) -> None:
    """Write something else over every tensor of a checkpoint."""
    for tensor in tensors(ckpt).values():
        tensor.view(torch.uint8).fill_(0x55)


# ---- what a layer holds ----------------------------------------------------------------------------------------
@case(
    "MC-151",
    "outputs",
    "An output stays what it was when the layer is called again",
    ["ROCm/torch_migraphx#247 p 2025-04-11", "vllm-project/vllm#50338 p 2026-07-29"],
    "Two calls returned the same memory; elsewhere the caller's buffer was returned and another one had been written.",
    "Outputs and scratch are allocated once and handed out each time.",
    "y1 = f(x1), y2 = f(x2), a call of another size: y1 is bit by bit what it was, and shares no memory with x1 or y2.",
)
def outputs_that_stay(library: Lib, comparisons: T_) -> None:
    other = layer(412)
    for name, spec in formats(layer(411)).items():
        built = library.build(**spec)
        first = built.forward(spec["x"], spec["ids"], spec["wts"])
        kept = first.clone()
        second = built.forward(other["x"], spec["ids"], spec["wts"])
        built.forward(other["x"][:2], spec["ids"][:2], spec["wts"][:2])
        comparisons.same(f"{name}: kept", torch.equal(first, kept))
        memory = {tensor.untyped_storage().data_ptr() for tensor in (first, second, spec["x"])}
        comparisons.same(f"{name}: memory of their own", len(memory) == 3)


@case(
    "MC-152",
    "threads",
    "Two micro-batches in two threads do not disturb each other",
    ["vllm-project/vllm#29219 p 2025-11-22", "1bit-MONSTER/1bit-MONSTER#1342 i 2026-08-01"],
    "A product read the buffer that it was writing; with two batches in flight they share such buffers.",
    "Scratch memory belongs to the layer, not to the call.",
    "one layer, four threads, ten calls each: every output is bit by bit that of a call alone.",
)
def calls_in_threads(library: Lib, comparisons: T_) -> None:
    for name, spec in formats(layer(413, T=12)).items():
        built = library.build(**spec)
        calls = [[spec[part][i : i + 3] for part in ("x", "ids", "wts")] for i in range(0, 12, 3)]
        alone = [built.forward(*call) for call in calls]
        different: list[int] = []

        def work(number: int, built: Any = built, calls: Any = calls, alone: Any = alone, bad: Any = different) -> None:
            for _ in range(10):
                if not torch.equal(built.forward(*calls[number]), alone[number]):
                    bad.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        comparisons.same(name, not different or not library.deterministic, different)


@case(
    "MC-153",
    "loading",
    "A checkpoint's memory may be used again after loading",
    ["sgl-project/sglang#28676 p 2026-06-18"],
    "After a weight update a cache pointed at memory that had been given away: the log-probabilities were far off.",
    "Part of the prepared weights, or of what prepares them, is a view of what was loaded.",
    "build, overwrite the checkpoint, run; reload, overwrite, run: the oracle's answer each time, in every format.",
)
def memory_of_checkpoints(library: Lib, comparisons: T_) -> None:
    others = formats(layer(415))
    for name, spec in formats(layer(414)).items():
        other = others[name]
        dtypes = (torch.float64, torch.bfloat16) if name == "plain" else (torch.float64,)
        for dtype in dtypes:
            stored = [_cast(ckpt, dtype) for ckpt in (spec["ckpt"], other["ckpt"])]
            wanted = [expect({**spec, "ckpt": ckpt}) for ckpt in stored]
            built = library.build(**{**spec, "ckpt": stored[0]})
            spoil(stored[0])
            inputs = spec["x"], spec["ids"], spec["wts"]
            run = lambda built=built, inputs=inputs: built.forward(*inputs)  # noqa: E731
            comparisons.close(f"{name}, {dtype}: built", run, wanted[0], QUANTIZED_LIMIT)
            built.reload(stored[1])
            spoil(stored[1])
            comparisons.close(f"{name}, {dtype}: reloaded", run, wanted[1], QUANTIZED_LIMIT)


def _cast(ckpt: Spec, dtype: torch.dtype) -> Spec:
    """A copy with its unquantized weights in `dtype`."""
    copies = {name: value.clone() for name, value in tensors(ckpt).items()}
    return {**ckpt, **{name: copy.to(dtype) if copy.dtype == F64 else copy for name, copy in copies.items()}}


@case(
    "MC-154",
    "reload",
    "Reloading keeps every tensor where it was",
    ["vllm-project/vllm#40390 p 2026-04-29"],
    "A captured graph went on with the old weights: the update had put the new ones into other memory.",
    "Preparing makes new tensors and binds them in place of the old.",
    "the addresses of all parameters before and after a reload are the same, and the answer is the new weights'.",
)
def addresses_of_parameters(library: Lib, comparisons: T_) -> None:
    others = formats(layer(417))
    for name, spec in formats(layer(416)).items():
        other = others[name]
        built = library.build(**spec)
        before = [parameter.data_ptr() for parameter in built.parameters()]
        built.reload(other["ckpt"])
        comparisons.same(f"{name}: addresses", before == [parameter.data_ptr() for parameter in built.parameters()])
        wanted = expect({**spec, "ckpt": other["ckpt"]})
        run = lambda built=built, spec=spec: built.forward(spec["x"], spec["ids"], spec["wts"])  # noqa: E731
        comparisons.close(f"{name}: answer", run, wanted, QUANTIZED_LIMIT, wrong=expect(spec))


@case(
    "MC-155",
    "reload",
    "A reload that does not fit changes nothing",
    ["vllm-project/vllm#35366 p 2026-02-26", "NVIDIA-NeMo/Automodel#2682 p 2026-06-21"],
    "16-bit weights were copied into bytes and cut down to integers; elsewhere they went into a buffer nobody reads.",
    "copy_ converts whatever it is given.",
    "an mxfp4 layer given bf16 weights, an int8 layer given one expert less: an error, and the same bits as before.",
)
def reloads_that_do_not_fit(library: Lib, comparisons: T_) -> None:
    specs = formats(layer(418), "mxfp4", "int8")
    for name, bad in (("mxfp4", "16-bit weights"), ("int8", "an expert less")):
        spec = specs[name]
        built = library.build(**spec)
        inputs = spec["x"], spec["ids"], spec["wts"]
        before = built.forward(*inputs).clone()
        changed = {"w13": layer(419)["ckpt"]["w13"].bfloat16()}
        if name == "int8":
            changed = {key: value[:3] for key, value in tensors(spec["ckpt"]).items()}
        comparisons.raises(f"{name}, {bad}", lambda b=built, s=spec, c=changed: b.reload({**s["ckpt"], **c}))
        comparisons.same(f"{name}: as before", torch.equal(built.forward(*inputs), before))


@case(
    "MC-156",
    "reload",
    "A reload reaches every copy of an expert, with its scales",
    [
        "PrimeIntellect-ai/prime-rl#3583 p 2026-09-18",
        "sgl-project/sglang#17158 p 2026-01-15",
        "vllm-project/vllm#34646 i 2026-02",
    ],
    "After balancing, updates went to where experts had been before; block scales were left out of the move.",
    "A reload speaks of experts, and the layer holds places.",
    "4 experts in 7 places, every format: after a reload the answer is that of the new weights alone.",
)
def copies_of_experts(library: Lib, comparisons: T_) -> None:
    places = {"phys_to_log": [3, 0, 1, 2, 0, 3, 0]}
    others = formats(layer(421))
    for name, spec in formats(layer(420)).items():
        other = others[name]
        built = library.build(**spec, eplb=places)
        built.reload(other["ckpt"])
        wanted = expect({**spec, "ckpt": other["ckpt"]})
        run = lambda built=built, spec=spec: built.forward(spec["x"], spec["ids"], spec["wts"])  # noqa: E731
        comparisons.close(name, run, wanted, QUANTIZED_LIMIT, wrong=expect(spec))


# ---- what runs beside it ---------------------------------------------------------------------------------------
@case(
    "MC-157",
    "precision",
    "An fp32 layer computes in fp32, under autocast and beside other default dtypes",
    ["huggingface/transformers#43828 i 2026-02-08"],
    "Under autocast a grouped product met operands of two dtypes; elsewhere fp32 experts were lowered without a word.",
    "Some operations of a layer are on autocast's list and others are not.",
    "plain and mxfp4 in fp32: within 1e-5, alone, under bf16 autocast, and with fp16 as the default dtype.",
)
def layers_of_fp32(library: Lib, comparisons: T_) -> None:
    for name, stored in formats(layer(422), "plain", "mxfp4").items():
        spec = {**stored, "dtype": "float32"}
        wanted = expect(spec)
        rounded = reference_moe.to_bf16(wanted)
        for what, context in (
            ("alone", contextlib.nullcontext()),
            ("autocast", torch.autocast(library.device, torch.bfloat16)),
            ("default fp16", _default_dtype(torch.float16)),
        ):
            with context:
                output = library.run(**spec)
            comparisons.close(f"{name}, {what}", lambda output=output: output, wanted, 1e-5, wrong=rounded)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@case(
    "MC-158",
    "inference mode",
    "A layer built in inference mode works outside, and the other way round",
    ["vllm-project/vllm#40390 p 2026-04-29"],
    "Weights that were made in inference mode cannot be written to later, so updates fail long after the start.",
    "Tensors remember the mode they were made in.",
    "build in inference mode, then run and reload outside; and the reverse: the oracle's answer each time.",
)
def inference_mode(library: Lib, comparisons: T_) -> None:
    if isinstance(library, RefLib):
        raise NotOffered
    others = formats(layer(424), "plain", "fp8", "mxfp4")
    for name, spec in formats(layer(423), *others).items():
        for inside in (True, False):
            with torch.inference_mode(inside):
                built = library.build(**spec)
            with torch.inference_mode(not inside):
                built.reload(others[name]["ckpt"])
                output = built.forward(spec["x"], spec["ids"], spec["wts"]).clone()
            what = f"{name}, built {'inside' if inside else 'outside'}"
            wanted = expect({**spec, "ckpt": others[name]["ckpt"]})
            comparisons.close(what, lambda output=output: output, wanted, QUANTIZED_LIMIT)


@case(
    "MC-159",
    "torch.compile",
    "A compiled quantized layer takes batches of other sizes",
    ["pytorch/torchtitan#2369 p 2026-02-11", "sgl-project/sglang-jax#1540 p 2026-08-21"],
    "A bucket whose share of tokens is odd did not compile; elsewhere the second batch size broke the graph.",
    "Sizes become constants of the graph, or must fill a tile.",
    "int8 layer compiled once (aot_eager, no graph break): 7, 3 and 1 tokens and none give the oracle's rows.",
)
def compiled_for_other_sizes(library: Lib, comparisons: T_) -> None:
    spec = formats(layer(425, T=7), "int8")["int8"]
    built = library.build(**spec)
    compiled = built.forward
    if not isinstance(library, RefLib):
        compiled = torch.compile(built.forward, fullgraph=True, backend="aot_eager")
    for count in (7, 3, 1, 0):
        inputs = spec["x"][:count], spec["ids"][:count], spec["wts"][:count]
        wanted = expect(spec, *inputs)
        comparisons.close(f"{count} tokens", lambda inputs=inputs: compiled(*inputs), wanted, QUANTIZED_LIMIT)
