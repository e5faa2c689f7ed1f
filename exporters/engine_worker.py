"""The process that builds one engine, and its parent's end of it.

    python -m domino_deploy.exporters.engine_worker JOB.json

A process of its own, for three reasons: the RTX parser loads a library by a name that only LD_LIBRARY_PATH at a process' start makes
known; a C++ exception in a parser ends the process; and the memory of one engine is given back before the next.  It answers on stdout,
one JSON object a line: {"step": ...} as it goes, then {"built": ...} or {"error": ..., "kind": ...}.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from domino_deploy import errors, tensorrt_libraries
from domino_deploy.config_json import from_json, to_json
from domino_deploy.engines import Flavour
from domino_deploy.errors import DominoDeployError, EngineError, ExportError
from domino_deploy.exporters.trt_api import RTX_LINK, BuildJob, BuiltEngine, Progress, build
from domino_deploy.plugins import op

_TRITON_CACHE = ".triton"
_LAST_WORDS = 600  # characters of a dead worker's stderr in its error


def run_job(job: BuildJob, folder: Path, progress: Progress) -> BuiltEngine:
    """Do a job in a new process.

    Args:
        job: what to build.
        folder: an existing one for the job's own small files.
        progress: told each step.

    Raises:
        MissingDependencyError, ExportError: as `trt_api.build`; also when the process ends without an answer.
        EngineError: a file cannot be read or written.
    """
    job_file = folder / f"{job.graph}.job.json"
    job_file.write_text(json.dumps(to_json(job)), encoding="utf-8")
    # -P: a folder of the user's must not shadow a module.
    command = [sys.executable, "-P", "-m", __name__, str(job_file)]
    with tempfile.TemporaryFile(dir=folder) as words:
        worker = subprocess.Popen(
            command, env=_environment(job.flavour, folder), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words, text=True
        )
        with worker, _killed_at_the_end(worker):
            assert worker.stdout is not None, "it is a pipe"
            answer = _answer(worker.stdout, progress)
            worker.wait()
        if "built" in answer:
            return from_json(BuiltEngine, answer["built"], str(job_file), error=ExportError, advice="Please report it.")
        words.seek(0)
        said = words.read().decode(errors="replace")
        if "error" in answer:
            kind = getattr(errors, answer["kind"])
            raise kind("\n".join([answer["error"], *_plugins_words(said, answer["error"])]))
        last = said.strip()[-_LAST_WORDS:]
    raise ExportError(
        f"{job.graph}: expected {job.flavour} to parse the graph and build its engine, found that {_ending(worker.returncode)}. "
        f"Its last words: {last or 'none'}\nTry --plugin none or a smaller --max-batch-size and --max-model-len, and report it if it stays."
    )


@contextlib.contextmanager
def _killed_at_the_end(worker: subprocess.Popen[str]) -> Any:
    """An interrupted parent leaves no worker behind."""
    try:
        yield
    except BaseException:
        worker.kill()
        raise


def _answer(lines: IO[str], progress: Progress) -> dict[str, Any]:
    """The last object that is no step; empty if the worker died before it."""
    answer: dict[str, Any] = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # half a line of a dying process
            message = json.loads(line)
            if "step" in message:
                progress(message["step"])
            else:
                answer = message
    return answer


def _plugins_words(said: str, error: str) -> list[str]:
    """Refusals of the compiled plugin: a product that gives a library no logger leaves it stderr alone."""
    return [line for line in dict.fromkeys(said.splitlines()) if line.startswith(f"{op.DOMAIN}::") and line not in error]


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"the process ended with exit code {returncode}"
    name = signal.Signals(-returncode).name
    return f"the process was ended by {name}" + (" (the system does that when memory runs out)" if name == "SIGKILL" else "")


def _environment(flavour: Flavour, folder: Path) -> dict[str, str]:
    """The worker's: as ours, and for TensorRT-RTX a folder in which its library has the name that the parser asks for.

    Triton compiles, whatever else it was told, and keeps what it compiles in the job's folder: an exception in a plugin's callback ends
    the process, and a home folder need not be writable.
    """
    environment = dict(os.environ) | {"TRITON_CACHE_DIR": str(folder.absolute() / _TRITON_CACHE)}
    environment.pop("TRITON_INTERPRET", None)
    library = tensorrt_libraries.rtx_library() if flavour is Flavour.TENSORRT_RTX else None
    if library is not None:
        link = folder / RTX_LINK
        link.unlink(missing_ok=True)
        link.symlink_to(library)
        before = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = str(folder) if not before else f"{folder}{os.pathsep}{before}"
    return environment


def main(job_file: str) -> None:
    """The worker: do the job, answer on stdout."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is for the parent's error message

    def say(message: dict[str, object]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    job = from_json(BuildJob, json.loads(Path(job_file).read_text(encoding="utf-8")), job_file)
    try:
        built = build(job, lambda step: say({"step": step}))
    except DominoDeployError as error:
        say({"error": str(error), "kind": type(error).__name__})
    except OSError as error:
        found = f"{job.graph}: expected files that the build can read and write, found: {error}"
        say({"error": f"{found}. Free disk space, or choose another folder (-o) or --timing-cache.", "kind": EngineError.__name__})
    else:
        say({"built": to_json(built)})
    answers.close()
    # Without the libraries' own clean-up, which has nothing left to save and may itself fail without a driver.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
