"""`domino_deploy.memory_plan` and `stored_weights`: against tensors that are really there, public sizes, and formulas written out."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from domino_deploy.bundle import open_bundle
from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.checkpoint_config import target_config as parse_target
from domino_deploy.config import DrafterConfig, DrafterKind, TargetConfig
from domino_deploy.errors import OutOfRangeError, RequestError
from domino_deploy.exporters.placement import Placement
from domino_deploy.exporters.stored import stored_tensors
from domino_deploy.exporters.weights import write_weights
from domino_deploy.memory_plan import Pair, largest_batch, largest_context, plan_memory, weight_bytes
from domino_deploy.precision import Dtype, Precision
from domino_deploy.signature import GraphForm
from domino_deploy.stored_weights import DTYPES, PARTS, blocks_of, part_of, stored_bytes
from tests.support.checkpoints import write_drafter, write_target
from tests.support.public_targets import PUBLIC
from tests.support.tiny_models import drafter_config, target_config


def domino(target: TargetConfig) -> DrafterConfig:
    """The public drafters' shape."""
    shared = {field.name: getattr(target, field.name) for field in dataclasses.fields(target)}
    for name in ("family", "tie_word_embeddings", "bos_token_id", "eos_token_ids", "num_layers"):
        del shared[name]
    return DrafterConfig(
        **shared,
        num_layers=5,
        kind=DrafterKind.DOMINO,
        block_size=16,
        num_target_layers=36,
        target_layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=151669,
        shift_label=True,
        pure_draft_prefix_len=1,
        emb_dim=256,
        gru_hidden_dim=1024,
    )


QWEN3_4B, QWEN3_8B = (parse_target(PUBLIC[f"qwen3-{size}-domino-b16"], size) for size in ("4b", "8b"))
PRECISIONS = [
    *(Precision.of(dtype) for dtype in Dtype),
    Precision.of(Dtype.INT4, symmetric=False, block_size=16),
    Precision.of(Dtype.INT8, symmetric=False, drafter=Dtype.FLOAT32),
    Precision.of(Dtype.FLOAT32, lm_head=Dtype.INT4),
]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target", family="qwen3", tied=request.param, dtype="bfloat16")
    drafter = write_drafter(folder / "drafter", target, dtype="float16", intermediate_size=64)
    return open_target(target), open_drafter(drafter)


class TestWeights:
    @pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: f"{p.name}, {p.block_size}, {'sym' if p.symmetric else 'zero points'}")
    def test_bytes_of_each_part_are_those_of_the_tensors_that_an_export_writes(
        self, checkpoints: tuple[Any, Any], precision: Precision, tmp_path: Path
    ) -> None:
        written: dict[str, int] = {}
        for name, checkpoint in zip(("target", "drafter"), checkpoints, strict=True):
            (tmp_path / name).mkdir()
            write_weights(checkpoint, tmp_path / name, precision, Placement.COPY)
            for tensor, stored in stored_tensors(tmp_path / name).items():
                part = part_of(tensor, checkpoint.config)
                written[part] = written.get(part, 0) + sum(entry.nbytes for entry in stored.parts.values())
        sources = {
            name: {tensor: DTYPES[entry.dtype] for tensor, entry in checkpoint.tensors.items()}
            for name, checkpoint in zip(("target", "drafter"), checkpoints, strict=True)
        }
        planned = weight_bytes(Pair(target=checkpoints[0].config, drafter=checkpoints[1].config), precision, sources)
        assert planned == written
        assert list(planned) == [part for part in PARTS if part in planned]

    @pytest.mark.parametrize(
        ("target", "billions"),
        # Parameters that the model cards state: 4.0B and 8.2B; bf16 files of 8.04 and 16.38 GB.
        [(QWEN3_4B, 4.022468096), (QWEN3_8B, 8.190735360)],
        ids=["4b", "8b"],
    )
    def test_known_sizes_of_qwen3(self, target: TargetConfig, billions: float) -> None:
        weights = weight_bytes(Pair(target=target, drafter=None), Precision.of(Dtype.BFLOAT16))
        assert sum(weights.values()) == round(2 * billions * 1e9)
        rows = 151936 * target.hidden_size * 2
        if target.tie_word_embeddings:
            assert weights["embedding and LM head"] == rows
            assert "LM head" not in weights
        else:
            assert (weights["embedding"], weights["LM head"]) == (rows, rows)

    def test_a_drafter_adds_no_embedding_and_no_lm_head(self) -> None:
        alone = weight_bytes(Pair(target=QWEN3_8B, drafter=None), Precision.of(Dtype.FLOAT16))
        both = weight_bytes(Pair(target=QWEN3_8B, drafter=domino(QWEN3_8B)), Precision.of(Dtype.FLOAT16))
        assert {part: both[part] for part in alone} == alone
        assert both.keys() - alone.keys() == {"drafter backbone", "head", "head codebook"}
        assert both["head codebook"] == 2 * 151936 * 256

    def test_int4_takes_four_and_a_half_to_five_bits_a_weight(self) -> None:
        matrix = (4096, 2560)
        bits = [
            8 * stored_bytes(matrix, Dtype.INT4, Precision.of(Dtype.INT4, block_size=size, symmetric=symmetric)) / math.prod(matrix)
            for size, symmetric in ((32, True), (32, False), (64, True), (128, True))
        ]
        assert bits == [5.0, 5.125, 4.5, 4.25]

    def test_an_odd_number_of_four_bit_zero_points_fills_its_last_byte(self) -> None:
        assert blocks_of(96, 4, 32) == (3, 16, 2)
        assert blocks_of(96, 8, 32) == (3, 32, 3)

    def test_inputs_that_are_no_whole_number_of_blocks_are_all_named(self) -> None:
        pair = Pair(target=target_config(), drafter=drafter_config())
        with pytest.raises(RequestError, match=r"multiple of the block size 16") as caught:
            weight_bytes(pair, Precision.of(Dtype.INT8, block_size=16))
        assert "target model.layers.0.self_attn.q_proj.weight: 24 inputs" in str(caught.value)
        assert "drafter layers.1.mlp.down_proj.weight: 40 inputs" in str(caught.value)

    def test_a_draft_vocabulary_adds_its_own_rows(self) -> None:
        drafter = domino(QWEN3_4B)
        form = GraphForm(dtype="float16", draft_vocab_size=32768)
        weights = weight_bytes(Pair(target=QWEN3_4B, drafter=drafter, form=form), Precision.of(Dtype.FLOAT16))
        assert weights["draft vocabulary"] == 32768 * (8 + 2 * 2560 + 2 * 256)


class TestPlan:
    def test_the_cache_of_a_token_is_keys_and_values_of_all_layers(self) -> None:
        pair = Pair(target=QWEN3_8B, drafter=domino(QWEN3_8B), form=GraphForm(dtype="bfloat16"))
        plan = plan_memory(pair, {}, batch=3, context=1000)
        assert plan.target_cache_per_token == 36 * 2 * 8 * 128 * 2 == 147_456
        assert plan.drafter_cache_per_token == 5 * 2 * 8 * 128 * 2
        assert plan.target_cache == 3 * 1000 * 147_456
        assert plan.drafter_cache == 3 * (1000 + 16) * 20_480

    def test_caches_are_those_that_a_session_binds(self, tiny_bundle: Path) -> None:
        from domino_deploy.runtime.backends.ort import open_pair

        bundle = open_bundle(tiny_bundle)
        target, drafter = open_pair(bundle, capacity=40)
        assert drafter is not None
        rows = target.forward([1] * 39, 1)
        target.commit(39)
        drafter.propose([1] * 39 + [2], rows.features, 1)
        target.forward([3], 1)
        found = [sum(cache.nbytes for cache in graph._caches.values()) for graph in (target._passes.graph, drafter._passes.graph)]
        plan = plan_memory(Pair(target=bundle.target, drafter=bundle.drafter, form=bundle.form), {}, context=40)
        assert [plan.target_cache, plan.drafter_cache] == found

    def test_the_total_is_the_sum_of_its_lines(self) -> None:
        plan = plan_memory(Pair(target=QWEN3_4B, drafter=domino(QWEN3_4B)), {"a": 5, "b": 7}, batch=2, context=100)
        assert plan.total == 12 + plan.target_cache + plan.drafter_cache + plan.working + plan.logits
        assert plan.to_dict()["total"] == plan.total
        assert plan.to_dict()["total_weights"] == 12

    def test_logits_are_one_float_for_each_row_and_token(self) -> None:
        pair = Pair(target=QWEN3_4B, drafter=domino(QWEN3_4B))
        vocab = 151936
        assert plan_memory(pair, {}, context=8).logits == 4 * vocab * (17 + 16 + 2)
        assert plan_memory(Pair(target=QWEN3_4B, drafter=None), {}, batch=3, context=8).logits == 3 * 4 * vocab
        reduced = dataclasses.replace(pair, form=GraphForm(draft_vocab_size=1000))
        assert plan_memory(reduced, {}, context=8).logits == 4 * (17 * vocab + 18 * 1000)

    def test_the_working_memory_is_the_formulas(self) -> None:
        pair = Pair(target=QWEN3_4B, drafter=domino(QWEN3_4B))
        layer = 4 * 256 * (2 * 2560 + 3 * 9728) + 4 * 32 * 256 * 1000
        prefill = layer + 4 * 5 * 2560 * (1000 + 256)
        draft = 4 * 16 * (2 * 2560 + 3 * 9728) + 4 * 32 * 16 * 1016 + 4 * 1000 * (2 * 5 * 2560 + 2560 + 2 * 1024)
        assert plan_memory(pair, {}, batch=2, context=1000).working == 2 * max(prefill, draft)
        assert plan_memory(Pair(target=QWEN3_4B, drafter=None), {}, context=1000).working == layer

    @pytest.mark.parametrize("memory", [10**10, 2 * 10**10, 23_456_789_012])
    def test_the_largest_that_fits_fits_and_the_next_one_does_not(self, memory: int) -> None:
        pair = Pair(target=QWEN3_4B, drafter=domino(QWEN3_4B), form=GraphForm(dtype="float16"))
        weights = weight_bytes(pair, Precision.of(Dtype.FLOAT16))
        batch = largest_batch(pair, weights, memory, context=2000)
        assert plan_memory(pair, weights, batch=batch + 1, context=2000).total > memory
        assert batch == 0 or plan_memory(pair, weights, batch=batch, context=2000).total <= memory
        context = largest_context(pair, weights, memory, batch=2)
        assert context < pair.longest_context
        assert plan_memory(pair, weights, batch=2, context=context + 1).total > memory
        assert context == 0 or plan_memory(pair, weights, batch=2, context=context).total <= memory

    def test_no_context_is_longer_than_the_positions_of_both_models(self) -> None:
        short = Pair(target=QWEN3_4B, drafter=dataclasses.replace(domino(QWEN3_4B), max_position_embeddings=2048))
        assert largest_context(short, {}, 10**15, batch=1) == 2048

    def test_too_little_memory_fits_nothing(self) -> None:
        pair = Pair(target=QWEN3_4B, drafter=None)
        assert largest_batch(pair, {"weights": 100}, 99, context=1) == 0
        assert largest_context(pair, {"weights": 100}, 99, batch=1) == 0

    def test_values_out_of_range_are_all_named(self) -> None:
        with pytest.raises(OutOfRangeError, match="batch must be at least 1, found 0") as caught:
            plan_memory(Pair(target=QWEN3_4B, drafter=None), {}, batch=0, context=40961)
        assert "context must be at most 40960, the models' positions, found 40961" in str(caught.value)
