"""The model card of a quantized checkpoint; that of the model it was made from would describe another one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from moe_core.errors import counted
from moe_core.quantizer.input_amax import ModelInputs
from moe_core.quantizer.output import WrittenCheckpoint
from moe_core.quantizer.words import WRITTEN

#: Name of the card.
CARD = "README.md"
#: What is put in front of the names of the cards of the model that was quantized, which lie beside it.
_BASE_MARK = "BASE_"
#: A card of any language, and those of models before; no code.
_CARD_NAME = re.compile(rf"(?:{_BASE_MARK})*readme(?:(?:[._-].*)?\.(?:md|markdown|rst|txt))?", re.IGNORECASE)
#: Where a card names a file beside it.
_LINK = re.compile(rb"""(\]\((?:\./)?|(?:href|src)=["'](?:\./)?)([^)"'\s#]+)""")

_TEXT = """\
# {base}, experts in {scheme}

The Mixture-of-Experts model `{base}` with its experts quantized to `{scheme}` in the layout of {ecosystem}. Everything
else is as it was.

| | bytes before | bytes now |
|---|--:|--:|
| {experts} | {written.expert_bytes_before:,} | {written.expert_bytes_after:,} |
| other weights | {written.kept_bytes:,} | {written.kept_bytes:,} |

```
moe-core quantize --model DIR --output DIR --scheme {scheme} --ecosystem {ecosystem}{scales}
```

How far its predictions are from those of `{base}` was not measured; this does:

```
moe-core eval --model DIR --text FILE --against DIR
```
"""
_BASE = """
The model before is described in {links}: figures and sizes there are of that model.
"""


def moved_cards(names: Iterable[str]) -> dict[str, str]:
    """Names of files that describe a model -> what they are called beside the card of the one that is made of it."""
    return {name: f"{_BASE_MARK}{name}" for name in names if _CARD_NAME.fullmatch(name)}


def with_links(card: bytes, moved: Mapping[str, str]) -> bytes:
    """A card whose links follow the files of `moved_cards`; everything else in it is left as it is."""
    names = {old.encode(): new.encode() for old, new in moved.items()}
    return _LINK.sub(lambda link: link[1] + names.get(link[2], link[2]), card)


def model_card(base: str, written: WrittenCheckpoint, inputs: ModelInputs | None, base_cards: Iterable[str]) -> str:
    """What was done to which model, in Markdown.

    Args:
        base: Name of the model that was quantized.
        written: What became of it.
        inputs: As of `quantize_checkpoint`.
        base_cards: Names of all cards of models before that lie beside it.
    """
    calibrated = " --calibrate FILE" if inputs and inputs.layers else ""
    given = " --input-scale NUMBER" if inputs and inputs.default is not None else ""
    text = _TEXT.format(
        base=base,
        scheme=written.stored.scheme.label,
        ecosystem=next(name for name, layouts in WRITTEN.items() if written.stored in layouts),
        scales=calibrated + given,
        experts=counted(written.num_experts, "expert"),
        written=written,
    )
    # Those of the model before that one are its own business.
    own = [name for name in base_cards if not name.upper().startswith(2 * _BASE_MARK)]
    return text + _BASE.format(links=", ".join(f"[{name}]({name})" for name in own)) if own else text
