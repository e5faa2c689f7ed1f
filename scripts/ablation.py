"""Trains the paper's variants on the same samples and compares their acceptance lengths: see scripts/ablation.

python scripts/ablation.py TARGET WORK OUT.json [--recipe JSON] [--seeds N]

WORK holds the target's responses (`domino-deploy regenerate`), each with its kind.  Every run's result is kept in
a folder WORK/ablation-... of its recipe and samples, so an interrupted comparison goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from domino_deploy.bench.machine import this_machine, versions
from domino_deploy.checkpoint import open_target
from domino_deploy.model.loading import load_target
from domino_deploy.model.target import TargetModel
from domino_deploy.training.features import Corpus, corpus_of
from domino_deploy.training.initialise import drafter_config
from domino_deploy.training.pipeline import usable
from domino_deploy.training.progress import Progress
from domino_deploy.training.recipe import Recipe, recipe_from
from domino_deploy.training.samples import Sample, digest
from domino_deploy.training.store import read_stored
from domino_deploy.training.trainer import train

# As in the paper's table of training strategies (arXiv 2605.29707); the last one is also measured with its head off.
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {"kind": "dflash"},
    "domino, training-time test": {"causal_encoding": "training-time-test", "lambda_start": 0.0},
    "domino, teacher forcing": {"lambda_start": 0.0},
    "domino, teacher forcing and curriculum": {},
}
BASELINE = "dflash"
HEAD_OFF = "the last, head off"
_RESAMPLES = 2000  # of the bootstrap

Counts = dict[str, list[int]]  # "tokens" and "passes" of each held-out sample, in the order of the corpus


def interval(tokens: Sequence[int], passes: Sequence[int], seed: int = 0) -> tuple[float, float]:
    """95 % interval of tau = sum(tokens) / sum(passes), samples drawn again with replacement."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(tokens), size=(_RESAMPLES, len(tokens)))
    taus = np.array(tokens)[drawn].sum(axis=1) / np.array(passes)[drawn].sum(axis=1)
    low, high = np.quantile(taus, (0.025, 0.975))
    return float(low), float(high)


def gain_interval(one: Sequence[Counts], other: Sequence[Counts], seed: int = 0) -> tuple[float, float, float]:
    """tau(one) / tau(other) - 1 with its 95 % interval: the same samples drawn for both, and the seeds' runs together."""
    rng = np.random.default_rng(seed)
    count = len(one[0]["tokens"])
    drawn = np.vstack([np.arange(count)[None], rng.integers(count, size=(_RESAMPLES, count))])

    def taus(runs: Sequence[Counts]) -> np.ndarray:
        tokens, passes = (np.sum([run[name] for run in runs], axis=0) for name in ("tokens", "passes"))
        return tokens[drawn].sum(axis=1) / passes[drawn].sum(axis=1)

    gains = taus(one) / taus(other) - 1
    low, high = np.quantile(gains[1:], (0.025, 0.975))
    return float(gains[0]), float(low), float(high)


def summary(runs: Mapping[str, Sequence[Counts]], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each variant: tau over all samples and by kind, over all seeds together, with intervals; gain over DFlash."""
    rows = []
    for name, of_seeds in runs.items():
        row: dict[str, Any] = {"variant": name, "seeds": len(of_seeds), "tau": {}}
        for kind in ("all", *sorted(set(kinds))):
            chosen = [place for place, found in enumerate(kinds) if kind in ("all", found)]
            tokens, passes = ([sum(run[column][place] for run in of_seeds) for place in chosen] for column in ("tokens", "passes"))
            low, high = interval(tokens, passes)
            per_seed = [
                round(sum(run["tokens"][place] for place in chosen) / sum(run["passes"][place] for place in chosen), 4) for run in of_seeds
            ]
            row["tau"][kind] = {
                "samples": len(chosen),
                "tau": round(sum(tokens) / sum(passes), 4),
                "low": round(low, 4),
                "high": round(high, 4),
                "by_seed": per_seed,
            }
        gain, low, high = gain_interval(of_seeds, runs[BASELINE])
        row["gain_over_dflash"] = {"gain": round(gain, 4), "low": round(low, 4), "high": round(high, 4)}
        rows.append(row)
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The summary as a table for the documentation."""
    kinds = list(rows[0]["tau"])
    lines = [f"| variant | {' | '.join(kinds)} | over DFlash |", f"|---|{'---:|' * (len(kinds) + 1)}"]
    for row in rows:
        cells = [f"{found['tau']:.2f} [{found['low']:.2f}, {found['high']:.2f}]" for found in row["tau"].values()]
        gain = row["gain_over_dflash"]
        cells.append("" if row["variant"] == BASELINE else f"{gain['gain']:+.1%} [{gain['low']:+.1%}, {gain['high']:+.1%}]")
        lines.append(f"| {row['variant']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def results_folder(work: Path, recipe: Recipe, samples: Sequence[Sample]) -> Path:
    """Where results of this recipe and these samples are kept: another comparison has another folder, so none are mixed."""
    facts = json.dumps([recipe.to_dict(), digest(samples)], sort_keys=True)
    return work / f"ablation-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


@click.command()
@click.argument("target", type=click.Path(path_type=Path))
@click.argument("work", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--recipe", "changes", default="{}", help="Recipe fields as JSON; the variants' own come on top.")
@click.option("--seeds", default=3, show_default=True)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(list(VARIANTS)),
    help="Train this variant, and DFlash to compare with; may be given several times.",
)
def main(target: Path, work: Path, output: Path, changes: str, seeds: int, only: tuple[str, ...]) -> None:
    """Train every variant with every seed, then write the comparison to OUTPUT and print it."""
    base = recipe_from(json.loads(changes), "--recipe")
    checkpoint = open_target(target)
    stored = read_stored(work)
    taps = drafter_config(checkpoint.config, base).target_layer_ids
    model = load_target(checkpoint, taps, dtype=getattr(torch, base.dtype))
    corpus = corpus_of(
        model,
        stored,
        usable(stored.samples, base),  # the recipe's own seed: the same order for every variant and every seed of a run
        taps,
        with_outputs=False,
        live=False,
        dtype=getattr(torch, base.dtype),
        path=work / "ablation-features.f16",
    )
    results = results_folder(work, base, corpus.samples)
    results.mkdir(exist_ok=True)
    runs: dict[str, list[Counts]] = {name: [] for name in (*VARIANTS, HEAD_OFF)}
    for seed in range(seeds):
        for name, own in VARIANTS.items():
            if only and name not in {BASELINE, *only}:
                continue
            final, without_head = run(model, corpus, recipe_from(base.to_dict() | own | {"seed": seed}, name), results, f"{name}-{seed}")
            runs[name].append(final)
            if name == list(VARIANTS)[-1]:
                runs[HEAD_OFF].append(without_head)
        write(output, base, corpus, {name: found for name, found in runs.items() if found})


def run(model: TargetModel, corpus: Corpus, recipe: Recipe, folder: Path, name: str) -> tuple[Counts, Counts]:
    """Train one drafter, or take the result of an earlier start: counts with the head and without."""
    result = folder / f"{name.replace(', ', '-').replace(' ', '-')}.json"
    if not result.exists():
        click.echo(name, err=True)

        def tell(state: Progress) -> None:
            if state.done % 200 == 0 or state.phase != "training":
                click.echo(f"  {state.phase} {state.done}/{state.total}  {state.note}", err=True)

        work = result.with_suffix("")
        config = drafter_config(model.config, recipe)
        found = train(model, config, corpus, recipe, work / "drafter", work=work, on_progress=tell)
        if found is None:
            sys.exit("expected held-out samples, found none: --recipe must hold some out")
        counts = [{"tokens": list(walk.tokens), "passes": list(walk.passes)} for walk in (found.final, found.base)]
        part = result.with_suffix(".part")
        part.write_text(json.dumps(counts))
        part.rename(result)
        shutil.rmtree(work)  # only the comparison is wanted
    final, without_head = json.loads(result.read_text())
    return final, without_head


def write(output: Path, base: Recipe, corpus: Corpus, runs: Mapping[str, Sequence[Counts]]) -> None:
    """The comparison as it stands: settings, machine, rows and every sample's counts."""
    held_out = corpus.samples[-base.held_out :]
    kinds = [sample.kind or "unnamed" for sample in held_out]
    rows = summary(runs, kinds)
    training = corpus.samples[: -base.held_out]
    report = {
        "recipe": base.to_dict(),
        "variants": VARIANTS,
        "training_samples": len(training),
        "training_response_tokens": sum(len(sample.response_ids) for sample in training),
        "held_out_response_tokens": sum(len(sample.response_ids) for sample in held_out),
        "machine": dataclasses.asdict(this_machine()) | {"versions": versions()},
        "rows": rows,
        "kinds": kinds,
        "runs": {name: list(found) for name, found in runs.items()},
    }
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    click.echo(markdown(rows))


if __name__ == "__main__":
    main()
