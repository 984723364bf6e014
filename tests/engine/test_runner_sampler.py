"""The sampler against transformers' logits processors, and what holds whatever the batch."""

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from schedtop.engine.runner.penalties import adjust_logits
from schedtop.engine.runner.sampler import (
    Sampler,
    SampleRow,
    candidate_weights,
    draw,
    draw_from_all,
    log_probabilities,
    uniforms,
)
from schedtop.engine.runner.verify import accepted
from schedtop.engine.sampling_params import SamplingParams

VOCAB = 1000
EOS = 2


def make_logits(num_rows: int = 1, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def make_row(prompt: tuple[int, ...] = (5, 6, 7), output: tuple[int, ...] = (), **settings: object) -> SampleRow:
    seed = settings.pop("row_seed", 1)
    bitmask = settings.pop("bitmask", None)
    return SampleRow(
        sampling=SamplingParams(max_tokens=100, **settings),
        seed=seed,
        index=len(output),
        prompt_ids=np.array(prompt, np.int32),
        output_ids=np.array(output, np.int32),
        bitmask=bitmask,
    )


def transformers_probabilities(logits: torch.Tensor, settings: SamplingParams) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(settings.temperature)])
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        warpers.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p > 0.0:
        warpers.append(MinPLogitsWarper(settings.min_p))
    return warpers(torch.zeros(len(logits), 1, dtype=torch.long), logits.clone()).softmax(dim=-1)


@pytest.mark.parametrize("num_candidates", [64, VOCAB])
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 50, "top_p": 0.8, "temperature": 0.7},
        {"top_p": 0.5, "temperature": 0.5},
        {"top_k": 64, "min_p": 0.05},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.1, "temperature": 1.7},
        {"min_p": 0.3},
    ],
    ids=str,
)
def test_candidates_have_the_probabilities_of_transformers(settings: dict, num_candidates: int) -> None:
    sampling = SamplingParams(**settings)
    logits = make_logits(4)
    scaled = logits / sampling.temperature
    values, ids = scaled.topk(num_candidates)
    weights, is_cut_short = candidate_weights(scaled, values, [sampling] * 4)
    assert not is_cut_short.any()
    found = torch.zeros(4, VOCAB, dtype=torch.float64).scatter(1, ids, weights)
    found /= found.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(found.float(), transformers_probabilities(logits, sampling), rtol=1e-4, atol=1e-7)


def test_too_few_candidates_are_noticed_and_more_are_taken() -> None:
    flat = torch.zeros(1, 30000)
    flat[0, :3] = 0.1
    sampling = SamplingParams(top_p=0.999)
    values, _ = flat.topk(256)
    assert candidate_weights(flat, values, [sampling])[1].all()
    drawn = {int(draw(flat, [make_row(row_seed=seed, top_p=0.999)])[0]) for seed in range(40)}
    assert len(drawn) > 35


def test_repetition_penalty_equals_transformers() -> None:
    logits = make_logits(2)
    rows = [make_row((5, 6), (9, 9, 11), repetition_penalty=1.3), make_row((1, 2), (3, 4, 5), repetition_penalty=0.8)]
    found = logits.clone()
    adjust_logits(found, rows, [EOS])
    for index, row in enumerate(rows):
        seen = torch.tensor([[*row.prompt_ids.tolist(), *row.output_ids.tolist()]])
        expected = RepetitionPenaltyLogitsProcessor(row.sampling.repetition_penalty)(seen, logits[index : index + 1])
        torch.testing.assert_close(found[index : index + 1], expected)


def test_bad_words_equal_transformers() -> None:
    words = [[8], [9, 10], [4, 9, 10], [11, 12, 13]]
    processor = NoBadWordsLogitsProcessor(words, eos_token_id=EOS)
    for output in [(), (9,), (4, 9), (11, 12), (12,)]:
        logits = make_logits()
        found = logits.clone()
        adjust_logits(found, [make_row((3,), output, bad_words_ids=tuple(map(tuple, words)))], [EOS])
        # transformers looks for words in the prompt, too: give it the output alone
        context = torch.tensor([list(output)], dtype=torch.long).reshape(1, -1)
        torch.testing.assert_close(found, processor(context, logits.clone()))


@pytest.mark.parametrize("num_output", [0, 2, 3, 4])
def test_min_tokens_bars_the_end_as_transformers_does(num_output: int) -> None:
    logits = make_logits()
    found = logits.clone()
    adjust_logits(found, [make_row((5, 6), (7,) * num_output, min_tokens=3)], [EOS])
    processor = MinNewTokensLengthLogitsProcessor(2, 3, [EOS])
    torch.testing.assert_close(found, processor(torch.zeros(1, 2 + num_output, dtype=torch.long), logits.clone()))


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(1, VOCAB)
    adjust_logits(logits, [make_row((5, 6), (9, 9, 11), presence_penalty=0.5, frequency_penalty=0.25)], [EOS])
    assert logits[0, [5, 9, 11]].tolist() == [0.0, -1.0, -0.75]


def test_logit_bias_equals_transformers() -> None:
    logits = make_logits(2)
    bias = {17: 5.0, 3: -2.5, 999: 100.0}
    found = logits.clone()
    adjust_logits(found, [make_row(logit_bias=bias)] * 2, [EOS])
    processor = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    torch.testing.assert_close(found, processor(torch.zeros(2, 1, dtype=torch.long), logits.clone()))


def test_all_settings_together_equal_transformers_in_its_order() -> None:
    """Barred words, repetition, temperature, top-k, top-p, min-p, as transformers' generate applies them."""
    settings = {"repetition_penalty": 1.4, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02}
    row = make_row((5, 6), (9, 9, 11), bad_words_ids=((8,), (11, 12)), **settings)
    logits = make_logits(seed=5)
    logits[0, [5, 9, 12, 8]] += 9.0
    mine = logits.clone()
    adjust_logits(mine, [row], [EOS])
    scaled = mine / row.sampling.temperature
    values, ids = scaled.topk(40)
    weights, _ = candidate_weights(scaled, values, [row.sampling])
    found = torch.zeros(1, VOCAB, dtype=torch.float64).scatter(1, ids, weights)
    seen = torch.tensor([[5, 6, 9, 9, 11]])
    repeated = RepetitionPenaltyLogitsProcessor(1.4)(seen, logits.clone())
    barred = NoBadWordsLogitsProcessor([[8], [11, 12]], eos_token_id=EOS)(seen, repeated)
    expected = transformers_probabilities(barred, row.sampling)
    torch.testing.assert_close((found / found.sum()).float(), expected, rtol=1e-4, atol=1e-7)
    assert expected[0, 9] > 0.01 and expected[0, 8] == expected[0, 12] == 0.0


def test_logit_bias_moves_a_token_to_the_front_and_out_of_the_way() -> None:
    logits = make_logits(2)
    rows = [
        make_row(temperature=0.0, logit_bias={17: 100.0}),
        make_row(temperature=0.0, logit_bias={int(logits[1].argmax()): -100.0}),
    ]
    second = int(logits[1].topk(2).indices[1])
    assert Sampler([EOS]).sample(logits, rows).tolist() == [17, second]


def test_grammar_bitmask_leaves_only_allowed_tokens() -> None:
    words = np.zeros(-(-VOCAB // 32), np.int32)
    for token in (3, 31, 40, 999):
        words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
    rows = [make_row(row_seed=seed, bitmask=words) for seed in range(200)]
    drawn = set(Sampler([EOS]).sample(torch.zeros(200, VOCAB), rows).tolist())
    assert drawn == {3, 31, 40, 999}


@pytest.mark.parametrize("settings", [{}, {"top_k": 8}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_draws_follow_the_distribution(settings: dict) -> None:
    logits = make_logits(vocab_size=20)
    expected = transformers_probabilities(logits, SamplingParams(**settings))[0].double()
    num_draws = 20000
    rows = [make_row(row_seed=seed, **settings) for seed in range(num_draws)]
    counts = Counter(draw(logits.expand(num_draws, -1), rows).tolist())
    assert all(expected[token] > 0 for token in counts)
    chi_squared = sum(
        (counts[token] - num_draws * p) ** 2 / (num_draws * p) for token, p in enumerate(expected.tolist()) if p > 0
    )
    assert chi_squared < 50  # 19 degrees of freedom at most: p < 0.0002; seeds are fixed, so it holds for ever


def test_draws_from_the_whole_vocabulary_skip_impossible_tokens() -> None:
    logits = torch.full((3, 700), -torch.inf)
    logits[:, 511] = 0.0
    assert draw_from_all(logits, torch.tensor([0.0, 0.5, 1.0 - 1e-16], dtype=torch.float64)).tolist() == [511] * 3


def test_a_seed_gives_the_same_token_whatever_the_batch() -> None:
    logits = make_logits(6, seed=3)
    rows = [
        make_row(row_seed=11),
        make_row(row_seed=12, top_k=40),
        make_row(row_seed=13, top_p=0.9),
        make_row(temperature=0.0),
        make_row(row_seed=14, temperature=0.8, repetition_penalty=1.2),
        make_row(row_seed=15, top_k=300, min_p=0.01),
    ]
    sampler = Sampler([EOS])
    together = sampler.sample(logits.clone(), rows).tolist()
    alone = [int(sampler.sample(logits[i : i + 1].clone(), [row])[0]) for i, row in enumerate(rows)]
    backwards = sampler.sample(logits.flip(0).clone(), rows[::-1]).tolist()[::-1]
    assert together == alone == backwards


def test_streams_of_close_seeds_are_unrelated() -> None:
    numbers = uniforms([seed for seed in range(100) for _ in range(100)], list(range(100)) * 100).reshape(100, 100)
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    assert len(np.unique(numbers)) == numbers.size
    correlations = np.corrcoef(numbers) - np.eye(100)
    assert np.abs(correlations).max() < 0.5
    assert abs(numbers.mean() - 0.5) < 0.01


def test_logprobs_give_the_sampled_token_first_then_the_likeliest() -> None:
    logits = make_logits(2)
    expected = logits.log_softmax(dim=-1)
    best = logits[1].topk(3).indices.tolist()
    entries = log_probabilities(logits, [4, best[1]], [0, 3])
    assert [token for token, _ in entries[0]] == [4]
    assert [token for token, _ in entries[1]] == [best[1], best[0], best[2]]
    for index, entry in enumerate(entries):
        for token, logprob in entry:
            assert logprob == pytest.approx(float(expected[index, token]))


def test_drafts_are_accepted_up_to_the_first_that_differs() -> None:
    assert accepted([1, 2, 3, 4], [1, 2, 3]) == [1, 2, 3, 4]
    assert accepted([1, 9, 3, 4], [1, 2, 3]) == [1, 9]
    assert accepted([5], []) == [5]
    assert accepted([0, 1], [-1]) == [0]
