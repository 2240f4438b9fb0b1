"""Models as tables of bigrams: everything that is measured of them has a closed form."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from moe_core.errors import InputError
from moe_core.evaluation import compare, cut_windows, evaluate, prompt_logits

VOCABULARY = 6
#: Sums over some dozens of tokens in float64.
EXACT = 1e-12


class Bigrams:
    """Logits that depend on the last token alone, and what was asked."""

    def __init__(self, seed: int, vocabulary: int = VOCABULARY) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
        self.calls: list[list[int]] = []

    def __call__(self, ids: Sequence[int]) -> Tensor:
        self.calls.append(list(ids))
        return self.table[torch.tensor(ids)]


@pytest.fixture
def ids() -> list[int]:
    return torch.randint(VOCABULARY, (50,), generator=torch.Generator().manual_seed(9)).tolist()


def _likelihoods(model: Bigrams, ids: list[int], targets: Sequence[int]) -> list[float]:
    table = model.table.log_softmax(-1)
    return [float(table[ids[target - 1], ids[target]]) for target in targets]


def test_a_model_is_shown_each_window_once(ids: list[int]) -> None:
    model = Bigrams(1)
    evaluate(model, ids, cut_windows(50, 20, 15))
    assert model.calls == [ids[:20], ids[15:35], ids[30:50]]


def test_prediction_is_the_mean_over_the_targets(ids: list[int]) -> None:
    model = Bigrams(1)
    found = evaluate(model, ids, cut_windows(50, 20, 15))
    wanted = _likelihoods(model, ids, range(1, 50))
    assert (found.num_tokens, found.num_windows) == (49, 3)
    assert found.log_likelihood.mean == pytest.approx(sum(wanted) / 49, abs=EXACT)
    assert found.perplexity().mean == pytest.approx(math.exp(-sum(wanted) / 49), abs=EXACT)
    # Any context serves a model of bigrams; windows side by side leave out their first tokens.
    side_by_side = evaluate(model, ids, cut_windows(50, 20, 20))
    wanted = _likelihoods(model, ids, [target for target in range(50) if target % 20])
    assert side_by_side.log_likelihood.mean == pytest.approx(sum(wanted) / len(wanted), abs=EXACT)


def test_perplexity_of_a_model_that_knows_nothing(ids: list[int]) -> None:
    model = Bigrams(1)
    model.table.zero_()
    found = evaluate(model, ids, cut_windows(50, 20, 20))
    assert found.perplexity().mean == pytest.approx(VOCABULARY)
    assert found.perplexity(2.0).mean == pytest.approx(math.sqrt(VOCABULARY))
    assert found.perplexity().standard_error == pytest.approx(0, abs=EXACT)


def test_the_error_of_a_perplexity_is_that_of_its_logarithm(ids: list[int]) -> None:
    found = evaluate(Bigrams(1), ids, cut_windows(50, 10, 10))
    error = found.log_likelihood.standard_error
    assert error is not None
    above = math.exp(-(found.log_likelihood.mean - 1e-4 * error) / 1.5)
    # A numerical derivative: its own error is of the order of the step.
    slope = (above - found.perplexity(1.5).mean) / 1e-4
    assert found.perplexity(1.5).standard_error == pytest.approx(slope, rel=1e-3)


def test_comparison_against_closed_forms(ids: list[int]) -> None:
    model, reference = Bigrams(1), Bigrams(2)
    found = compare(model, reference, ids, cut_windows(50, 20, 15))
    p, q = reference.table.softmax(-1), model.table.softmax(-1)
    divergence = [float((p[token] * (p[token] / q[token]).log()).sum()) for token in ids[:-1]]
    top = [bool(p[token].argmax() == q[token].argmax()) for token in ids[:-1]]
    gain = [a - b for a, b in zip(*(_likelihoods(m, ids, range(1, 50)) for m in (model, reference)), strict=True)]
    assert found.divergence.mean == pytest.approx(sum(divergence) / 49, abs=EXACT)
    assert found.median_divergence == pytest.approx(sorted(divergence)[24], abs=EXACT)
    assert found.largest_divergence == pytest.approx(max(divergence), abs=EXACT)
    assert found.same_top.mean == pytest.approx(sum(top) / 49, abs=EXACT)
    assert 0 < sum(top) < 49
    assert found.gain.mean == pytest.approx(sum(gain) / 49, abs=EXACT)
    blocks = [gain[0:19], gain[19:34], gain[34:49]]
    spread = 1.5 * sum((sum(block) - found.gain.mean * len(block)) ** 2 for block in blocks)
    assert found.gain.standard_error == pytest.approx(math.sqrt(spread) / 49, abs=EXACT)
    for own, alone in ((found.model, model), (found.reference, reference)):
        assert own == evaluate(alone, ids, cut_windows(50, 20, 15))


def test_a_model_against_itself(ids: list[int]) -> None:
    model = Bigrams(1)
    found = compare(model, model, ids, cut_windows(50, 20, 20))
    assert (found.divergence.mean, found.largest_divergence, found.gain.mean, found.same_top.mean) == (0, 0, 0, 1)


def test_pairing_leaves_out_what_both_share(ids: list[int]) -> None:
    model, reference = Bigrams(1), Bigrams(1)
    model.table += 1e-3 * Bigrams(3).table
    found = compare(model, reference, ids, cut_windows(50, 10, 10))
    assert found.gain.standard_error is not None
    assert found.model.log_likelihood.standard_error is not None
    assert found.gain.standard_error < found.model.log_likelihood.standard_error / 100


def test_logits_of_one_window_are_alive_at_a_time(ids: list[int]) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def holder(model: Bigrams) -> object:
        def call(window: Sequence[int]) -> Tensor:
            most.append(sum(reference() is not None for reference in alive))
            logits = model(window)
            alive.append(weakref.ref(logits))
            return logits

        return call

    most: list[int] = []
    compare(holder(Bigrams(1)), holder(Bigrams(2)), ids, cut_windows(50, 10, 10))
    # Nothing before a window's first model, that one's logits before the second.
    assert most == [0, 1] * 5


@pytest.mark.error_path
def test_logits_that_cannot_be_judged(ids: list[int]) -> None:
    windows = cut_windows(50, 20, 20)
    broken = Bigrams(1)
    broken.table[ids[23]] = torch.nan
    first = next(index for index, token in enumerate(ids[:-1]) if token == ids[23] and (index + 1) % 20)
    with pytest.raises(InputError, match=rf"log-likelihood of the model is nan at token {first + 1} of the text"):
        evaluate(broken, ids, windows)
    with pytest.raises(InputError, match="log-likelihood of the reference is nan"):
        compare(Bigrams(1), broken, ids, windows)
    sure = Bigrams(1)
    sure.table[:, ids[5]] = -torch.inf
    with pytest.raises(InputError, match="log-likelihood of the model is -inf at token"):
        evaluate(sure, ids, windows)


@pytest.mark.error_path
def test_a_token_that_only_the_model_excludes(ids: list[int]) -> None:
    model, text = Bigrams(1), [min(token, VOCABULARY - 2) for token in ids]
    model.table[:, VOCABULARY - 1] = -torch.inf
    with pytest.raises(InputError, match="divergence of the model from the reference is inf at token 1 "):
        compare(model, Bigrams(2), text, cut_windows(50, 20, 20))


@pytest.mark.error_path
def test_vocabularies_that_differ(ids: list[int]) -> None:
    with pytest.raises(InputError, match="has 6 tokens, the reference's 7"):
        compare(Bigrams(1), Bigrams(2, vocabulary=7), ids, cut_windows(50, 20, 20))


def test_log_likelihood_is_the_loss_that_transformers_computes() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2)).eval()
    ids = torch.randint(64, (40,), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids[None], labels=ids[None]).loss.item()
    found = evaluate(lambda window: prompt_logits(model, window), ids.tolist(), cut_windows(40, 64, 64))
    # transformers sums in fp32.
    assert -found.log_likelihood.mean == pytest.approx(loss, rel=1e-6)


def test_progress_is_told_after_every_window(ids: list[int]) -> None:
    for run in (partial(evaluate, Bigrams(1)), partial(compare, Bigrams(1), Bigrams(2))):
        told: list[tuple[int, int]] = []
        run(ids, cut_windows(50, 20, 15), progress=lambda *counts, told=told: told.append(counts))
        assert told == [(1, 3), (2, 3), (3, 3)]
