"""The dry run: counts against real modules, memory and operations against what PyTorch keeps and multiplies."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from domino_deploy.checkpoint_config import target_config as parse_target
from domino_deploy.config import TargetConfig
from domino_deploy.errors import CheckpointError, TrainingError
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.target import TargetModel
from domino_deploy.training.batches import Batch
from domino_deploy.training.initialise import drafter_config
from domino_deploy.training.objective import DraftLoss
from domino_deploy.training.plan import Plan, plan, target_config_of
from domino_deploy.training.recipe import Recipe, read_recipe
from tests.support.checkpoints import write_target
from tests.support.public_targets import PUBLIC
from tests.support.tiny_models import target_config

# Every width differs from every other, so that no formula can use the wrong one and still fit.
TARGET = target_config(num_layers=6, hidden_size=40, num_heads=6, num_kv_heads=2, head_dim=16, intermediate_size=112, vocab_size=1501)
RECIPE = Recipe(
    num_layers=2,
    block_size=5,
    num_taps=2,
    emb_dim=7,
    gru_hidden_dim=24,
    mask_token_id=60,
    sequences=4,
    micro_batch=1,
    anchors=9,
    frequent_tokens=0,
    held_out=10,
    max_length=30,
)


def planned(recipe: Recipe = RECIPE, target: TargetConfig = TARGET, **changes: Any) -> Plan:
    return plan(target, recipe, **({"samples": 110, "processes": 1, "mean_tokens": recipe.max_length} | changes))


def changed(**changes: Any) -> Recipe:
    return dataclasses.replace(RECIPE, **changes)


@pytest.mark.parametrize("name", PUBLIC)
def test_parameter_counts_are_those_of_the_real_modules(name: str) -> None:
    target, recipe = parse_target(PUBLIC[name], name), read_recipe(name)
    with torch.device("meta"):
        drafter, whole = DrafterModel(drafter_config(target, recipe)), TargetModel(target)
    found = planned(recipe, target, samples=1000)
    sizes = {key: parameter.numel() for key, parameter in drafter.named_parameters()}
    head = sum(size for key, size in sizes.items() if key.startswith(("prefix_gru", "embed_proj")))
    assert (found.head_parameters, found.backbone_parameters) == (head, sum(sizes.values()) - head)
    assert found.target_parameters == sum(parameter.numel() for parameter in whole.parameters())


def test_the_public_drafters_have_the_published_sizes() -> None:
    # The paper: the 8B head adds 56 M parameters, 5.3 % of the backbone's; the 4B drafter is labelled 0.6B.
    small, large = (planned(read_recipe(name), parse_target(config, name), samples=1000) for name, config in PUBLIC.items())
    assert round(large.head_parameters / 1e6, 1) == 55.9
    assert round(large.head_parameters / large.backbone_parameters, 3) == 0.053
    assert round(large.backbone_parameters / 1e6) == 1049
    assert round((small.head_parameters + small.backbone_parameters) / 1e9, 1) == 0.6


def test_steps_passes_and_blocks() -> None:
    found = planned(read_recipe("qwen3-8b-domino-b16"), parse_target(PUBLIC["qwen3-8b-domino-b16"], ""), samples=1_000_256, processes=8)
    assert (found.training_samples, found.steps, found.steps_per_epoch) == (1_000_000, 3 * 1_000_000 // 16, 62_500)
    assert (found.passes, found.samples_per_pass) == (1, 2)  # batch 2 on each of 8 GPUs, no accumulation
    assert (found.blocks, found.positions) == (16 * 256, 16 * 256 * 16)


@pytest.mark.parametrize(
    ("processes", "micro_batch", "expected"), [(1, 0, (1, 4)), (1, 1, (4, 1)), (2, 0, (1, 2)), (2, 1, (2, 1)), (4, 0, (1, 1))]
)
def test_a_step_is_split_over_processes_and_passes(processes: int, micro_batch: int, expected: tuple[int, int]) -> None:
    found = planned(changed(micro_batch=micro_batch), processes=processes)
    assert (found.passes, found.samples_per_pass) == expected


def test_features_take_two_bytes_for_each_number() -> None:
    assert planned(samples=110, mean_tokens=20).feature_bytes == 110 * 20 * 2 * TARGET.hidden_size * 2
    assert planned(samples=110, mean_tokens=500).feature_bytes == 110 * 30 * 2 * TARGET.hidden_size * 2, "longer samples are left out"
    # The last layer's output, for the target's own distribution, is a third part of a row.
    assert planned(changed(soft_labels=0.5), mean_tokens=20).feature_bytes == 110 * 20 * 3 * TARGET.hidden_size * 2


def batch_of(recipe: Recipe, samples: int) -> Batch:
    """A batch of the largest size that the recipe allows; only its shapes matter."""
    config = drafter_config(TARGET, recipe)
    length, rows = recipe.max_length, recipe.anchors * config.block_size
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(TARGET.vocab_size, (samples, recipe.anchors, config.num_proposals), generator=rng)
    return Batch(
        features=torch.randn(samples, length, config.feature_size, generator=rng),
        block_ids=torch.randint(TARGET.vocab_size, (samples, rows), generator=rng),
        position_ids=torch.arange(length + rows).expand(samples, -1),
        mask=torch.ones(samples, 1, rows, length + rows, dtype=torch.bool),
        prefix_ids=labels,
        labels=labels,
        keep=torch.ones(labels.shape),
    )


def loss_of(recipe: Recipe, samples: int) -> torch.Tensor:
    """One pass of the real objective."""
    drafter, target = DrafterModel(drafter_config(TARGET, recipe)).train(), TargetModel(TARGET).requires_grad_(False)
    vocabulary = torch.arange(TARGET.vocab_size)
    loss = DraftLoss(drafter, recipe)
    return loss(batch_of(recipe, samples), vocabulary, target.model.embed_tokens, target.lm_head, 0.5, 1.0).total


@pytest.mark.parametrize("kind", ["domino", "dflash"])
@pytest.mark.parametrize("rows", [45, 20])
def test_operations_are_those_that_pytorch_counts(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # 45 rows of logits fit into one chunk; chunks of 20 are computed again on the way back.
    for module in ("objective", "plan"):
        monkeypatch.setattr(f"domino_deploy.training.{module}.CHUNK_ROWS", rows)
    recipe = changed(kind=kind, features="cached")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the other kernels' products are not counted on a CPU
        loss_of(recipe, 1).backward()
    expected = counter.get_total_flops() * recipe.sequences
    assert planned(recipe).operations == pytest.approx(expected, rel=0.002)


def test_live_features_add_the_targets_forward_pass() -> None:
    target = TargetModel(TARGET)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        target.hidden_states(torch.zeros(1, RECIPE.max_length, dtype=torch.int64))
    added = planned(changed(features="live")).operations - planned(changed(features="cached")).operations
    assert added == pytest.approx(RECIPE.sequences * counter.get_total_flops(), rel=0.005)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["domino", "dflash"])
def test_activations_are_what_the_backward_pass_keeps(kind: str, dtype: str) -> None:
    recipe = changed(kind=kind, dtype=dtype, anchors=16, max_length=80)
    config = drafter_config(TARGET, recipe)
    drafter, embed = DrafterModel(config).train(), torch.nn.Embedding(TARGET.vocab_size, TARGET.hidden_size).requires_grad_(False)
    batch, parameters = batch_of(recipe, 1), {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    shapes = {parameter.shape for parameter in drafter.parameters()} | {parameter.shape[::-1] for parameter in drafter.parameters()}
    kept: dict[int, torch.Tensor] = {batch.features.untyped_storage().data_ptr(): batch.features}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        is_weight = place in parameters or (tensor.dtype is torch.bfloat16 and tensor.shape in shapes)  # cast copies
        if not is_weight and tensor.is_floating_point():
            kept[place] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        block = embed(batch.block_ids).to(getattr(torch, dtype))
        hidden = drafter.proposal_rows(drafter(block, batch.features, batch.position_ids, batch.mask).view(16, -1, TARGET.hidden_size))
        if drafter.head is not None:
            drafter.head.teacher_forced(embed(batch.prefix_ids).flatten(0, 1).to(block.dtype), hidden)
    kept[hidden.untyped_storage().data_ptr()] = hidden
    expected = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert planned(recipe).memory.activations == pytest.approx(expected, rel=0.02)


def test_optimiser_state_is_shared_by_the_processes_and_weights_are_not() -> None:
    one, four = planned(changed(micro_batch=0)).memory, planned(changed(micro_batch=0), processes=4).memory
    drafter = DrafterModel(drafter_config(TARGET, RECIPE))
    optimiser = torch.optim.AdamW(drafter.parameters())
    sum(parameter.sum() for parameter in drafter.parameters()).backward()
    optimiser.step()
    moments = sum(state[name].nbytes for state in optimiser.state.values() for name in ("exp_avg", "exp_avg_sq"))
    masters = sum(parameter.nbytes for parameter in drafter.parameters())
    assert (one.masters, one.moments, one.gradients, one.working_weights) == (masters, moments, masters, 0)
    assert (four.masters, four.moments, four.gradients) == (masters // 4, moments // 4, masters // 4)
    assert four.working_weights == masters
    assert four.target == one.target


def test_accumulated_gradients_stay_whole_until_they_are_exchanged() -> None:
    once, twice = planned(changed(micro_batch=2), processes=2).memory, planned(changed(micro_batch=1), processes=2).memory
    assert twice.gradients == once.gradients + once.working_weights


@pytest.mark.parametrize("tied", [True, False])
def test_the_whole_target_is_held_tied_weights_once(tied: bool) -> None:
    config = dataclasses.replace(TARGET, tie_word_embeddings=tied)
    held = sum(weight.nbytes for weight in TargetModel(config).parameters())
    assert planned(changed(features="cached"), config).memory.target == held
    assert planned(changed(features="live", dtype="bfloat16"), config).memory.target * 2 == held


def test_a_reduced_softmax_needs_less_memory_and_fewer_operations() -> None:
    target = dataclasses.replace(TARGET, vocab_size=50_000)
    whole, reduced = planned(target=target), planned(changed(frequent_tokens=900, random_tokens=100), target)
    # 4 samples x 9 blocks x 6 tokens beside the 1000.
    assert reduced.memory.logits * 50_000 == whole.memory.logits * 1216
    assert reduced.operations < whole.operations


def test_the_total_is_the_sum_of_its_parts_without_what_an_unfused_kernel_would_keep() -> None:
    found = planned(processes=2).to_dict()["memory"]
    assert found["total"] == sum(size for name, size in found.items() if name not in ("total", "unfused_attention"))
    scores = torch.empty(1, TARGET.num_heads, 45, 30 + 45)
    assert found["unfused_attention"] == RECIPE.num_layers * scores.nbytes


def test_the_plan_as_json_and_as_text_states_the_same() -> None:
    found = planned(processes=2)
    values = json.loads(json.dumps(found.to_dict()))
    assert values["drafter_parameters"] == found.head_parameters + found.backbone_parameters
    text = "\n".join(found.lines())
    assert f"{found.steps:,} steps of 4 samples" in text
    assert "a step is 2 passes of 1 sample on each of 2 processes" in text
    assert f"{found.blocks:,} blocks, {found.positions:,} positions" in text
    assert f"{found.memory.total / 2**30:,.1f} GiB" in text
    assert "kept on disk:" in text
    assert "live; kept on disk they would take" in "\n".join(planned(changed(features="live")).lines())


def test_the_documentation_shows_what_a_dry_run_prints() -> None:
    name = "qwen3-8b-domino-b16"
    found = planned(read_recipe(name), parse_target(PUBLIC[name], name), samples=1_420_000, mean_tokens=1000, processes=8)
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    assert "--samples 1420000 --mean-tokens 1000 --processes 8" in page
    assert "\n".join(found.lines()) in page


DOCUMENTED = [
    ("qwen3-8b-domino-b16", 1_420_000, 1000, 8, {}, "| 8 | 2 | 38.4 GiB | 9.7e14 | 266,202 | 72 |"),
    ("qwen3-8b-domino-b16", 1_420_000, 1000, 1, {}, "| 1 | 2 | 48.7 GiB | 9.7e14 | 266,202 | 576 |"),
    ("qwen3-4b-domino-b16", 1_420_000, 1000, 8, {}, "| 8 | 2 | 24.2 GiB | 5.9e14 | 266,202 | 44 |"),
    ("qwen3-4b-domino-b16", 1_420_000, 1000, 1, {}, "| 1 | 2 | 29.6 GiB | 5.9e14 | 266,202 | 348 |"),
    ("qwen3-8b-domino-b16", 100_000, 800, 1, {"epochs": 2, "micro_batch": 1}, "| 1 | 1 | 42.5 GiB | 9.2e14 | 12,468 | 26 |"),
    ("qwen3-4b-domino-b16", 100_000, 800, 1, {"epochs": 2, "micro_batch": 1}, "| 1 | 1 | 24.8 GiB | 5.6e14 | 12,468 | 15 |"),
]


@pytest.mark.parametrize(("name", "samples", "mean_tokens", "processes", "changes", "row"), DOCUMENTED)
def test_the_documented_costs_are_those_of_the_dry_run(
    name: str, samples: int, mean_tokens: int, processes: int, changes: dict[str, int], row: str
) -> None:
    target, recipe = parse_target(PUBLIC[name], name), read_recipe(name, **changes)
    found = planned(recipe, target, samples=samples, mean_tokens=mean_tokens, processes=processes)
    hours = found.operations * found.steps / (processes * 0.4 * 312e12 * 3600)
    cells = (processes, found.samples_per_pass, f"{found.memory.total / 2**30:.1f} GiB", f"{found.operations:.1e}".replace("+", ""))
    assert row == f"| {' | '.join(map(str, cells))} | {found.steps:,} | {hours:.0f} |"
    assert row in (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")


def test_what_cannot_be_planned_is_refused_all_at_once() -> None:
    with pytest.raises(TrainingError) as found:
        planned(samples=10, processes=3, mean_tokens=0)
    message = str(found.value)
    assert "samples must be more than the 10 held out, found 10" in message
    assert "sequences must be a multiple of processes times micro_batch, found 4, 3 and 1" in message
    assert "mean_tokens must be at least 1, found 0" in message
    with pytest.raises(TrainingError, match="processes must be at least 1, found 0"):
        planned(processes=0)
    with pytest.raises(TrainingError, match="num_layers must be at most the target's 6"):
        planned(changed(num_layers=9))


def test_a_targets_shape_comes_from_its_config_alone(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", family="qwen3", num_hidden_layers=6)
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    found = target_config_of(folder)
    assert (found.num_layers, found.vocab_size, found.has_qk_norm) == (6, 300, True)
    assert planned(target=found).target_parameters > 0


def test_only_the_config_of_a_hub_target_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls = write_target(tmp_path / ("a" * 40)), []

    def fetch(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options["revision"], options["allow_patterns"]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert target_config_of("org/name", "main").num_layers == 4
    assert calls == [("org/name", "main", ["config.json"])]


def test_a_target_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: expected a file, found no such file"):
        target_config_of(tmp_path)
    with pytest.raises(CheckpointError, match="expected a target, found a drafter"):
        target_config_of(Path(__file__).parents[1] / "demo" / "drafter")
