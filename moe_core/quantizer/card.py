"""The model card of a quantized checkpoint; that of the model it was made from would describe another one."""

from __future__ import annotations

from moe_core.quantizer.input_amax import ModelInputs
from moe_core.quantizer.output import WrittenCheckpoint
from moe_core.quantizer.words import WRITTEN

#: Names of the card, and of the card of the model that was quantized, which lies beside it.
CARD, BASE_CARD = "README.md", "BASE_README.md"

_TEXT = """\
# {base}, experts in {scheme}

The Mixture-of-Experts model `{base}` with its experts quantized to `{scheme}` in the layout of {ecosystem}. Everything
else is as it was.

| | bytes before | bytes now |
|---|--:|--:|
| {written.num_experts} experts | {written.expert_bytes_before:,} | {written.expert_bytes_after:,} |
| other weights | {written.kept_bytes:,} | {written.kept_bytes:,} |

```
moe-core quantize --model DIR --output DIR --scheme {scheme} --ecosystem {ecosystem}{scales}
```

How far its predictions are from those of `{base}` was not measured; this does:

```
moe-core eval --model DIR --text FILE --against DIR
```
"""
_BASE = f"""
[{BASE_CARD}]({BASE_CARD}) is the card of the model before: its figures and sizes are of that model.
"""


def model_card(base: str, written: WrittenCheckpoint, inputs: ModelInputs | None, *, has_base_card: bool) -> str:
    """What was done to which model, in Markdown.

    Args:
        base: Name of the model that was quantized.
        written: What became of it.
        inputs: As of `quantize_checkpoint`.
        has_base_card: Whether the card of the model before lies beside it.
    """
    calibrated = " --calibrate FILE" if inputs and inputs.layers else ""
    given = " --input-scale NUMBER" if inputs and inputs.default is not None else ""
    text = _TEXT.format(
        base=base,
        scheme=written.stored.scheme.label,
        ecosystem=next(name for name, layouts in WRITTEN.items() if written.stored in layouts),
        scales=calibrated + given,
        written=written,
    )
    return text + _BASE if has_base_card else text
