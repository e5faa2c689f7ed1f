"""The prepared run on a lent GPU machine, at small size on the CPU: pieces, budget, and everything from prepare to collect."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.loading import load_target
from domino_deploy.training.batches import Batch
from domino_deploy.training.cached_pass import cached_pass
from domino_deploy.training.initialise import drafter_config
from domino_deploy.training.objective import DraftLoss
from domino_deploy.training.recipe import Recipe, read_recipe
from domino_deploy.training.regenerate import decode_batch
from domino_deploy.training.sample_lines import read_lines
from tests.support.checkpoints import write_target
from tests.support.source_copy import ROOT

RECIPE = {
    "num_layers": 1,
    "block_size": 4,
    "num_taps": 2,
    "emb_dim": 8,
    "gru_hidden_dim": 16,
    "mask_token_id": 299,
    "steps": 1,
    "sequences": 4,
    "anchors": 4,
    "frequent_tokens": 0,
    "features": "live",
    "held_out": 4,
    "dtype": "float32",
}


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.fixture
def pieces():
    import gpu_train_demo_pieces

    return gpu_train_demo_pieces


@pytest.fixture
def demo(monkeypatch):
    import gpu_train_demo

    # The checkout is importable already, and copying it takes a second.
    monkeypatch.setattr(gpu_train_demo, "_make_importable", lambda folder, site: None)
    return gpu_train_demo


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def bytes_of(count, seed=0):
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8).numpy().tobytes()


def cut_two_files(pieces, folder, piece_bytes=40_000):
    source = folder / "source"
    source.mkdir(parents=True)
    (source / "a").write_bytes(bytes_of(90_000))
    (source / "b").write_bytes(b"second")
    made = pieces.cut({"a": source / "a", "sub/b": source / "b"}, folder / "made", "inputs", piece_bytes)
    return source, made


def test_pieces_are_small_and_give_the_files_back_from_wherever_they_lie(pieces, tmp_path):
    source, made = cut_two_files(pieces, tmp_path)
    assert len(made) == 3
    assert max(path.stat().st_size for path in made) <= 40_000
    for number, path in enumerate([*made, made[0].with_name("inputs.json")]):
        (tmp_path / "arrived" / f"carry-{number}").mkdir(parents=True)
        path.rename(tmp_path / "arrived" / f"carry-{number}" / path.name)
    pieces.join(tmp_path / "arrived", "inputs", tmp_path / "out")
    assert (tmp_path / "out" / "a").read_bytes() == (source / "a").read_bytes()
    assert (tmp_path / "out" / "sub" / "b").read_bytes() == b"second"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "sub"]


def test_pieces_that_have_not_arrived_are_named(pieces, tmp_path):
    _, made = cut_two_files(pieces, tmp_path)
    made[1].unlink()
    assert pieces.missing(tmp_path / "made", "inputs") == ["inputs.1"]
    with pytest.raises(pieces.PiecesError, match=r"inputs\.1"):
        pieces.join(tmp_path / "made", "inputs", tmp_path / "out")


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_damaged_piece_is_refused(pieces, tmp_path, damage):
    _, made = cut_two_files(pieces, tmp_path)
    made[2].write_bytes(damage(made[2].read_bytes()))
    with pytest.raises(pieces.PiecesError, match=r"inputs\.2: expected"):
        pieces.missing(tmp_path / "made", "inputs")


def test_cutting_again_leaves_no_piece_of_the_archive_before(pieces, tmp_path):
    source, _ = cut_two_files(pieces, tmp_path)
    pieces.cut({"b": source / "b"}, tmp_path / "made", "inputs", 40_000)
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["inputs.0", "inputs.json"]


@pytest.mark.parametrize("largest", [5, 70_000])
def test_packed_texts_come_back_as_they_were(pieces, tmp_path, largest):
    texts = pieces.Texts(prompts=[(1, 2, largest), (3,)], responses=[(4,), ()], kinds=["code", ""])
    pieces.pack_texts(texts, tmp_path / "texts")
    assert pieces.unpack_texts(tmp_path / "texts") == texts


def test_the_budget_plans_for_what_is_left():
    from gpu_train_demo_budget import Budget, Timing, recipe_that_fits

    clock = Clock()
    budget = Budget(540, clock, started=90.0)
    assert budget.spent == 10
    clock.now += 190
    # 540 * 0.97 - 200 = 323.8 s are left until the end is written; 92 % of them, less two measurements of 5 s, in steps of 0.1 s.
    recipe = recipe_that_fits(Recipe(steps=None, epochs=3), Timing(step_s=0.1, measure_s=5.0), budget)
    assert (recipe.steps, recipe.epochs) == (2878, None)
    assert (recipe.evaluate_every, recipe.checkpoint_every) == (1439, 810)
    clock.now += 1000
    assert recipe_that_fits(recipe, Timing(step_s=0.1, measure_s=5.0), budget).steps == 1


def test_the_step_time_leaves_the_first_steps_out():
    from gpu_train_demo_budget import Timing, timing_of

    told = [("training", 1, 30.0), ("training", 21, 34.0), ("training", 41, 36.0), ("held-out", 41, 37.5)]
    assert timing_of(told, measured_on=64, held_out=256) == Timing(step_s=0.1, measure_s=6.0)


class Said:
    """A report that only listens."""

    def __init__(self):
        self.lines = []
        self.values = {}

    def say(self, text):
        self.lines.append(text)

    def note(self, **values):
        self.values |= values


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("gpu-target") / "target", num_hidden_layers=6)


@pytest.fixture(scope="module")
def target(target_folder):
    return load_target(open_target(target_folder))


def asked(pieces, count=32):
    prompts = [(5 + i, 40 + i % 7, 80) for i in range(count)]
    return pieces.Texts(prompts=prompts, responses=[()] * count, kinds=["kind"] * count)


def test_regeneration_stops_at_its_share_of_the_time(pieces, target, monkeypatch):
    import gpu_train_demo_run
    from gpu_train_demo_budget import Budget

    clock, report = Clock(), Said()

    def slow(*arguments):
        clock.now += 3
        return decode_batch(*arguments)

    monkeypatch.setattr(gpu_train_demo_run, "decode_batch", slow)
    texts = gpu_train_demo_run.regenerate(target, asked(pieces), 4, 6, Budget(20, clock), report)
    # 35 % of 20 s are over after the third batch of 3 s.
    assert report.values["responses"] + sum(len(r) < 2 for r in decode_batch(target, texts.prompts, 6).responses) <= 12
    assert 8 < len(texts.prompts) <= 12
    for prompt, response in zip(texts.prompts, texts.responses, strict=True):
        assert response == decode_batch(target, [prompt], 6).responses[0]


def test_regeneration_goes_on_in_smaller_batches_when_memory_ends(pieces, target, monkeypatch):
    import gpu_train_demo_run
    from gpu_train_demo_budget import Budget

    def narrow(model, prompts, count):
        if len(prompts) > 4:
            raise torch.OutOfMemoryError("no room")
        return decode_batch(model, prompts, count)

    monkeypatch.setattr(gpu_train_demo_run, "decode_batch", narrow)
    report = Said()
    texts = gpu_train_demo_run.regenerate(target, asked(pieces), 16, 6, Budget(600), report)
    whole = decode_batch(target, asked(pieces).prompts, 6).responses
    assert len(texts.prompts) == sum(len(response) >= 2 for response in whole)
    assert "out of memory: batches of 4 from here on" in report.lines


def write_inputs(folder, target_folder, demo, call_bytes):
    """Prepared as for a machine whose calls carry little, so that there is more than one piece."""
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    lines = [{"prompt": f"Tell me about thing number {i}.", "kind": "chat"} for i in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return demo.prepare(folder / "here", str(target_folder), folder / "prompts.jsonl", call_bytes)


@pytest.fixture
def prepared(tmp_path, target_folder, demo, monkeypatch):
    monkeypatch.setattr(demo, "tree_bytes", lambda: 0)
    monkeypatch.setattr(demo, "SMALLEST_PIECE", 0)
    told = write_inputs(tmp_path, target_folder, demo, demo.MIB + 120_000)
    return tmp_path, told


def run(demo, folder, minutes):
    paths = ["--out", folder / "out", "--recipe", folder / "recipe.json"]
    small = ["--device", "cpu", "--batch-size", 16, "--max-new-tokens", 12, "--timing-steps", 3, "--minutes", minutes]
    return demo.main([str(argument) for argument in ("--folder", folder / "there", "run", *paths, *small)])


def carry(folder, number):
    name = f"carry-{number}"
    (folder / "there").mkdir(exist_ok=True)
    (folder / "here" / name).rename(folder / "there" / name)


def test_everything_from_prepare_to_collect(prepared, demo, target, target_folder, monkeypatch):
    folder, told = prepared
    count = len(list((folder / "here").glob("carry-*")))
    assert count > 1
    assert sum(line.startswith("call ") for line in told) == count
    for number in range(count):
        if number:
            assert not (folder / "there" / "received").exists()
        carry(folder, number)
        assert demo.receive(folder / "there") == (number == count - 1)
    monkeypatch.setattr(demo, "STARTED", demo.time.monotonic())
    assert run(demo, folder, 0.05) == 0

    report = json.loads((folder / "out" / "report.json").read_text())
    assert list(report["phases"]) == ["load", "regenerate", "write responses", "corpus", "timing", "train"]
    # How many steps fit is the machine's affair, and three seconds by the real clock may be too few for those that were chosen: the run
    # then says that it stopped, with the drafter of an earlier state (the late run below has a clock of its own).
    steps = report["recipe"]["steps"]
    assert 0 < report["drafter_steps"] < steps if "stopped" in report else report["drafter_steps"] == steps
    brought = sorted(path.name for path in (folder / "out").iterdir())
    assert brought == ["drafter.0", "drafter.json", "report.json", "responses.0", "responses.json"]

    exported = []
    bundle = SimpleNamespace(path="bundle")
    # Exporting takes half a minute, and other tests do it with drafters that were trained.
    monkeypatch.setattr("domino_deploy.exporters.export.export_bundle", lambda *paths, overwrite: exported.append(paths) or bundle)
    assert demo.main(["--folder", str(folder / "back"), "collect", str(folder / "out"), "--target", str(target_folder)]) == 0
    assert open_drafter(folder / "back" / "drafter").config.block_size == 4
    assert exported == [(folder / "back" / "drafter", str(target_folder), folder / "back" / "bundle")]
    samples = read_lines(folder / "back" / "responses" / "responses-0.jsonl").samples
    assert len(samples) == report["responses"]
    assert {sample.kind for sample in samples} == {"chat"}
    assert samples[0].response_ids == decode_batch(target, [samples[0].prompt_ids], 12).responses[0]


def test_a_run_without_all_pieces_is_refused(prepared, demo):
    folder, _ = prepared
    carry(folder, 0)
    with pytest.raises(SystemExit, match="every piece"):
        run(demo, folder, 9)


@pytest.fixture
def trained(tmp_path, pieces, target_folder):
    """A trainer over forty samples, its clock and its output folder."""
    import gpu_train_demo_run
    from gpu_train_demo_budget import Budget
    from gpu_train_demo_trainer import Trainer

    recipe, clock = Recipe(**RECIPE), Clock()
    checkpoint = open_target(target_folder)
    config = drafter_config(checkpoint.config, recipe)
    model = load_target(checkpoint, config.target_layer_ids)
    texts = gpu_train_demo_run.regenerate(model, asked(pieces, 40), 40, 12, Budget(600), Said())
    corpus = gpu_train_demo_run.corpus_from(model, texts, config.target_layer_ids, recipe, tmp_path / "work")
    trainer = Trainer(model, config, corpus, recipe, tmp_path / "out", tmp_path / "work", Budget(100, clock), Said())
    return trainer, clock


def test_a_run_that_is_late_leaves_the_drafter_of_its_last_checkpoint(trained, pieces, tmp_path, monkeypatch):
    import gpu_train_demo_trainer

    trainer, clock = trained
    save_state = gpu_train_demo_trainer.train.__globals__["save_state"]
    kept = {}

    def late(folder, module, *others):
        save_state(folder, module, *others)
        kept.update({name: parameter.detach().clone() for name, parameter in module.drafter.named_parameters()})
        clock.now += 1000

    monkeypatch.setitem(gpu_train_demo_trainer.train.__globals__, "save_state", late)
    trainer.run(dataclasses.replace(trainer.recipe, steps=400, checkpoint_every=15, evaluate_every=400))
    assert trainer.report.values["stopped"] == "stopped after 21 of 400 steps"
    assert trainer.report.values["drafter_steps"] == 15
    pieces.join(tmp_path / "out", "drafter", tmp_path / "joined")
    assert open_drafter(tmp_path / "joined").config == trainer.config
    found = load_file(tmp_path / "joined" / "model.safetensors")
    expected = kept["layers.0.mlp.up_proj.weight"]
    torch.testing.assert_close(found["layers.0.mlp.up_proj.weight"].float(), expected, rtol=1e-3, atol=1e-4)


def test_a_run_that_fails_leaves_what_was_done_and_says_why(prepared, demo, pieces, monkeypatch):
    import gpu_train_demo_run

    folder, _ = prepared
    monkeypatch.setattr(demo, "STARTED", demo.time.monotonic())
    monkeypatch.setattr(gpu_train_demo_run.Trainer, "timed", lambda self, steps: 1 / 0)
    for number in range(len(list((folder / "here").glob("carry-*")))):
        carry(folder, number)
    assert run(demo, folder, 0.1) == 1
    assert "ZeroDivisionError" in json.loads((folder / "out" / "report.json").read_text())["error"]
    assert pieces.missing(folder / "out", "responses") == []


def test_passes_get_smaller_when_memory_ends(trained, monkeypatch):
    trainer, _ = trained
    train = trainer._train

    def narrow(corpus, recipe, *others):
        if recipe.micro_batch != 1:
            raise torch.OutOfMemoryError("no room")
        return train(corpus, recipe, *others)

    monkeypatch.setattr(trainer, "_train", narrow)
    trainer.timed(3)
    assert trainer.recipe.micro_batch == 1
    assert "out of memory: passes of 2 samples from here on" in trainer.report.lines


def test_the_calls_carry_every_piece_and_fit_the_tool(demo):
    lines = demo.calls(demo.FOLDER, 3)
    assert [line.split(":")[0] for line in lines[:3]] == ["call 1 of 3", "call 2 of 3", "call 3 of 3"]
    for number, line in enumerate(lines[:3]):
        assert f'carry ["build/gpu-demo/carry-{number}"]' in line
        assert len(line) < 2000
    assert "run --minutes 9" in lines[2]
    assert "rehearse" in lines[0]


def test_the_committed_recipe_can_be_read():
    recipe = read_recipe(ROOT / "scripts" / "gpu_train_demo.json")
    assert recipe.features == "live"  # ten million tokens of cached features would be 60 GB


def test_nothing_of_a_step_is_made_on_the_cpu_when_the_models_are_elsewhere(target_folder):
    # No GPU here: on the meta device, too, an operation with a tensor of the CPU fails.
    meta, recipe = torch.device("meta"), Recipe(**RECIPE | {"soft_labels": 0.5})
    checkpoint = open_target(target_folder)
    config = drafter_config(checkpoint.config, recipe)
    model = load_target(checkpoint, (*config.target_layer_ids, checkpoint.config.num_layers - 1)).to(meta)
    drafter, width, rows = DrafterModel(config).to(meta), config.hidden_size, torch.zeros(3, dtype=torch.int64, device=meta)

    def empty(*shape, dtype=torch.float32):
        return torch.zeros(*shape, dtype=dtype, device=meta)

    def ids(*shape):
        return empty(*shape, dtype=torch.int64)

    samples, anchors, block, proposals, length = 2, 4, config.block_size, config.num_proposals, 9
    batch = Batch(
        features=empty(samples, length, config.feature_size),
        block_ids=ids(samples, anchors * block),
        position_ids=ids(samples, length + anchors * block),
        mask=empty(samples, 1, anchors * block, length + anchors * block, dtype=torch.bool),
        prefix_ids=ids(samples, anchors, proposals),
        labels=ids(samples, anchors, proposals),
        keep=empty(samples, anchors, proposals),
        outputs=empty(samples, anchors, proposals, width),
    )
    loss = DraftLoss(drafter, recipe)(batch, ids(config.vocab_size), model.model.embed_tokens, model.lm_head, 0.5, 3.0)
    loss.total.backward()
    assert drafter.fc.weight.grad.device == meta

    caches = list(zip(*model.empty_caches(3, 20), strict=True))
    for new in (1, 5):
        logits, features = cached_pass(model, ids(3, new), rows, rows, caches, 10, True)
        assert logits.device == features.device == meta
    assert model.hidden_states(ids(3, 5))[0].device == meta
    output = drafter.cached(
        model.model.embed_tokens(drafter.block_ids(rows)),
        empty(3, 5, config.feature_size),
        ids(3, 5 + block),
        empty(3, 1, block, 30, dtype=torch.bool),
        rows,
        *drafter.empty_caches(3, 30),
    )
    hidden = drafter.proposal_rows(output.hidden)
    assert drafter.draft(model.model.embed_tokens, rows, hidden, model.lm_head(hidden)).device == meta
