"""Sizes of layers, by the names of models that have them."""

from __future__ import annotations

from typing import Any

import attrs

from moe_core.request import LayerRequest


@attrs.frozen
class LayerShape:
    """The sizes of a layer's routed experts.

    Attributes:
        num_experts: Experts of the layer.
        top_k: Experts per token.
        hidden_size: H.
        intermediate_size: I of one expert.
        published: Name of the scheme in which the model's weights are published, in `moe_core.quant.SCHEMES`; the sizes
            are asked about in any.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    published: str = "bf16"

    @property
    def sizes(self) -> dict[str, Any]:
        """The fields of a `LayerRequest` that are sizes."""
        return {name: value for name, value in attrs.asdict(self).items() if name != "published"}

    def request(self, **fields: Any) -> LayerRequest:
        """A layer of this size; `fields` are further ones of `LayerRequest`."""
        return LayerRequest(**self.sizes, **fields)


#: Sizes of models that people run.
SHAPES = {
    "qwen3-30b-a3b": LayerShape(128, 8, 2048, 768),
    "deepseek-v3": LayerShape(256, 8, 7168, 2048, published="fp8_block128"),
    "mixtral-8x7b": LayerShape(8, 2, 4096, 14336),
    "qwen3.5-397b-a17b": LayerShape(512, 10, 4096, 1024),
}
