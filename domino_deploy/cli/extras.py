"""Commands whose packages a serving machine does not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from domino_deploy.errors import MissingDependencyError


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around a command's own imports: a package that is not installed becomes an error that names the extra.

    Raises:
        MissingDependencyError: something from outside domino-deploy could not be imported.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "domino_deploy":
            raise
        raise MissingDependencyError(
            f"This command needs the package {package}, which is not installed. Run: pip install 'domino-deploy[{extra}]'"
        ) from error
