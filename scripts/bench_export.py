"""Runs one `domino-deploy export` on a random pair of a public shape and prints what it cost, as JSON: see scripts/bench_export.

Peak memory is the largest resident set of the process as GNU time reports it (`time -v`): it counts pages of memory-mapped
files too.  Nothing is verified: export alone is measured.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from domino_deploy.bench.machine import this_machine, versions

BUILD = Path(__file__).parents[1] / "build"
_LIBRARIES = ("torch", "onnx", "onnx-ir", "onnxscript", "safetensors")
_BLOCK_BYTES = 512  # unit of getrusage's ru_oublock on Linux, `%O` of GNU time


def random_pair(shape: str, layers: int | None) -> Path:
    """The pair's folder in build/, made unless it is there; a pair that was left half-written never has that name."""
    folder = BUILD / (f"random-{shape}" if layers is None else f"random-{shape}-{layers}-layers")
    if not folder.is_dir():
        BUILD.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD, prefix=f"{folder.name}.") as unfinished:
            command = [sys.executable, str(Path(__file__).with_name("random_pair.py")), "--shape", shape, "--output", f"{unfinished}/pair"]
            subprocess.run([*command, *([] if layers is None else ["--layers", str(layers)])], check=True)
            (Path(unfinished) / "pair").rename(folder)
    return folder


def measured(command: Sequence[str], gnu_time: str = "time") -> dict[str, Any]:
    """Run `command`, its output on our stderr, under GNU time.

    Returns:
        seconds: wall clock, with Python's start.
        cpu_seconds: user and system time of all threads, for comparisons on a machine that does other work too.
        peak_memory_mb: largest resident set, MB (10^6).
        blocks_written_bytes: what the process caused to be written, from the system's own count; 0 where it keeps none.

    Raises:
        click.ClickException: there is no GNU time, or the command failed.
    """
    if shutil.which(gnu_time) is None:
        raise click.ClickException(f"expected GNU time, found no program {gnu_time!r}. Install it: apt-get install time")
    with tempfile.NamedTemporaryFile(mode="r", encoding="utf-8") as file:
        code = subprocess.run([gnu_time, "-f", "%e %U %S %M %O", "-o", file.name, *command], stdout=sys.stderr, check=False).returncode
        if code != 0:
            raise click.ClickException(f"expected exit code 0, found {code} from: {' '.join(command)}. Its own message is above.")
        seconds, user, system, kilobytes, blocks = file.read().split()
    return {
        "seconds": float(seconds),
        "cpu_seconds": round(float(user) + float(system), 2),
        "peak_memory_mb": round(int(kilobytes) * 1024 / 1e6),
        "blocks_written_bytes": int(blocks) * _BLOCK_BYTES,
    }


def file_sizes(bundle: Path) -> dict[str, int]:
    """Bytes of a bundle's files: `bundle_bytes` of all, `written_bytes` of those that no other name shares (a hard link wrote nothing)."""
    files = [path.stat() for path in bundle.rglob("*") if path.is_file()]
    return {
        "bundle_bytes": sum(file.st_size for file in files),
        "written_bytes": sum(file.st_size for file in files if file.st_nlink == 1),
        "linked_files": sum(file.st_nlink > 1 for file in files),
    }


@click.command()
@click.option("--shape", type=click.Choice(["qwen3-4b", "qwen3-8b"]), required=True, help="Whose widths.")
@click.option("--dtype", help="Passed on to export.  [default: export's own]")
@click.option("--layers", type=click.IntRange(1, 36), help="Layers of the target.  [default: all 36]")
@click.option(
    "--keep", type=click.Path(path_type=Path), help="Leave the bundle here, on the pair's file system for links.  [default: remove it]"
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(*, shape: str, dtype: str | None, layers: int | None, keep: Path | None, options: tuple[str, ...]) -> None:
    """Measure an export of a random pair; OPTIONS, after --, are export's."""
    pair = random_pair(shape, layers)
    bundle = keep or pair.with_name(f"{pair.name}-bundle")
    export = ["domino-deploy", "-v", "export", "--ckpt", str(pair / "drafter"), "--target", str(pair / "target"), "-o", str(bundle)]
    export += ["--skip-verification", *(["--dtype", dtype] if dtype else []), *options]
    try:
        result = {"shape": shape, "layers": layers or 36, "command": " ".join(export), **measured(export), **file_sizes(bundle)}
    finally:
        if keep is None and bundle.is_dir():
            shutil.rmtree(bundle)
    libraries = {name: metadata.version(name) for name in _LIBRARIES}
    click.echo(json.dumps(result | {"versions": versions() | libraries, "machine": asdict(this_machine())}, indent=2))


if __name__ == "__main__":
    main()
