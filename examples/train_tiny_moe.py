"""Train the byte-level MoE model of `examples/tiny_moe` on the English text that ships inside CPython.

Run it with `python examples/train_tiny_moe.py --output DIR`: minutes on two CPU cores. One seed gives the same weights
every time on one machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from ngram_baseline import NgramModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tiny_card import Report, write_card
from tiny_eval import WINDOW, Evaluation, evaluate, expert_counts, scored_positions
from tiny_text import TextSplit, shared_fraction, split_text
from tiny_tokenizer import save_byte_tokenizer
from torch import Tensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

# The settings were chosen on topics other than the held-out ones; the model card tells how.
BATCH_SIZE = 16
LEARNING_RATE = 3e-3
BETAS = (0.8, 0.95)
# A third of a million bytes are few for this model: less decay learns the training text by heart.
WEIGHT_DECAY = 2.0
# The moving average of the weights is the model; it looks back about 1 / (1 - 0.98) = 50 steps.
AVERAGE_DECAY = 0.98
# Of the steps, the first 7 % raise the learning rate; of the others, a quarter keeps it. It falls to a tenth, not to
# zero: the average quiets the last steps, which then still learn.
RISE, FLAT, FLOOR = 0.07, 0.25, 0.1
INITIAL_EMBEDDING = 0.02
BALANCE_WEIGHT = 0.05
NGRAM_ORDERS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
# Sums are split by thread, so the thread count is part of what makes a run repeatable.
THREADS = 2


def make_config() -> Qwen3MoeConfig:
    """Sizes of the model; the vocabulary is the 256 bytes, without special tokens."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
        initializer_range=0.05,
        router_aux_loss_coef=BALANCE_WEIGHT,
    )
    config.head_dim = 64  # not a declared field of the class, but models and other programs read it
    return config


def balance_loss(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """Mean over layers of `E * sum(share of choices * mean probability)`; 1 when every expert is used alike.

    It is taken layer by layer. Summed over layers first, two layers could use opposite halves of their experts and
    still look balanced, and the unused experts would never learn.

    Args:
        router_logits: one `[tokens, E]` tensor per layer.
        top_k: experts per token.
    """
    counts = expert_counts(router_logits, top_k)
    shares = counts / counts.sum(dim=1, keepdim=True)
    probabilities = torch.stack([logits.float().softmax(dim=-1).mean(dim=0) for logits in router_logits])
    return (shares * probabilities).sum(dim=1).mean() * shares.shape[1]


def learning_rate_factor(step: int, steps: int) -> float:
    """Part of the full learning rate at `step`: a linear rise, a flat part, then half a cosine down to the floor.

    Without the rise the first steps push the router so far that most experts get no token for a hundred steps.
    """
    rise = max(1, round(RISE * steps))
    flat_end = rise + FLAT * (steps - rise)
    if step < rise:
        return (step + 1) / rise
    fallen = max(0.0, step - flat_end) / max(1.0, steps - flat_end)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * fallen))


def window_starts(length: int, count: int) -> Tensor:
    """`[count]` int64: where windows of 257 bytes start in a text of `length` bytes, drawn without replacement.

    Each pass over the text cuts it into windows side by side, from a random first byte on, and shuffles them: every
    byte is seen about equally often, and passes differ in where they cut.
    """
    passes: list[Tensor] = []
    while sum(map(len, passes)) < count:
        first = int(torch.randint(WINDOW, ()))
        starts = torch.arange(first, length - WINDOW, WINDOW)
        passes.append(starts[torch.randperm(len(starts))])
    return torch.cat(passes)[:count]


def train(text: bytes, steps: int, seed: int) -> Qwen3MoeForCausalLM:
    """Train on windows of `text` and return the fp32 model whose weights are the moving average of the steps'."""
    torch.manual_seed(seed)
    torch.set_num_threads(THREADS)
    model = _new_model()
    average = get_ema_multi_avg_fn(AVERAGE_DECAY)  # type: ignore[no-untyped-call]
    averaged = AveragedModel(model, multi_avg_fn=average)
    optimizer = torch.optim.AdamW(_parameter_groups(model), lr=LEARNING_RATE, betas=BETAS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    batches = window_starts(len(data), steps * BATCH_SIZE).view(steps, BATCH_SIZE, 1) + torch.arange(WINDOW + 1)
    model.train()
    with _progress() as progress:
        task = progress.add_task("training", total=steps, loss=float("nan"))
        for positions in batches:
            loss = _step(model, data[positions])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)
            progress.update(task, advance=1, loss=loss)
    return cast(Qwen3MoeForCausalLM, averaged.module.train(False))


def save(model: Qwen3MoeForCausalLM, text: TextSplit, output: Path) -> None:
    """Write weights, configuration, tokenizer, held-out text and licence into `output`; `model` itself becomes bf16."""
    model.bfloat16().save_pretrained(output)
    save_byte_tokenizer(output)
    (output / "held_out.txt").write_bytes(text.held_out)
    (output / "LICENSE-PYTHON.txt").write_text(text.licence, encoding="utf-8")


def evaluate_saved(output: Path, text: bytes, dtype: torch.dtype) -> Evaluation:
    """Load the model in `output`, its weights converted to `dtype`, and evaluate it on `text`."""
    model = Qwen3MoeForCausalLM.from_pretrained(output, dtype=dtype, experts_implementation="eager")
    return evaluate(model, text)


def main(
    output: Annotated[Path, typer.Option(help="Folder for the model; made if it is missing.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 700,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the batches.")] = 0,
) -> None:
    """Train the tiny MoE model, compare it with n-gram models on held-out text and save it with a model card."""
    console = Console()
    text = split_text()
    console.print(f"{len(text.train):,} bytes to train on, {len(text.held_out):,} held out")
    started = time.perf_counter()
    model = train(text.train, steps, seed)
    seconds = time.perf_counter() - started
    fp32 = evaluate(model, text.held_out)
    console.print(f"{seconds:.0f} s of training, held-out perplexity per byte {fp32.perplexity:.3f}")
    save(model, text, output)
    report = Report(
        steps=steps,
        seed=seed,
        balance_weight=BALANCE_WEIGHT,
        seconds=seconds,
        text=text,
        shared_fraction=shared_fraction(text.train, text.held_out),
        parameters=model.num_parameters(),
        fp32=fp32,
        stored=evaluate_saved(output, text.held_out, torch.float32),
        bf16=evaluate_saved(output, text.held_out, torch.bfloat16),
        ngrams={order: _ngram_losses(text, order) for order in NGRAM_ORDERS},
    )
    console.print(f"card: {write_card(report, output)}")


def _new_model() -> Qwen3MoeForCausalLM:
    model = Qwen3MoeForCausalLM(make_config())
    model.set_experts_implementation("eager")
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=INITIAL_EMBEDDING)
    return model


def _parameter_groups(model: Qwen3MoeForCausalLM) -> list[dict[str, Any]]:
    """Matrices with weight decay; norm weights without, since decay would pull them from 1 to 0."""
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]


def _step(model: Qwen3MoeForCausalLM, ids: Tensor) -> float:
    """Add the gradients of one batch `[B, 257]` and return its cross entropy in nats per byte."""
    result = model(input_ids=ids[:, :-1], output_router_logits=True, use_cache=False)
    loss = F.cross_entropy(result.logits.flatten(0, 1), ids[:, 1:].flatten())
    balance = balance_loss(result.router_logits, model.config.num_experts_per_tok)
    torch.autograd.backward(loss + BALANCE_WEIGHT * balance)
    return loss.item()


def _ngram_losses(text: TextSplit, order: int) -> Tensor:
    """`[B]` float64: nats per byte of each held-out window, as `Evaluation.losses`."""
    model = NgramModel(text.train, order)
    perplexities = [model.perplexity(text.held_out, window) for window in scored_positions(text.held_out)]
    return torch.tensor(perplexities, dtype=torch.float64).log()


def _progress() -> Progress:
    loss = TextColumn("loss {task.fields[loss]:.3f}")
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), loss)


if __name__ == "__main__":
    typer.run(main)
