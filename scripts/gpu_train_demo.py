"""Prepares, receives, runs and collects the training run on a lent GPU machine; `scripts/gpu_train_demo` says how."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import gpu_train_demo_pieces as pieces

STARTED = time.monotonic()  # the run's minutes count from here: importing torch is part of them
ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "gpu-demo"
RECIPE = Path(__file__).with_suffix(".json")
MIB = 2**20
CALL_BYTES = 64 * MIB  # working tree and carried paths of one call
LARGEST_PIECE = 60 * MIB
SMALLEST_PIECE = 8 * MIB
MAX_PROMPT_TOKENS = 200
# What the training code imports there; importing the rest of the checkout is never needed.
NEEDED = ("torch", "numpy", "safetensors", "matplotlib", "click", "jinja2", "tokenizers")
NEEDED_FOR_GGUF = ("gguf", "tqdm", "yaml", "requests")


def prepare(folder: Path, target: str, prompts: Path | None, call_bytes: int = CALL_BYTES) -> list[str]:
    """Write `folder`/carry-0, carry-1, ... and return the calls to make, as text.

    Args:
        folder: made anew.
        target: `demo`, or a folder with the target's checkpoint and tokenizer.
        prompts: JSONL; None for the `huge` set of `demo_training_prompts.py`.
        call_bytes: what one call may carry, working tree included.
    """
    from domino_deploy.checkpoint import open_target
    from domino_deploy.checkpoint_text import chat_template, special_tokens, tokenizer_file
    from domino_deploy.demo import demo_gguf, demo_target
    from domino_deploy.runtime.text import Tokenizer
    from domino_deploy.training.prompt_file import read_conversations, tokenise

    tree = tree_bytes()
    piece_bytes = min(LARGEST_PIECE, call_bytes - tree - MIB)
    if piece_bytes < SMALLEST_PIECE:
        raise SystemExit(
            f"expected a working tree well below {call_bytes / MIB:.0f} MiB, found {tree / MIB:.1f} MiB. Move large files to build/."
        )
    for old in folder.glob("carry-*"):
        shutil.rmtree(old)
    folder.mkdir(parents=True, exist_ok=True)
    if prompts is None:
        prompts = folder / "prompts.jsonl"
        if not prompts.exists():
            subprocess.run([sys.executable, ROOT / "scripts" / "demo_training_prompts.py", "huge", prompts], check=True)
    checkpoint = open_target(demo_target() if target == "demo" else target)
    source = checkpoint.folder
    tokenizer = Tokenizer(tokenizer_file(source), chat_template=chat_template(source), special_tokens=special_tokens(source))
    found = tokenise(read_conversations(prompts), tokenizer, MAX_PROMPT_TOKENS).prompts
    texts = pieces.Texts(prompts=[prompt.ids for prompt in found], responses=[()] * len(found), kinds=[prompt.kind for prompt in found])
    pieces.pack_texts(texts, folder / "prompts.npz")

    files = {"prompts.npz": folder / "prompts.npz"}
    if target == "demo":
        files |= {demo_gguf().name: demo_gguf(), "site/gguf": _package("gguf")}  # the one package that such machines lack
    else:
        files |= {f"target/{path.name}": path for path in sorted(source.iterdir()) if path.suffix in (".json", ".safetensors")}
    made = pieces.cut(files, folder, "inputs", piece_bytes)
    pieces.spread(made, folder / "inputs.json")
    lines = [f"{len(found)} prompts; the working tree is {tree / MIB:.1f} MiB of each call's {call_bytes / MIB:.0f} MiB"]
    return lines + calls(folder, len(made))


def calls(folder: Path, count: int) -> list[str]:
    """The calls of the `run` tool, in order: command, carry, timeout_s."""
    script, lines = "bash scripts/gpu_train_demo", []
    for number in range(count):
        commands = [f"{script} receive"]
        if number == 0:
            commands.append(f"{script} rehearse")
        if number == count - 1:
            commands = [*commands[1:], f"{script} run --minutes 9"]
        timeout = 600 if number == count - 1 else 120
        carry = os.path.relpath(folder / f"carry-{number}", ROOT)
        lines.append(f'call {number + 1} of {count}: command "{" && ".join(commands)}", carry ["{carry}"], timeout_s {timeout}')
    return [*lines, "then here: scripts/gpu_train_demo collect FILES_AT   (files_at of the last call's answer)"]


def receive(folder: Path) -> bool:
    """Check what has arrived and say what this machine lacks; with the last piece, make the target. Whether all is there."""
    print(f"python {sys.version.split()[0]} at {sys.executable}")
    absent = pieces.missing(folder, "inputs")
    if absent:
        print(f"pieces that have not arrived: {', '.join(absent)}")
    elif not (folder / "received").is_dir():
        aside = folder / "receiving"
        shutil.rmtree(aside, ignore_errors=True)
        pieces.join(folder, "inputs", aside)
        _make_importable(folder, aside / "site")
        for gguf in aside.glob("*.gguf"):
            _refuse_missing(NEEDED_FOR_GGUF)
            from domino_deploy.gguf_target import weights_from_gguf

            (aside / "target").mkdir()
            weights_from_gguf(gguf, aside / "target")
            gguf.unlink()
        aside.rename(folder / "received")
    _make_importable(folder, folder / "received" / "site")
    _refuse_missing(NEEDED)
    print(f"[{time.monotonic() - STARTED:6.1f} s] {'ready to run' if not absent else 'not ready to run'}", flush=True)
    return not absent


def run(
    folder: Path, out: Path, recipe_file: Path, *, minutes: float, device: str, batch_size: int, max_new_tokens: int, timing_steps: int
) -> bool:
    """The run, on what `receive` made; whether all of it was done."""
    if not receive(folder):
        raise SystemExit("expected every piece to have arrived, found some missing. Carry them with `receive` first.")
    import gpu_train_demo_run
    from gpu_train_demo_budget import Budget

    from domino_deploy.training.distributed import device_of
    from domino_deploy.training.recipe import read_recipe

    received = folder / "received"
    return gpu_train_demo_run.run(
        received / "target",
        pieces.unpack_texts(received / "prompts.npz"),
        read_recipe(recipe_file),
        out=out,
        work=folder / "work",
        budget=Budget(60 * minutes, started=STARTED),
        device=device_of(device),
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        timing_steps=timing_steps,
    )


def rehearse(folder: Path, device: str, minutes: float) -> bool:
    """The whole run with a tiny target of noise, to find what does not work on this machine before the minutes count."""
    _make_importable(folder, None)
    _refuse_missing(NEEDED)
    sys.path.append(str(ROOT))
    import gpu_train_demo_run
    from gpu_train_demo_budget import Budget

    from domino_deploy.training.distributed import device_of
    from domino_deploy.training.recipe import read_recipe
    from tests.support.checkpoints import write_target

    work = folder / "rehearsal"
    shutil.rmtree(work, ignore_errors=True)
    target = write_target(work / "target", num_hidden_layers=8)
    texts = pieces.Texts(prompts=[(5 + i % 200, 7, 20 + i // 200) for i in range(600)], responses=[()] * 600, kinds=[""] * 600)
    changes = {"mask_token_id": 299, "emb_dim": 8, "gru_hidden_dim": 16, "sequences": 16, "held_out": 32}
    return gpu_train_demo_run.run(
        target,
        texts,
        read_recipe(RECIPE, **changes),
        out=work / "out",
        work=work / "work",
        budget=Budget(60 * minutes),
        device=device_of(device),
        batch_size=256,
        max_new_tokens=48,
    )


def collect(brought: Path, folder: Path, target: str) -> None:
    """Put together what came back: `folder`/drafter, opened and exported with its target, and the responses as training samples."""
    from domino_deploy.checkpoint import open_drafter
    from domino_deploy.demo import demo_target
    from domino_deploy.exporters.export import export_bundle
    from domino_deploy.training.sample_lines import line_of
    from domino_deploy.training.samples import Sample

    for name in ("drafter", "responses"):
        shutil.rmtree(folder / name, ignore_errors=True)
        pieces.join(brought, name, folder / name)
    texts = pieces.unpack_texts(folder / "responses" / "responses.npz")
    rows = zip(texts.prompts, texts.responses, texts.kinds, strict=True)
    with (folder / "responses" / "responses-0.jsonl").open("wb") as file:
        file.writelines(line_of(Sample(prompt_ids=tuple(ids), response_ids=tuple(response), kind=kind)) for ids, response, kind in rows)
    config = open_drafter(folder / "drafter").config
    size = sum(path.stat().st_size for path in (folder / "drafter").iterdir())
    print(f"{folder / 'drafter'}: {config.num_layers} layers, blocks of {config.block_size}, {size / 1e6:.1f} MB")
    print(f"{folder / 'responses' / 'responses-0.jsonl'}: {len(texts.prompts)} samples")
    bundle = export_bundle(folder / "drafter", demo_target() if target == "demo" else target, folder / "bundle", overwrite=True)
    print(f"{bundle.path}: exported and verified against PyTorch")


def tree_bytes() -> int:
    """What travels with every call: files that git tracks or does not ignore, and a folder shared/."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True).stdout
    paths = {ROOT / name for name in listed.decode().split("\0") if name} | set((ROOT / "shared").rglob("*"))
    return sum(path.stat().st_size for path in paths if path.is_file())


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"expected the package {name}, found none. Run: pip install -e '.[train]'")
    return Path(spec.submodule_search_locations[0])


def _make_importable(folder: Path, site: Path | None) -> None:
    """Let `import domino_deploy` find this checkout, whose folders stand beside it, and `site` what was carried."""
    places = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
    own = folder / "site"
    shutil.rmtree(own, ignore_errors=True)
    for package in sorted(places, key=len):
        target = own / package.replace(".", "/")
        shutil.copytree(ROOT / places[package], target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (own, *([site] if site else [])):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    importlib.invalidate_caches()


def _refuse_missing(names: Sequence[str]) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"expected the packages {', '.join(names)}, found none of these: {', '.join(missing)}. Carry them as wheels, unpacked "
            "into a folder that PYTHONPATH names."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_train_demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where everything is kept")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare")
    command.add_argument("--target", default="demo", help="demo, or a folder")
    command.add_argument("--prompts", type=Path, help="JSONL; by default the set `huge` of demo_training_prompts.py")
    commands.add_parser("receive")
    command = commands.add_parser("run")
    command.add_argument("--minutes", type=float, default=9)
    command.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or FOLDER / "out"))
    command.add_argument("--device", default="auto")
    command.add_argument("--batch-size", type=int, default=2048)
    command.add_argument("--max-new-tokens", type=int, default=256)
    command.add_argument("--recipe", type=Path, default=RECIPE)
    command.add_argument("--timing-steps", type=int, default=41, help="at least 2")
    command = commands.add_parser("rehearse")
    command.add_argument("--minutes", type=float, default=0.5)
    command.add_argument("--device", default="auto")
    command = commands.add_parser("collect")
    command.add_argument("brought", type=Path, help="folder with what came back")
    command.add_argument("--target", default="demo", help="demo, or a folder")
    chosen = parser.parse_args(arguments)
    if chosen.command == "run" and chosen.timing_steps < 2:
        parser.error("argument --timing-steps: expected 2 or more")
    folder = chosen.folder.resolve()
    try:
        if chosen.command == "prepare":
            print("\n".join(prepare(folder, chosen.target, chosen.prompts)))
        elif chosen.command == "receive":
            receive(folder)
        elif chosen.command == "run":
            names = ("minutes", "device", "batch_size", "max_new_tokens", "timing_steps")
            done = run(folder, chosen.out, chosen.recipe, **{name: getattr(chosen, name) for name in names})
            return 0 if done else 1
        elif chosen.command == "rehearse":
            return 0 if rehearse(folder, chosen.device, chosen.minutes) else 1
        else:
            collect(chosen.brought, folder, chosen.target)
    except pieces.PiecesError as error:
        raise SystemExit(str(error)) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
