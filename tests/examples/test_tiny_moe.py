"""The shipped tiny model is what its card says, and its training script still makes such a model."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
import train_tiny_moe
from ngram_baseline import NgramModel
from safetensors.torch import load_file
from tiny_eval import Evaluation, evaluate, expert_counts, windows
from tiny_text import HELD_OUT_TOPICS, TextSplit, paragraphs, shared_fraction, split_text, squeeze
from tiny_tokenizer import save_byte_tokenizer
from train_tiny_moe import (
    balance_loss,
    evaluate_saved,
    learning_rate_factor,
    make_config,
    save,
    train,
    window_starts,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeForCausalLM

SHIPPED = Path(__file__).parents[2] / "examples" / "tiny_moe"


@pytest.fixture(scope="module")
def card() -> str:
    return (SHIPPED / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def held_out() -> bytes:
    return (SHIPPED / "held_out.txt").read_bytes()


@pytest.fixture(scope="module")
def shipped() -> Qwen3MoeForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32, experts_implementation="eager")
    assert isinstance(model, Qwen3MoeForCausalLM)
    return model


@pytest.fixture(scope="module")
def measured(shipped: Qwen3MoeForCausalLM, held_out: bytes) -> Evaluation:
    return evaluate(shipped, held_out)


@pytest.fixture(scope="module")
def split() -> TextSplit:
    return split_text()


def figure(card: str, row: str) -> float:
    """Figure of the card's table row whose first cell begins with `row`."""
    found = re.search(rf"^\| {re.escape(row)}[^|]*\| ([\d.]+) \|$", card, re.MULTILINE)
    if found is None:
        pytest.fail(f"the card has no row {row!r}")
    return float(found.group(1))


def test_shipped_weights_are_small_and_bf16() -> None:
    tensors = load_file(SHIPPED / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) == pytest.approx(3.6e6, rel=0.01)
    assert (SHIPPED / "model.safetensors").stat().st_size == pytest.approx(7.2e6, rel=0.01)


def test_shipped_configuration_is_the_one_of_the_script(shipped: Qwen3MoeForCausalLM) -> None:
    wanted = make_config().to_dict()
    differing = {key for key, value in shipped.config.to_dict().items() if wanted.get(key) != value}
    assert differing <= {"architectures", "dtype", "transformers_version", "_name_or_path"}


def test_card_states_the_measured_perplexity(card: str, measured: Evaluation) -> None:
    # Half a unit of the last printed digit, and as much again for another processor's order of summation.
    stated = figure(card, "this model, bf16 weights, computed in fp32")
    assert measured.perplexity == pytest.approx(stated, abs=1e-3)


def test_shipped_model_beats_every_ngram(card: str, measured: Evaluation) -> None:
    assert measured.perplexity < figure(card, "best n-gram")
    assert figure(card, "best n-gram") < figure(card, "unigram")


def test_every_expert_of_every_layer_is_used(measured: Evaluation) -> None:
    assert measured.expert_shares.shape == (2, 8)
    assert measured.expert_shares.min() >= 0.08


def test_shipped_model_writes_words_of_the_text(shipped: Qwen3MoeForCausalLM, held_out: bytes) -> None:
    prompt = torch.tensor([list(b"If the object is ")])
    generated = bytes(shipped.generate(prompt, max_new_tokens=60, do_sample=False)[0].tolist())
    words = re.findall(r"[a-z]{2,}", generated.decode())
    known = set(re.findall(r"[a-z]{2,}", held_out.decode()))
    assert sum(word in known for word in words) >= 0.7 * len(words)


def test_tokenizer_agrees_with_plain_bytes(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    text = " Naïve  <s>\n\tdef f(x): return '€' \x00 "
    for leading in ("", "x"):  # an added prefix space would show on the text without a leading one
        for folder in (SHIPPED, tmp_path):
            tokenizer = AutoTokenizer.from_pretrained(folder)
            assert tokenizer(leading + text).input_ids == list((leading + text).encode())
            assert tokenizer.decode(list(text.encode())) == text


def test_training_text_is_every_other_paragraph_once(split: TextSplit) -> None:
    train_paragraphs = [squeeze(p) for p in paragraphs(split.train.decode())]
    whole_topics = {squeeze(p) for name in HELD_OUT_TOPICS for p in paragraphs(topics[name])}
    others = [split.licence, *(text for name, text in topics.items() if name not in HELD_OUT_TOPICS)]
    other_paragraphs = {squeeze(p) for text in others for p in paragraphs(text)}
    assert other_paragraphs & whole_topics, "no topic quotes a held-out one: this test would see no leak"
    assert len(train_paragraphs) == len(set(train_paragraphs))
    assert set(train_paragraphs) == other_paragraphs - whole_topics
    assert whole_topics == {squeeze(p) for p in paragraphs(split.held_out.decode())}


def test_leak_measure_sees_shared_runs() -> None:
    shared = "a sentence of more than ten characters"
    assert shared_fraction(f"x {shared} y".encode(), shared.replace(" ", "\n  ").encode(), width=10) == 1
    assert shared_fraction(b"abcdefghijkl", b"ABCDEFGHIJKL", width=10) == 0


def test_shipped_held_out_text_is_the_one_of_this_split(card: str, held_out: bytes, split: TextSplit) -> None:
    if split.digest not in card:
        pytest.skip("this Python release has other topics than the one the model was trained on")
    assert held_out == split.held_out
    assert (SHIPPED / "LICENSE-PYTHON.txt").read_text(encoding="utf-8") == split.licence


@pytest.mark.parametrize("order", [1, 2, 5])
def test_ngram_probabilities_sum_to_one(order: int) -> None:
    model = NgramModel(b"the cat sat on the mat and the dog sat on the cat; " * 2 + b"a quick brown fox", order)
    for context in (b"", b"t", b"the c", b"zzzzz", b"on the"):
        probabilities = [model.probability(context, byte) for byte in range(256)]
        assert min(probabilities) > 0
        assert sum(probabilities) == pytest.approx(1)


def test_ngram_of_a_known_distribution() -> None:
    text = b"ab" * 500
    assert NgramModel(text, 1).perplexity(text, range(len(text))) == pytest.approx(2, rel=1e-2)
    assert NgramModel(text, 2).perplexity(text, range(1, len(text))) == pytest.approx(1, rel=1e-2)


def test_balance_loss_looks_at_each_layer_alone() -> None:
    # Layer 0 uses experts 0 and 1, layer 1 uses 2 and 3: pooled over layers that would look even.
    low, high = torch.tensor([[9.0, 9.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 9.0, 9.0]])
    even = torch.tensor([[9.0, 9.0, 0.0, 0.0], [0.0, 0.0, 9.0, 9.0]])
    assert balance_loss([low, high], top_k=2).item() == pytest.approx(2, rel=1e-3)
    assert balance_loss([even, even], top_k=2).item() == pytest.approx(1, rel=1e-3)


def test_expert_counts() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [0.0, 5.0, 4.0]])
    assert expert_counts([logits], top_k=2).tolist() == [[1.0, 2.0, 1.0]]


def test_windows_refuse_a_text_shorter_than_one() -> None:
    assert windows(bytes(600)).shape == (2, 256)
    with pytest.raises(ValueError, match="255 bytes"):
        windows(bytes(255))


def test_learning_rate_rises_stays_and_falls_to_its_floor() -> None:
    factors = [learning_rate_factor(step, 1000) for step in range(1001)]
    assert factors[:70] == pytest.approx([(step + 1) / 70 for step in range(70)])
    assert factors[70:303] == [1.0] * 233
    assert all(before > after for before, after in pairwise(factors[303:]))
    assert factors[1000] == pytest.approx(0.1)


def test_windows_of_one_pass_lie_side_by_side_and_are_shuffled() -> None:
    torch.manual_seed(0)
    length = 21 * 256  # room for 20 windows and the byte after them, wherever the first begins
    starts = window_starts(length, 50).tolist()
    first_pass = sorted(starts[:20])
    assert first_pass == list(range(first_pass[0], first_pass[0] + 20 * 256, 256)) != starts[:20]
    assert max(starts) + 257 <= length
    assert len({start % 256 for start in starts}) > 1


def test_trained_model_is_the_average(monkeypatch: pytest.MonkeyPatch, split: TextSplit) -> None:
    # An average that takes nothing in after its first step; one step alone has the same data and learning rate.
    monkeypatch.setattr(train_tiny_moe, "AVERAGE_DECAY", 1.0)
    one, two = (train(split.train, steps=steps, seed=5) for steps in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_training_is_repeatable_and_its_model_reloads(tmp_path: Path, split: TextSplit) -> None:
    first, second = (train(split.train, steps=3, seed=5) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    text = split.held_out[:1024]
    before = evaluate(first, text).perplexity
    save(first, split, tmp_path)
    # bf16 keeps 8 bits of a weight, which moves the logits of a hardly trained model by far less than 1 %.
    assert evaluate_saved(tmp_path, text, torch.float32).perplexity == pytest.approx(before, rel=1e-2)
    assert before < 256
