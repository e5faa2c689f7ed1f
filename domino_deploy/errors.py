"""Every error that domino-deploy raises on purpose.

    DominoDeployError
    ├── CheckpointError     a checkpoint folder, its config.json or its tensors
    ├── PairingError        a drafter and a target that do not belong together
    ├── BundleError         a bundle folder, its manifest or its files
    ├── EngineError         an engine folder: damaged, stale, or made for another GPU, TensorRT, plugin or bundle
    ├── ExportError         a graph that could not be made
    ├── VerificationError   an exported graph whose numbers are not PyTorch's
    ├── CapacityError       a prompt or a request that the caches cannot hold
    ├── RequestError        a prompt, a sampling value or a stop condition
    │   ├── OutOfRangeError     arguments out of range, each by its name
    │   └── ConstraintError     a form of the answer that cannot be enforced
    ├── QueueFullError      an engine that has as many requests waiting as it may
    ├── DrainingError       an engine that takes no more requests
    ├── MeasurementError    a server to be measured that gives no answers
    ├── TrainingError       training data or a training run
    └── MissingDependencyError   an optional package; the message names the extra

A message has three parts: what was expected, what was found, what to do next.  Only the command line turns these
into exit codes (`exit_code`); an unexpected exception keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence


class DominoDeployError(Exception):
    """Base of the tree; `exit_code` is what the command line returns for it."""

    exit_code = 1


class CheckpointError(DominoDeployError):
    """A checkpoint cannot be used; the message lists every offending item."""

    exit_code = 4


class PairingError(DominoDeployError):
    """Drafter and target do not belong together; the message lists every mismatch."""

    exit_code = 4


class BundleError(DominoDeployError):
    """A bundle is missing, incomplete, altered or of another format version."""

    exit_code = 4


class EngineError(DominoDeployError):
    """Engines are missing, damaged, stale, or made for another GPU, TensorRT version, plugin or bundle."""

    exit_code = 4


class ExportError(DominoDeployError):
    """A graph could not be exported."""


class VerificationError(DominoDeployError):
    """An exported graph does not reproduce PyTorch's numbers."""


class CapacityError(DominoDeployError):
    """The request needs more rows than the caches hold."""


class RequestError(DominoDeployError):
    """A value of the request is out of range."""

    exit_code = 2


class OutOfRangeError(RequestError):
    """Arguments out of range: `problems` says of each, by its name, what it must be and what was found."""

    def __init__(self, problems: Mapping[str, str], advice: str) -> None:
        self.problems = dict(problems)
        self._advice = advice
        super().__init__(self.told(lambda name: name))

    def told(self, called: Callable[[str], str]) -> str:
        """The message with the arguments' names as the reader knows them: on a command line they are options."""
        problems = [f"{called(name)} {problem}" for name, problem in self.problems.items()]
        return listed(f"Expected values in range, found {len(problems)} out of it:", problems, self._advice)


class ConstraintError(RequestError):
    """What the answer must match cannot be enforced."""


class QueueFullError(DominoDeployError):
    """As many requests wait as may; `retry_after_seconds` is when another try may find room."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DrainingError(DominoDeployError):
    """The engine takes no more requests: it is not started, shutting down, or has failed."""


class MeasurementError(DominoDeployError):
    """A server that was to be measured cannot be asked, or answers no request."""


class TrainingError(DominoDeployError):
    """Training data or a training run cannot be used."""


class MissingDependencyError(DominoDeployError):
    """An optional package is not installed; the message names the extra that brings it."""

    exit_code = 3


def listed(intro: str, problems: Sequence[str], advice: str) -> str:
    """One message for all `problems`: intro, one line per problem, what to do."""
    return "\n".join([intro, *(f"  - {problem}" for problem in problems), advice])


def shortened(problems: Sequence[str], most: int) -> list[str]:
    """The first `most` problems, and how many more there are."""
    rest = len(problems) - most
    return [*problems[:most], f"and {rest} more"] if rest > 0 else list(problems)


def one_line(text: str, most: int = 200) -> str:
    """Someone else's words for a message of ours: one line, cut short, and what does not print as its escape."""
    printable = "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in " ".join(text.split()))
    return printable if len(printable) <= most else f"{printable[: most - 3]}..."
