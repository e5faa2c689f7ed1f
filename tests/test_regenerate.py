"""Regeneration: batched decoding against one row at a time, sampling against the runtime's, resuming, the command."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from domino_deploy.checkpoint import open_target
from domino_deploy.cli import main
from domino_deploy.cli.console import Verbosity, progress_bar
from domino_deploy.errors import RequestError, TrainingError
from domino_deploy.model.loading import load_target
from domino_deploy.model.target import TargetModel
from domino_deploy.runtime import sampling as runtime_sampling
from domino_deploy.runtime.sampling import SamplingParams
from domino_deploy.training import regenerate as regeneration
from domino_deploy.training.looping import WINDOW, is_looping, looping_rows
from domino_deploy.training.progress import Progress
from domino_deploy.training.prompt_file import PACKAGED, packaged, read_conversations
from domino_deploy.training.prompts import is_held_out
from domino_deploy.training.regenerate import decode_batch, regenerate
from domino_deploy.training.samples import Prompt
from domino_deploy.training.sampling import choose, distribution, inverse_cdf, uniforms
from domino_deploy.training.store import SampleStore
from tests.support.checkpoints import write_target

LENGTHS = (3, 2, 5, 1, 9, 4, 12, 2, 7, 3, 3, 1)
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, seed=5)
# A unit in the last place of 11 bits: fp32 values that differ by little may be rounded apart.
FP16 = {"rtol": 1e-3, "atol": 1e-3}


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


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


class TestPromptFiles:
    def test_all_forms_are_read_with_their_kinds(self, tmp_path: Path) -> None:
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
        chat += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        records = ({"prompt": "p", "kind": "code"}, {"turns": ["t", "second"]}, {"messages": chat, "kind": "chat"})
        found = read_conversations(write_lines(tmp_path / "p.jsonl", *records))
        assert [one.messages for one in found] == [[{"role": "user", "content": "p"}], [{"role": "user", "content": "t"}], chat]
        assert [one.kind for one in found] == ["code", "", "chat"]

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("", "at least one prompt"),
            ("not json\n", "line 1"),
            ('{"prompt": ""}\n', "line 1"),
            ('{"text": "hello"}\n', "line 1"),
            ('["hello"]\n', "line 1"),
            ('{"prompt": "a"}\n{"turns": [1]}\n', "line 2"),
            ('{"prompt": "a", "kind": 3}\n', 'line 1: expected "kind" to be a string, found 3'),
            ('{"messages": []}\n', "line 1"),
            ('{"messages": ["hi"]}\n', 'line 1: message 1: expected an object with "role" and "content"'),
            ('{"messages": [{"role": "user", "content": ["hi"]}]}\n', "line 1: message 1"),
            (
                '{"messages": [{"role": "user", "content": "x"}, {"role": "robot", "content": "hi"}]}\n',
                'line 1: message 2: expected a role out of system, user, assistant, found "robot"',
            ),
            ('{"messages": [{"content": "hi"}]}\n', "message 1: expected a role .* found null"),
            ('{"messages": [{"role": {"a": 1}, "content": "hi"}]}\n', "message 1: expected a role"),
            ('{"messages": [{"role": "assistant", "content": "hi"}]}\n', "last message to be the user's, found role 'assistant'"),
            ('{"messages": [{"role": "user", "content": " "}]}\n', "last message to be the user's, found an empty one"),
        ],
    )
    def test_lines_that_cannot_be_used_are_named(self, tmp_path: Path, text: str, found: str) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text(text)
        with pytest.raises(TrainingError, match=found):
            read_conversations(path)

    def test_every_bad_line_is_named_at_once(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": 1}, {"messages": [{"role": "tool", "content": "x"}]})
        with pytest.raises(TrainingError, match=r"(?s)p\.jsonl: 2 line\(s\) .*line 2: .*line 3: "):
            read_conversations(path)

    def test_a_line_separator_inside_a_prompt_does_not_end_its_line(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"prompt": "one\u2028two"}\n', encoding="utf-8")
        [found] = read_conversations(path)
        assert found.messages == [{"role": "user", "content": "one\u2028two"}]

    @pytest.mark.parametrize(
        ("content", "found"),
        [(None, "No such file"), (b"\xff\n", "utf-8"), (b"[" * 100_000, "line 1: .*recursion")],
        ids=["missing", "not UTF-8", "nested"],
    )
    def test_a_file_that_cannot_be_read_is_refused(self, tmp_path: Path, content: bytes | None, found: str) -> None:
        path = tmp_path / "prompts.jsonl"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(TrainingError, match=found):
            read_conversations(path)

    @pytest.mark.parametrize("name", PACKAGED)
    def test_packaged_sets_are_training_prompts_of_their_kind(self, name: str) -> None:
        found = packaged(f"{name}:30")
        assert [one.kind for one in found] == [name] * 30
        assert len(packaged(name)) > 300
        if name not in ("templated-code", "story-problems"):  # held out by task in all phrasings; for training only
            assert not any(is_held_out(one.messages[0]["content"]) for one in found)

    @pytest.mark.parametrize(
        "name", ["", "code", "word-problems:", "word-problems:0", "short-chat:-1", "short-chat:1.5", "short-chat:²", "short-chat:9999999"]
    )
    def test_unknown_kinds_and_counts_are_refused(self, name: str) -> None:
        with pytest.raises(RequestError, match="--kind"):
            packaged(name)


class TestCommand:
    @pytest.fixture
    def prompts(self, tmp_path: Path) -> Path:
        records = [{"prompt": f"Say {word}.", "kind": "say"} for word in ("one", "two", "three", "one")]
        return write_lines(tmp_path / "prompts.jsonl", *records, {"prompt": "too long " * 60})

    def run(self, target: Path, work: Path, *arguments: str | Path, verbosity: str | None = None) -> Result:
        words = ["regenerate", "--target", target, "-o", work, "--max-new-tokens", "8", "--batch-size", "2", "--num-taps", "2", *arguments]
        return CliRunner().invoke(main, [*((verbosity,) if verbosity else ()), *map(str, words)])

    def samples(self, work: Path) -> list[dict[str, object]]:
        return [json.loads(line) for path in sorted(work.glob("responses-*.jsonl")) for line in path.read_text().splitlines()]

    def test_it_states_what_is_to_do_does_it_and_sums_up_in_one_line(self, target_folder: Path, prompts: Path, tmp_path: Path) -> None:
        work = tmp_path / "work"
        done = self.run(target_folder, work, "--prompts", prompts, "--kind", "short-chat:2", "--max-prompt-tokens", "90")
        assert done.exit_code == 0, done.stderr
        samples = self.samples(work)
        assert sorted(str(sample["kind"]) for sample in samples) == ["say", "say", "say", "short-chat", "short-chat"]
        assert (
            "5 prompts, 0 answered already; left out: 1 longer than 90 tokens or the target's room, 1 that were there twice" in done.stderr
        )
        most = sum(len(sample["prompt_ids"]) + 8 for sample in samples) * 2 * 32 * 2  # type: ignore[arg-type]
        assert f"features take at most {most:,} bytes, " in done.stderr
        [line] = done.stdout.splitlines()
        tokens = sum(len(sample["response_ids"]) for sample in samples)  # type: ignore[arg-type]
        assert line.startswith(f"{work}: 5 samples, {tokens} response tokens, ")
        assert json.loads((work / "features.json").read_text()) == {"tapped_layers": [1, 3], "width": 64}

        again = self.run(target_folder, work, "--prompts", prompts, "--json", verbosity="--quiet")
        assert again.stderr == ""
        result = json.loads(again.stdout)
        assert (result["samples"], result["added_samples"], result["answered_before"]) == (5, 0, 3)
        assert result["bytes"] == sum(path.stat().st_size for path in work.glob("*-0.*"))

    def test_soft_labels_keep_the_last_layers_normed_output(self, target_folder: Path, prompts: Path, tmp_path: Path) -> None:
        assert self.run(target_folder, tmp_path / "w", "--prompts", prompts, "--soft-labels").exit_code == 0
        target = open_target(target_folder)
        assert json.loads((tmp_path / "w" / "features.json").read_text()) == {"tapped_layers": [1, 3, 5], "width": 96}
        stored = SampleStore.open(
            tmp_path / "w", claim=json.loads((tmp_path / "w" / "made-for.json").read_text()), tapped_layers=(1, 3, 5), width=96
        ).read()
        hidden, features = load_target(target, (1, 3)).requires_grad_(False).hidden_states(torch.tensor([stored.samples[0].token_ids]))
        expected = torch.cat([features, hidden], dim=-1)[0, :-1].numpy()
        np.testing.assert_allclose(stored.rows(0)[:-1].astype(np.float32), expected, **FP16)

    def test_no_features_keeps_lines_alone(self, target_folder: Path, prompts: Path, tmp_path: Path) -> None:
        done = self.run(target_folder, tmp_path / "w", "--prompts", prompts, "--no-features", "--temperature", "0.9", "--seed", "3")
        assert done.exit_code == 0, done.stderr
        assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["made-for.json", "responses-0.jsonl"]
        assert json.loads((tmp_path / "w" / "made-for.json").read_text())["sampling"]["seed"] == 3

    @pytest.mark.parametrize("torchrun", [False, True])
    def test_parts_are_the_whole(
        self, target_folder: Path, prompts: Path, tmp_path: Path, torchrun: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.run(target_folder, tmp_path / "whole", "--prompts", prompts, "--kind", "short-chat:4").exit_code == 0
        for part in range(3):
            if torchrun:
                for name, value in (("RANK", part), ("WORLD_SIZE", 3), ("LOCAL_WORLD_SIZE", 3)):
                    monkeypatch.setenv(name, str(value))
            flags = [] if torchrun else ["--part", f"{part}/3"]
            done = self.run(target_folder, tmp_path / "parts", "--prompts", prompts, "--kind", "short-chat:4", *flags, "--json")
            assert done.exit_code == 0, done.stderr
            assert (json.loads(done.stdout)["part"], json.loads(done.stdout)["parts"]) == (part, 3)
        assert len(list((tmp_path / "parts").glob("responses-*.jsonl"))) == 3
        assert sorted(map(str, self.samples(tmp_path / "parts"))) == sorted(map(str, self.samples(tmp_path / "whole")))

    @pytest.mark.parametrize("part", ["", "1", "1/", "/2", "2/2", "0/0", "-1/2", "a/b", "1/2/3", "0.5/2", "1 / 2", "٠/2"])
    def test_parts_that_are_none_are_refused(self, target_folder: Path, prompts: Path, tmp_path: Path, part: str) -> None:
        done = self.run(target_folder, tmp_path / "w", "--prompts", prompts, "--part", part)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "Expected --part I/N with I from 0 to N-1" in done.stderr
        assert not (tmp_path / "w").exists()

    def test_a_part_is_not_chosen_twice(self, target_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        done = self.run(target_folder, tmp_path / "w", "--prompts", prompts, "--part", "0/2")
        assert done.exit_code == 2
        assert "Expected no --part under torchrun" in done.stderr

    def test_features_that_do_not_fit_the_disk_are_refused_before_the_weights_are_loaded(
        self, target_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 100))  # type: ignore[attr-defined]
        monkeypatch.setattr("domino_deploy.training.answering.load_target", None)
        done = self.run(target_folder, tmp_path / "w", "--prompts", prompts)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "100 free" in done.stderr
        assert "--no-features" in done.stderr
        monkeypatch.undo()
        assert self.run(target_folder, tmp_path / "w", "--prompts", prompts, "--no-features").exit_code == 0

    def test_a_target_trained_on_in_place_is_another_target(self, target_folder: Path, prompts: Path, tmp_path: Path) -> None:
        folder = tmp_path / "target"
        shutil.copytree(target_folder, folder)
        assert self.run(folder, tmp_path / "w", "--prompts", prompts).exit_code == 0
        before = self.samples(tmp_path / "w")
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.3.mlp.up_proj.weight"] *= 1.001
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        done = self.run(folder, tmp_path / "w", "--prompts", prompts)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "made for something else" in done.stderr
        assert "target: expected" in done.stderr
        assert self.samples(tmp_path / "w") == before

    @pytest.mark.parametrize(
        ("flags", "code", "fragments"),
        [
            ([], 2, ["--prompts or --kind"]),
            (["--kind", "poems"], 2, ["templated-code", "'poems'"]),
            (["--kind", "short-chat:0"], 2, ["short-chat:COUNT", "'0'"]),
            (["--kind", "short-chat:2", "--temperature", "-1", "--top-p", "2"], 2, ["temperature", "top_p"]),
            (["--kind", "short-chat:2", "--seed", "-3"], 2, ["seed", "-3"]),
            (["--kind", "short-chat:2", "--soft-labels", "--no-features"], 2, ["--soft-labels", "--no-features"]),
            (["--kind", "short-chat:2", "--max-prompt-tokens", "3"], 1, ["at most 3 tokens", "--max-prompt-tokens"]),
            (["--kind", "short-chat:2", "--max-new-tokens", "512"], 1, ["512 positions", "--max-new-tokens"]),
            (["--kind", "short-chat:2", "--num-taps", "6"], 1, ["target of 6", "--num-taps"]),
            (["--prompts", "nowhere.jsonl"], 1, ["nowhere.jsonl", "JSONL"]),
        ],
    )
    def test_wrong_usage_is_named(self, target_folder: Path, tmp_path: Path, flags: list[str], code: int, fragments: list[str]) -> None:
        done = self.run(target_folder, tmp_path / "w", *flags)
        assert (done.exit_code, done.stdout) == (code, ""), done.stderr
        assert [fragment for fragment in fragments if fragment not in done.stderr] == []
        assert not (tmp_path / "w").exists()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_gpu_that_is_not_there_is_refused(self, target_folder: Path, prompts: Path, tmp_path: Path) -> None:
        done = self.run(target_folder, tmp_path / "w", "--prompts", prompts, "--device", "cuda")
        assert done.exit_code != 0
        assert "--device cpu" in done.stderr

    def test_prompts_that_the_template_refuses_are_named(self, target_folder: Path, tmp_path: Path) -> None:
        folder = tmp_path / "target"
        shutil.copytree(target_folder, folder)
        template = folder / "chat_template.jinja"
        template.write_text(
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + template.read_text()
        )
        chat = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
        path = write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"messages": chat}, {"messages": chat})
        done = self.run(folder, tmp_path / "w", "--prompts", path)
        assert done.exit_code == 1
        assert [line in done.stderr for line in ("p.jsonl, line 2:", "p.jsonl, line 3:", "no system role")] == [True] * 3


class TestProgressBar:
    def stages(self) -> list[Progress]:
        return [
            Progress(phase=phase, done=done, total=3, note=f"{done} tokens") for phase in ("responses", "training") for done in (1, 2, 3)
        ]

    def show(self, verbosity: Verbosity, *, is_shown: bool = True) -> str:
        import click

        @click.command()
        @click.pass_context
        def command(ctx: click.Context) -> None:
            ctx.obj = verbosity
            with progress_bar(ctx, is_shown=is_shown) as show:
                for stage in self.stages():
                    show(stage)

        done = CliRunner().invoke(command)
        assert done.exit_code == 0, done.exception
        assert done.stdout == ""
        return done.stderr

    def test_verbose_tells_the_first_and_last_of_each_phase_and_little_between(self) -> None:
        lines = [line.partition("] ")[2] for line in self.show(Verbosity.VERBOSE).splitlines()]
        assert lines == ["responses 1/3  1 tokens", "responses 3/3  3 tokens", "training 1/3  1 tokens", "training 3/3  3 tokens"]

    def test_nothing_is_shown_elsewhere(self) -> None:
        assert self.show(Verbosity.NORMAL) == ""
        assert self.show(Verbosity.QUIET) == ""
        assert self.show(Verbosity.VERBOSE, is_shown=False) == ""

    def test_a_terminal_gets_a_bar_with_the_runs_own_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import rich.console

        made = []
        real = rich.console.Console

        def on_a_terminal(**options: object) -> rich.console.Console:
            made.append(real(force_terminal=True, width=120, **options))  # type: ignore[arg-type]
            return made[-1]

        monkeypatch.setattr("rich.console.Console", on_a_terminal)
        monkeypatch.setattr("domino_deploy.cli.console.sys.stderr", Terminal())
        import click

        ctx = click.Context(click.Command("x"), obj=Verbosity.NORMAL)
        with progress_bar(ctx) as show:
            for stage in self.stages():
                show(stage)
        drawn = "".join(made[0].file.written)  # type: ignore[attr-defined]
        assert "training" in drawn
        assert "3/3" in drawn
        assert "3 tokens" in drawn


class Terminal:
    """Takes the place of stderr."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True
