"""Features from the store, from a file and by live target passes; tau measured offline equals the real loop's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.errors import TrainingError
from domino_deploy.model.loading import load_drafter, load_target
from domino_deploy.model.spec_generate import reference_target, spec_generate
from domino_deploy.training.evaluate import acceptance
from domino_deploy.training.features import corpus_of
from domino_deploy.training.initialise import drafter_config, new_drafter
from domino_deploy.training.recipe import Recipe
from domino_deploy.training.regenerate import decode_batch
from domino_deploy.training.samples import Sample
from domino_deploy.training.save import save_drafter
from domino_deploy.training.store import SampleStore, StoredSamples
from tests.support.checkpoints import write_target

RECIPE = Recipe(num_layers=1, block_size=4, num_taps=2, emb_dim=8, gru_hidden_dim=16, mask_token_id=3)
TAPS, LAST = (1, 3), 5
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target") / "target", num_hidden_layers=6)


@pytest.fixture(scope="module")
def target(target_folder):
    return load_target(open_target(target_folder), TAPS).requires_grad_(False)


@pytest.fixture(scope="module")
def wide_target(target_folder):
    """With the last layer tapped as well."""
    return load_target(open_target(target_folder), (*TAPS, LAST)).requires_grad_(False)


def samples_of(target, count=8, length=24):
    prompts = [(5 + i, 7 + i, 20 + i)[: 1 + i % 3] for i in range(count)]
    responses = decode_batch(target, prompts, length).responses
    return [Sample(prompt_ids=p, response_ids=tuple(r)) for p, r in zip(prompts, responses, strict=True)]


def without_features(samples):
    return StoredSamples(samples=samples, tapped_layers=(), features=(), places=tuple((0, 0) for _ in samples))


def corpus(model, stored, path, *, live=False, with_outputs=False, chosen=None, **options):
    chosen = range(len(stored.samples)) if chosen is None else chosen
    return corpus_of(model, stored, chosen, TAPS, with_outputs=with_outputs, live=live, dtype=torch.float32, path=path, **options)


def in_store(model, samples, folder):
    """The samples in a work folder, with the rows of the model's taps; the last row of each zero, as decoding leaves it."""
    store = SampleStore.open(folder, claim={}, tapped_layers=model.tapped_layers, width=len(model.tapped_layers) * model.config.hidden_size)
    rows = []
    for sample in samples:
        _, features = model.hidden_states(torch.tensor([sample.token_ids]))
        features[0, -1] = 0
        rows.append(features[0].to(torch.float16).numpy())
    store.append(samples, rows)
    return store.read()


def expected_features(target, sample, scales):
    _, features = target.hidden_states(torch.tensor([sample.token_ids]))
    return features[0] / scales.repeat_interleave(target.config.hidden_size)


@pytest.mark.parametrize("how", ["store", "file", "live"])
def test_every_source_gives_the_targets_features(target, wide_target, tmp_path, how):
    samples = samples_of(target)
    if how == "store":
        found = corpus(wide_target, in_store(wide_target, samples, tmp_path / "work"), tmp_path / "f.f16", with_outputs=True)
    else:
        found = corpus(wide_target, without_features(samples), tmp_path / "f.f16", with_outputs=True, live=how == "live")
    indices = [6, 0, 3]
    features, outputs = found.features_and_outputs(indices, CPU)
    torch.testing.assert_close(found.features(indices, CPU), features)
    for row, index in enumerate(indices):
        length = len(samples[index].token_ids) - 1  # the last row is never read
        torch.testing.assert_close(
            features[row, :length], expected_features(target, samples[index], found.scales)[:-1], rtol=2e-3, atol=2e-3
        )
        hidden, _ = target.hidden_states(torch.tensor([samples[index].token_ids]))
        torch.testing.assert_close(outputs[row, :length], hidden[0, :-1], rtol=2e-3, atol=2e-3)
    assert (tmp_path / "f.f16").exists() == (how == "file")


def test_a_store_without_the_wanted_layers_is_not_used(target, wide_target, tmp_path):
    samples = samples_of(target, 4)
    stored = in_store(target, samples, tmp_path / "work")
    corpus(target, stored, tmp_path / "f.f16")
    assert not (tmp_path / "f.f16").exists()
    corpus(wide_target, stored, tmp_path / "f.f16", with_outputs=True)
    assert (tmp_path / "f.f16").exists()


def test_a_feature_file_is_made_once_for_the_same_samples(target, tmp_path):
    stored, path = without_features(samples_of(target, 4)), tmp_path / "f.f16"
    told = []
    corpus(target, stored, path, on_progress=told.append)
    rows = sum(len(sample.token_ids) for sample in stored.samples)
    assert told[-1].done == told[-1].total == rows
    assert path.stat().st_size == rows * 2 * target.config.hidden_size * 2
    told.clear()
    corpus(target, stored, path, on_progress=told.append)
    assert told == []
    other = corpus(target, stored, path, chosen=[3, 2, 1, 0], on_progress=told.append)
    assert told
    features = other.features([0], CPU)[0]
    torch.testing.assert_close(features, expected_features(target, stored.samples[3], other.scales), rtol=2e-3, atol=2e-3)


def test_a_full_disk_leaves_no_feature_file_and_says_how_much_is_needed(target, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("domino_deploy.training.features.target_rows", full)
    with pytest.raises(TrainingError, match=r"room for 0\.0 GB .*No space left"):
        corpus(target, without_features(samples_of(target, 4)), tmp_path / "f.f16")
    assert list(tmp_path.iterdir()) == []


def test_tap_scales_are_the_median_rms_of_each_tap_in_every_source(target, tmp_path):
    samples = samples_of(target, 4)
    rows = torch.cat([target.hidden_states(torch.tensor([sample.token_ids]))[1][0, :-1] for sample in samples])
    # torch's median of an even number of values is the lower one.
    expected = rows.view(len(rows), 2, -1).square().mean(-1).sqrt().median(dim=0).values
    for live in (False, True):
        found = corpus(target, without_features(samples), tmp_path / "f.f16", live=live)
        torch.testing.assert_close(found.scales, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("shift_label", "kind"), [(True, "domino"), (False, "domino"), (True, "dflash")])
def test_offline_tau_equals_the_real_speculative_loop(target, tmp_path, shift_label, kind):
    samples = samples_of(target)
    config = drafter_config(target.config, dataclasses.replace(RECIPE, shift_label=shift_label, kind=kind))
    torch.manual_seed(0)
    drafter = new_drafter(target, config, torch.tensor([samples[0].token_ids])).eval()
    if drafter.head is not None:
        with torch.no_grad():
            drafter.head.codebook_VR.normal_(std=0.5)
    found_corpus = corpus(target, without_features(samples), tmp_path / "f.f16")
    found = acceptance(drafter, target.model.embed_tokens, target.lm_head, found_corpus, range(len(samples)))

    save_drafter(drafter, found_corpus.scales, tmp_path / "drafter", dtype=torch.float32, target=target.config)
    saved = load_drafter(open_drafter(tmp_path / "drafter"))
    for index, sample in enumerate(samples):
        limit = len(sample.response_ids)
        eos = target.config.eos_token_ids
        cycles = list(spec_generate(reference_target(target), saved, sample.prompt_ids, max_new_tokens=limit, stop_token_ids=eos))
        assert tuple(t for cycle in cycles for t in cycle.token_ids) == sample.response_ids
        assert found.final.tokens[index] == sum(len(cycle.token_ids) for cycle in cycles[1:])
        assert found.final.passes[index] == len(cycles) - 1
    assert sum(found.final.tokens) > sum(found.final.passes)  # some drafts were accepted
    assert found.final_tau == pytest.approx(sum(found.final.tokens) / sum(found.final.passes))
    assert kind == "domino" or found.base == found.final


def test_walking_together_equals_walking_alone(target, tmp_path):
    samples = samples_of(target, 8)
    samples += [dataclasses.replace(sample, response_ids=sample.response_ids[: 2 + i]) for i, sample in enumerate(samples)]
    drafter = new_drafter(target, drafter_config(target.config, RECIPE), torch.tensor([samples[0].token_ids])).eval()
    found_corpus = corpus(target, without_features(samples), tmp_path / "f.f16")
    ends = (target.model.embed_tokens, target.lm_head)
    together = acceptance(drafter, *ends, found_corpus, range(len(samples)))
    alone = [acceptance(drafter, *ends, found_corpus, [index]) for index in range(len(samples))]
    assert together.final.tokens == tuple(one.final.tokens[0] for one in alone)
    assert together.final.passes == tuple(one.final.passes[0] for one in alone)
    assert together.final.tokens == tuple(len(sample.response_ids) - 1 for sample in samples)
    assert np.all(np.array(together.final.passes) > 0)
