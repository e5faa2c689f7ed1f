"""Regeneration: batched decoding against one row at a time, sampling against the runtime's, resuming."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from domino_deploy.checkpoint import open_target
from domino_deploy.errors import TrainingError
from domino_deploy.model.loading import load_target
from domino_deploy.model.target import TargetModel
from domino_deploy.runtime import sampling as runtime_sampling
from domino_deploy.runtime.sampling import SamplingParams
from domino_deploy.training import regenerate as regeneration
from domino_deploy.training.looping import WINDOW, is_looping, looping_rows
from domino_deploy.training.progress import Progress
from domino_deploy.training.regenerate import decode_batch, regenerate
from domino_deploy.training.samples import Prompt
from domino_deploy.training.sampling import choose, distribution, inverse_cdf, uniforms
from domino_deploy.training.store import SampleStore
from tests.support.checkpoints import write_target
from tests.support.regeneration import FP16

LENGTHS = (3, 2, 5, 1, 9, 4, 12, 2, 7, 3, 3, 1)
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, seed=5)


def prompt_ids() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(3, 290, size=length).tolist()) for length in LENGTHS]


PROMPTS = prompt_ids()


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target", num_hidden_layers=6)


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TargetModel:
    return load_target(open_target(target_folder), (1, 3, 5)).requires_grad_(False)


def one_by_one(model: TargetModel, prompt: Sequence[int], count: int, params: SamplingParams = SAMPLED) -> tuple[int, ...]:
    """Plain decoding of whole sequences with the runtime's sampler."""
    tokens, draws = list(prompt), uniforms(params.seed or 0, prompt, count)
    for draw in draws:
        hidden, _ = model.hidden_states(torch.tensor([tokens]))
        logits = model.lm_head(hidden[0, -1]).numpy()
        if params.is_greedy:
            tokens.append(int(logits.argmax()))
        else:
            tokens.append(runtime_sampling.inverse_cdf(runtime_sampling.distribution(logits, params), draw))
        response = tokens[len(prompt) :]
        if response[-1] in model.config.eos_token_ids or is_looping(response):
            break
    return tuple(tokens[len(prompt) :])


def store_at(folder: Path, model: TargetModel | None = None, part: int = 0) -> SampleStore:
    layers = () if model is None else model.tapped_layers
    width = 0 if model is None else len(layers) * model.config.hidden_size
    return SampleStore.open(folder, claim={"target": "tiny"}, tapped_layers=layers, width=width, part=part)


def answer(model: TargetModel, ids: Sequence[tuple[int, ...]], store: SampleStore, **options: object) -> regeneration.Regenerated:
    prompts = [Prompt(ids=one, kind=f"kind {len(one)}") for one in ids]
    values = {"max_new_tokens": 12, "batch_size": 5, "keep_features": bool(store.tapped_layers)} | options
    return regenerate(model, prompts, store, **values)  # type: ignore[arg-type]


def by_prompt(store: SampleStore) -> dict[tuple[int, ...], tuple[tuple[int, ...], str, np.ndarray | None]]:
    stored = store.read()
    rows = [np.array(stored.rows(index)) if stored.has_features else None for index in range(len(stored.samples))]
    return {sample.prompt_ids: (sample.response_ids, sample.kind, row) for sample, row in zip(stored.samples, rows, strict=True)}


def check_same(found: SampleStore, expected: SampleStore) -> None:
    """The same samples in any order; features up to what another batch shape rounds differently."""
    one, other = by_prompt(found), by_prompt(expected)
    assert {prompt: value[:2] for prompt, value in one.items()} == {prompt: value[:2] for prompt, value in other.items()}
    for prompt, (_, _, rows) in one.items():
        if rows is not None:
            np.testing.assert_allclose(rows.astype(np.float32), other[prompt][2].astype(np.float32), **FP16)


class TestDecoding:
    @pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
    def test_a_batch_gives_what_rows_give_one_by_one(self, target: TargetModel, params: SamplingParams) -> None:
        decoded = decode_batch(target, PROMPTS, 40, sampling=params)
        assert decoded.responses == [one_by_one(target, prompt, 40, params) for prompt in PROMPTS]
        assert len({len(response) for response in decoded.responses}) > 1, "rows should end at different steps"
        assert decoded.features is None

    @pytest.mark.parametrize("tokens", [1, 10, 1000])
    def test_the_prefills_slices_change_nothing(self, target: TargetModel, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = decode_batch(target, PROMPTS, 10, keep_features=True)
        monkeypatch.setattr(regeneration, "_PREFILL_TOKENS", tokens)
        found = decode_batch(target, PROMPTS, 10, keep_features=True)
        assert found.responses == expected.responses
        for one, other in zip(found.features or (), expected.features or (), strict=True):
            np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), **FP16)

    @pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
    def test_rows_that_finish_early_do_not_disturb_the_others(
        self, target: TargetModel, share: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        responses = decode_batch(target, PROMPTS, 20).responses
        # Calling drawn tokens end-of-text tokens makes rows end at different steps.
        extra = tuple(response[2 + row % 4] for row, response in enumerate(responses) if len(response) > 8)[:4]
        whole, stops = target.config, (*target.config.eos_token_ids, *extra)
        monkeypatch.setattr(regeneration, "_COMPACT_SHARE", share)
        monkeypatch.setattr(target, "config", dataclasses.replace(whole, eos_token_ids=stops))
        stopped = decode_batch(target, PROMPTS, 20, keep_features=True)
        assert len(set(map(len, stopped.responses))) > 2
        for prompt, full, short, rows in zip(PROMPTS, responses, stopped.responses, stopped.features or (), strict=True):
            end = next((index + 1 for index, token in enumerate(full) if token in stops), len(full))
            assert short == full[:end]
            _, expected = target.hidden_states(torch.tensor([[*prompt, *short]]))
            np.testing.assert_allclose(rows[:-1].astype(np.float32), expected[0, :-1].numpy(), **FP16)

    def test_features_are_those_of_the_whole_sequence_the_last_row_zero(self, target: TargetModel) -> None:
        decoded = decode_batch(target, PROMPTS, 30, keep_features=True)
        assert decoded.features is not None
        for prompt, response, rows in zip(PROMPTS, decoded.responses, decoded.features, strict=True):
            _, expected = target.hidden_states(torch.tensor([[*prompt, *response]]))
            assert (rows.dtype, rows.shape) == (np.float16, expected.shape[1:])
            np.testing.assert_allclose(rows[:-1].astype(np.float32), expected[0, :-1].numpy(), **FP16)
            assert not rows[-1].any()

    def test_features_beyond_fp16_are_clamped(self, target_folder: Path) -> None:
        model = load_target(open_target(target_folder), (1,)).requires_grad_(False)
        model.model.layers[1].mlp.down_proj.weight.mul_(1e7)
        [rows] = decode_batch(model, [(5, 6, 7)], 4, keep_features=True).features or ()
        assert np.isfinite(rows).all()
        assert rows.max() == np.float16(6e4)
        assert rows.min() == np.float16(-6e4)

    def test_bfloat16_decodes_close_to_float32(self, target: TargetModel, target_folder: Path) -> None:
        narrow = load_target(open_target(target_folder), (1, 3, 5), dtype=torch.bfloat16).requires_grad_(False)
        decoded = decode_batch(narrow, PROMPTS, 6, keep_features=True)
        for prompt, response, rows in zip(PROMPTS, decoded.responses, decoded.features or (), strict=True):
            hidden, expected = target.hidden_states(torch.tensor([[*prompt, *response]]))
            wrong = np.linalg.norm(rows[:-1] - expected[0, :-1].numpy(), axis=1) / np.linalg.norm(expected[0, :-1].numpy(), axis=1)
            assert wrong.max() < 0.15, "rows of another token or position are off by more than 1"
            logits = target.lm_head(hidden[0, len(prompt) - 1 : -1])
            behind = logits.max(dim=-1).values - logits[torch.arange(len(response)), torch.tensor(response)]
            assert behind.max() < 0.5, "a token far from the best one is no matter of rounding"

    def test_a_response_that_loops_is_cut(self, target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
        def same_again(model: TargetModel, ids: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
            logits = torch.zeros(len(ids), 300)
            logits[:, 9] = 1.0
            return logits, torch.zeros(*ids.shape, 0)

        monkeypatch.setattr(regeneration, "cached_pass", same_again)
        assert decode_batch(target, [(4, 5)], 200).responses == [(9,) * WINDOW]

    def test_all_rows_are_judged_as_each_alone(self) -> None:
        rng = np.random.default_rng(0)
        rows = [[*rng.integers(0, 5, size=start), *([*range(period)] * WINDOW)][:WINDOW] for period in range(1, 11) for start in (0, 1, 3)]
        rows += rng.integers(0, 2, size=(200, WINDOW)).tolist()
        expected = [is_looping(row) for row in rows]
        assert looping_rows(torch.tensor(rows)).tolist() == expected
        assert 0 < sum(expected) < len(rows)

    def test_logits_that_are_not_finite_are_refused(self, target_folder: Path) -> None:
        model = load_target(open_target(target_folder)).requires_grad_(False)
        model.model.norm.weight[3] = float("nan")
        with pytest.raises(TrainingError, match=r"NaN or infinity for 2 row\(s\) in float32"):
            decode_batch(model, PROMPTS[:2], 5)

    def test_sampling_without_a_seed_is_the_callers_mistake(self, target: TargetModel) -> None:
        with pytest.raises(ValueError, match="seed"):
            decode_batch(target, PROMPTS, 5, sampling=SamplingParams(temperature=1.0))

    def test_penalties_are_refused_not_ignored(self, target: TargetModel) -> None:
        with pytest.raises(ValueError, match="without penalties and biases"):
            decode_batch(target, PROMPTS, 5, sampling=SamplingParams(presence_penalty=1.0))


class TestSampling:
    @pytest.mark.parametrize("temperature", [1e-4, 0.3, 1.7])
    @pytest.mark.parametrize("top_k", [0, 1, 7])
    @pytest.mark.parametrize("top_p", [1.0, 0.9, 1e-6])
    @pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
    def test_distributions_and_draws_are_the_runtimes(self, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        rng = np.random.default_rng(0)
        logits = 3 * rng.standard_normal((6, 70)).astype(np.float32)
        logits[1] = np.round(logits[1])  # ties
        logits[2] = 0.0
        logits[3, 5:] = -np.inf
        expected = np.stack([runtime_sampling.distribution(row, params) for row in logits])
        found = distribution(torch.from_numpy(logits), params)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-300)
        for draw in (0.0, 0.31, 0.77, 1 - 2.0**-53):
            drawn = inverse_cdf(found, torch.full((6,), draw, dtype=torch.float64)).tolist()
            assert drawn == [runtime_sampling.inverse_cdf(row, draw) for row in expected]

    def test_large_vocabularies_are_worked_through_in_slices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        logits, draws = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)), torch.linspace(0, 0.99, 7, dtype=torch.float64)
        expected = choose(logits, SAMPLED, draws)
        monkeypatch.setattr("domino_deploy.training.sampling._ELEMENTS", 100)
        assert torch.equal(choose(logits, SAMPLED, draws), expected)

    def test_greedy_takes_the_lowest_id_among_equals(self) -> None:
        assert choose(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), SamplingParams(), None).tolist() == [1, 0]

    def test_uniforms_depend_on_seed_and_prompt_and_begin_alike_for_any_length(self) -> None:
        first = uniforms(1, (5, 6), 100)
        np.testing.assert_array_equal(uniforms(1, (5, 6), 7), first[:7])
        for other in (uniforms(2, (5, 6), 100), uniforms(1, (6, 5), 100), uniforms(1, (5, 6, 0), 100), uniforms(2**64 - 1, (5, 6), 100)):
            assert not np.isin(other, first).any()
        many = np.concatenate([uniforms(0, (token,), 500) for token in range(40)])
        assert 0 <= many.min() < many.max() < 1
        np.testing.assert_allclose(np.histogram(many, bins=10, range=(0, 1))[0] / len(many), 0.1, atol=0.01)


class TestRegenerating:
    @pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
    def test_responses_depend_on_neither_batch_size_nor_order(self, target: TargetModel, tmp_path: Path, params: SamplingParams) -> None:
        stores = [store_at(tmp_path / name, target) for name in "abc"]
        answer(target, PROMPTS, stores[0], sampling=params, batch_size=5)
        answer(target, PROMPTS[::-1], stores[1], sampling=params, batch_size=1)
        answer(target, PROMPTS, stores[2], sampling=params, batch_size=100)
        for store in stores[1:]:
            check_same(store, stores[0])
        assert {prompt: value[0] for prompt, value in by_prompt(stores[0]).items()} == {
            prompt: one_by_one(target, prompt, 12, params) for prompt in PROMPTS
        }

    def test_another_seed_gives_other_responses(self, target: TargetModel, tmp_path: Path) -> None:
        found = []
        for seed in (1, 2):
            store = store_at(tmp_path / str(seed))
            answer(target, PROMPTS, store, sampling=SamplingParams(temperature=1.0, seed=seed))
            found.append({prompt: value[0] for prompt, value in by_prompt(store).items()})
        assert found[0] != found[1]

    def test_it_goes_on_where_it_stopped(self, target: TargetModel, tmp_path: Path) -> None:
        whole = store_at(tmp_path / "whole", target)
        answer(target, PROMPTS, whole, sampling=SAMPLED)

        class Stopped(Exception):
            pass

        def stop(progress: Progress) -> None:
            if progress.done >= 7:
                raise Stopped

        with pytest.raises(Stopped):
            answer(target, PROMPTS, store_at(tmp_path / "halves", target), sampling=SAMPLED, on_progress=stop)
        halves = store_at(tmp_path / "halves", target)
        assert 0 < len(halves.answered()) < len(PROMPTS)
        added = answer(target, PROMPTS, halves, sampling=SAMPLED)
        assert added.samples < len(PROMPTS)
        check_same(store_at(tmp_path / "halves", target), whole)
        assert answer(target, PROMPTS, halves, sampling=SAMPLED).samples == 0

    def test_two_parts_are_one_run(self, target: TargetModel, tmp_path: Path) -> None:
        whole = store_at(tmp_path / "whole", target)
        answer(target, PROMPTS, whole)
        for part in range(2):
            answer(target, PROMPTS[part::2], store_at(tmp_path / "parts", target, part))
        assert len(list((tmp_path / "parts").glob("responses-*.jsonl"))) == 2
        check_same(store_at(tmp_path / "parts", target), whole)

    def test_the_tally_counts_samples_tokens_and_empty_ones(
        self, target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = decode_batch(target, PROMPTS[:1], 1).responses[0][0]
        monkeypatch.setattr(target, "config", dataclasses.replace(target.config, eos_token_ids=(first,)))
        store, told = store_at(tmp_path), list[Progress]()
        added = answer(target, [*PROMPTS, *PROMPTS[:3]], store, on_progress=told.append)
        responses = [value[0] for value in by_prompt(store).values()]
        assert (added.samples, added.response_tokens) == (len(PROMPTS), sum(map(len, responses)))
        assert added.empty == sum(response == (first,) for response in responses) >= 1
        assert added.seconds > 0
        assert [stage.done for stage in told] == sorted(stage.done for stage in told)
        assert (told[-1].done, told[-1].total) == (len(PROMPTS), len(PROMPTS))
        assert f"{added.response_tokens} tokens, " in told[-1].note

    def test_the_first_batches_are_a_mixture(self) -> None:
        prompts = [Prompt(ids=(index,) * (1 + index // 100)) for index in range(1000)]
        batches = list(regeneration._batches(prompts, 10))
        assert sorted(prompt.ids for batch in batches for prompt in batch) == sorted(prompt.ids for prompt in prompts)
        first = [len(prompt.ids) for batch in batches[:8] for prompt in batch]
        assert first == sorted(first)
        assert len(set(first)) == 10

    def test_a_batch_too_large_for_the_gpu_is_an_error_that_keeps_what_is_finished(
        self, target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = store_at(tmp_path)
        answer(target, PROMPTS[:3], store)

        def full(*arguments: object, **options: object) -> None:
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(regeneration, "decode_batch", full)
        with pytest.raises(TrainingError, match="smaller --batch-size"):
            answer(target, PROMPTS, store)
        assert store.answered() == set(PROMPTS[:3])
