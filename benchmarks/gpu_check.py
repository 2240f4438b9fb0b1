"""What ran where: a model through the bridge on a GPU, and which dtypes torch's grouped GEMM takes without a host sync.

Run: python benchmarks/gpu_check.py        (needs an NVIDIA GPU)
"""

from __future__ import annotations

import platform

import torch
import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_core.integrations.transformers import prepare, register


def grouped_gemm_waits(dtype: torch.dtype) -> str:
    """Whether `grouped_mm` synchronises with the host for this dtype."""
    rows, weight = torch.randn(32, 64, device="cuda", dtype=dtype), torch.randn(4, 64, 48, device="cuda", dtype=dtype)
    ends = torch.tensor([8, 8, 20, 32], device="cuda", dtype=torch.int32)
    torch.nn.functional.grouped_mm(rows, weight, offs=ends)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.nn.functional.grouped_mm(rows, weight, offs=ends)
    except RuntimeError as error:
        return f"yes ({str(error).splitlines()[0]})"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no"


def bridge_differences(dtype: torch.dtype) -> tuple[float, bool]:
    """Largest difference of the logits from eager over the largest logit, and whether greedy tokens agree."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
    )
    model = Qwen3MoeForCausalLM(config).to("cuda", dtype).eval()
    tokens = torch.randint(0, 256, (2, 24), device="cuda")
    results = {}
    for name in ("eager", "moe_core"):
        model.set_experts_implementation(name)
        with torch.no_grad():
            logits = model(tokens).logits.float()
            text = model.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)
        results[name] = logits, text
    print(next(iter(prepare(model).values())).plan)
    (eager, eager_text), (ours, our_text) = results["eager"], results["moe_core"]
    return float((ours - eager).abs().max() / eager.abs().max()), bool(torch.equal(eager_text, our_text))


def main() -> None:
    """Print everything."""
    print(platform.python_version(), torch.__version__, transformers.__version__, torch.cuda.get_device_name())
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        print(dtype, "grouped_mm waits for the host:", grouped_gemm_waits(dtype))
    register()
    for dtype in (torch.float32, torch.bfloat16):
        print(dtype, "largest difference from eager, same greedy text:", bridge_differences(dtype))


if __name__ == "__main__":
    main()
