"""The fields that AutoRound has for one layer, as a scheme and its storage."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from moe_core.quant.hf.fields import look_up, text, whole_number
from moe_core.quant.hf.weight import Weight
from moe_core.quant.known import NVFP4, NVFP4_W4A16
from moe_core.quant.scheme import PER_TENSOR, WHOLE
from moe_core.quant.stored import StoredScheme

#: What an entry of `extra_config` may say, and the configuration for all layers.
SCHEME_FIELDS = (
    "bits",
    "group_size",
    "sym",
    "data_type",
    "act_bits",
    "act_group_size",
    "act_sym",
    "act_data_type",
    "act_dynamic",
    "super_bits",
    "super_group_size",
    "rotation_config",
    "rotation_configs",
)
#: How values were found, who wrote them, the KV cache, and which classes of layers were looked at.
DESCRIBING = (
    "amp",
    "batch_size",
    "dataset",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "gradient_accumulate_steps",
    "iters",
    "low_gpu_mem_usage",
    "lr",
    "minmax_lr",
    "nsamples",
    "provider",
    "scale_dtype",
    "seqlen",
    "static_attention_dtype",
    "static_attention_granularity",
    "static_kv_dtype",
    "static_kv_granularity",
    "supported_types",
    "train_bs",
)
#: From so many bits on nothing is quantized.
FULL_BITS = 16

#: Layouts of integers, as words of `packing_format`; beside them stand words that name a kernel.
_LAYOUTS = {"auto_gptq": "gptq", "gptq": "gptq", "gptqmodel": "gptq_v2", "auto_awq": "awq", "awq": "awq"}
_KERNELS = ("cuda", "exllamav2", "gemm", "marlin", "triton", "tritonv2")
#: Both roundings of scales are stored alike.
_MX = ("mx_fp", "mx_fp_rceil")
#: Until this version the writer that needs no model subtracted one from zero points whatever it declared.
_DECLARES_RIGHTLY = (0, 16)


@attrs.frozen
class Layer:
    """One layer's `fields`, and those of the whole `config` that are not a layer's."""

    fields: Mapping[str, Any]
    config: Mapping[str, Any]
    weight: Weight

    def read(self) -> StoredScheme:
        """The scheme of a quantized layer, and its storage."""
        for field in ("super_bits", "super_group_size", "rotation_config", "rotation_configs"):
            if self.fields.get(field):
                raise self.weight.error(f"{field} {self.fields[field]!r} changes numbers and is not read")
        look_up(self.fields, "act_sym", dict.fromkeys((None, True)), self.weight)
        readers = {None: Layer._integers, "int": Layer._integers, "nv_fp": Layer._nvfp4, "fp": Layer._fp8}
        return look_up(self.fields, "data_type", {**readers, **dict.fromkeys(_MX, Layer._mx)}, self.weight)(self)

    def _integers(self) -> StoredScheme:
        """Groups of integers without rounded activations, symmetric unless `sym` says otherwise."""
        weight = self.weight
        dtype = look_up(self.fields, "bits", {4: "int4", 8: "int8"}, weight)
        if self._act_bits() is not None:
            raise weight.error(f"int weights with act_bits {self.fields['act_bits']} are not read")
        symmetric = look_up(self.fields, "sym", {None: True, True: True, False: False}, weight)
        storage = self._layout(symmetric)
        if (storage, dtype) == ("awq", "int8"):
            raise weight.error("packing_format of awq is read with 4 bits, got 8")
        scheme = weight.scheme(
            weight_dtype=dtype, weight_block=(1, self._group()), weight_scale="fp32", zero_point=not symmetric
        )
        return StoredScheme(scheme, storage)

    def _layout(self, symmetric: bool) -> str:
        """Word of `STORAGES` for integers."""
        word = self._packing() or "auto"
        head, *parts = ["auto_round", "auto_gptq"] if word == "auto" else word.split(":")
        layouts = [part for part in parts if part in _LAYOUTS]
        if head != "auto_round" or len(layouts) > 1 or not {*parts} <= {*_LAYOUTS, *_KERNELS}:
            known = ", ".join(("auto_round", *(f"auto_round:{layout}" for layout in _LAYOUTS)))
            raise self.weight.error(f"packing_format {word!r} of integers is not read; known: {known}")
        declared = _LAYOUTS[layouts[0]] if layouts else "gptq_v2"
        is_model_free = look_up(self.config, "model_free", {None: False, False: False, True: True}, self.weight)
        return self._model_free_layout(symmetric) if is_model_free and declared != "awq" else declared

    def _model_free_layout(self, symmetric: bool) -> str:
        """Of the writer that needs no model, which packs by the layer and declares by the whole."""
        if symmetric:
            return "gptq"
        version = text(self.config, "autoround_version", self.weight)
        found = re.match(r"(\d{1,9})\.(\d{1,9})(?!\d)", version or "")
        if found is None:
            raise self.weight.error(
                "model_free with zero points: whether they are stored less one follows from autoround_version, which "
                f"is {version!r}"
            )
        return "gptq_v2" if (int(found[1]), int(found[2])) >= _DECLARES_RIGHTLY else "gptq"

    def _mx(self) -> StoredScheme:
        """OCP MX, 4 or 8 bits, with activations of either or left alone."""
        weight = self.weight
        self._check_packing("auto_round:llm_compressor")
        look_up(self.fields, "group_size", {32: None}, weight)
        dtypes = {4: "fp4", 8: "fp8"}
        dtype = look_up(self.fields, "bits", dtypes, weight)
        activations: dict[str, Any] = {}
        if self._act_bits() is not None:
            look_up(self.fields, "act_data_type", dict.fromkeys(_MX), weight)
            look_up(self.fields, "act_group_size", dict.fromkeys((None, 32)), weight)
            look_up(self.fields, "act_dynamic", dict.fromkeys((None, True)), weight)
            activations = {
                "activation_dtype": look_up(self.fields, "act_bits", dtypes, weight),
                "activation_scaling": "dynamic",
                "activation_group": 32,
                "activation_scale": "e8m0",
            }
        scheme = weight.scheme(weight_dtype=dtype, weight_block=(1, 32), weight_scale="e8m0", **activations)
        return StoredScheme(scheme, "compressed_tensors_mxfp4" if dtype == "fp4" else "scaled")

    def _nvfp4(self) -> StoredScheme:
        weight = self.weight
        self._check_packing("auto_round:llm_compressor")
        look_up(self.fields, "group_size", {16: None}, weight)
        look_up(self.fields, "bits", {4: None}, weight)
        if self._act_bits() is None:
            return StoredScheme(NVFP4_W4A16, "compressed_tensors_nvfp4")
        look_up(self.fields, "act_bits", {4: None}, weight)
        look_up(self.fields, "act_data_type", {"nv_fp4_with_static_gs": None}, weight)
        look_up(self.fields, "act_group_size", dict.fromkeys((None, 16)), weight)
        return StoredScheme(NVFP4, "compressed_tensors_nvfp4")

    def _fp8(self) -> StoredScheme:
        """e4m3 per tensor, channel or tile."""
        weight = self.weight
        self._check_packing(None, "fp8", "auto_round:fp8", "auto_round:fp8_static")
        look_up(self.config, "fmt", dict.fromkeys((None, "e4m3")), weight)
        look_up(self.fields, "bits", {8: None}, weight)
        block = self._fp8_block()
        scheme = weight.scheme(
            weight_dtype="fp8", weight_block=block, weight_scale="fp32", **self._fp8_activations(block[1])
        )
        return StoredScheme(scheme, "scaled")

    def _fp8_block(self) -> tuple[int, int]:
        """(rows, columns) of a weight that share a scale."""
        size, again = self.fields.get("group_size"), self.config.get("weight_block_size")
        if not isinstance(size, (list, tuple)):
            return look_up(self.fields, "group_size", {-1: (1, WHOLE), 0: (WHOLE, WHOLE)}, self.weight)
        if len(size) != 2 or not all(type(n) is int and n > 0 for n in size) or again not in (None, size):
            raise self.weight.error(
                f"expected group_size of tiles to be two whole numbers, and weight_block_size the same, got {size!r} "
                f"and {again!r}"
            )
        return (size[0], size[1])

    def _fp8_activations(self, width: int) -> dict[str, Any]:
        """The `activation_*` fields of a scheme; dynamic scales are those of `width` columns."""
        if self._act_bits() is None:
            return {}
        look_up(self.fields, "act_bits", {8: None}, self.weight)
        look_up(self.fields, "act_data_type", {"fp": None}, self.weight)
        dynamic = look_up(self.fields, "act_dynamic", {True: True, False: False}, self.weight)
        scheme = look_up(
            self.config, "activation_scheme", {None: dynamic, "dynamic": True, "static": False}, self.weight
        )
        if scheme is not dynamic:
            raise self.weight.error(f"act_dynamic {dynamic} and activation_scheme contradict each other")
        groups = {width: width} if dynamic else {0: PER_TENSOR}
        return {
            "activation_dtype": "fp8",
            "activation_scaling": "dynamic" if dynamic else "static",
            "activation_group": look_up(self.fields, "act_group_size", groups, self.weight),
            "activation_scale": "fp32",
        }

    def _act_bits(self) -> int | None:
        """Bits of activations that are rounded."""
        if self.fields.get("act_bits") is None:
            return None
        bits = whole_number(self.fields, "act_bits", self.weight)
        return bits if bits < FULL_BITS else None

    def _group(self) -> int:
        """Columns of integers that share a scale; `WHOLE` is all."""
        group = whole_number(self.fields, "group_size", self.weight)
        if group < 1 and group != WHOLE:
            raise self.weight.error(f"expected group_size of integers to be positive or {WHOLE}, got {group}")
        return group

    def _check_packing(self, *known: str | None) -> None:
        look_up({"packing_format": self._packing()}, "packing_format", dict.fromkeys(known), self.weight)

    def _packing(self) -> str | None:
        """The word for the packing, which stood in `backend` at first, where kernels stand now."""
        packing, backend = (text(self.config, field, self.weight) for field in ("packing_format", "backend"))
        return backend if packing is None and ":" in (backend or "") else packing
