"""The chat page at `/`: files of `static/`, read once and served under fixed names; what they may do is in `middleware.py`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from domino_deploy.server.errors import ApiError

INDEX = "index.html"
_ICON = "icon.svg"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# A browser asks again each time: an upgraded server must not be met by an old script.
_HEADERS = {"cache-control": "no-cache"}


@cache
def page_files() -> dict[str, bytes]:
    """The page's files by name; whatever else is asked for is not there, so no path of a client is ever opened."""
    folder = files(__package__).joinpath("static")
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if PurePosixPath(entry.name).suffix in _MEDIA_TYPES}


async def _index(request: Request) -> Response:
    return _served(INDEX)


async def _icon(request: Request) -> Response:
    """Browsers ask for it by themselves, with no key, beside whatever they show."""
    return _served(_ICON)


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in page_files():
        raise ApiError(404, f"Expected a file of the page, found {request.url.path}. The page is at /.", code="unknown_url")
    return _served(name)


def _served(name: str) -> Response:
    return Response(page_files()[name], media_type=_MEDIA_TYPES[PurePosixPath(name).suffix], headers=_HEADERS)


routes = [Route("/", _index), Route("/favicon.ico", _icon), Route("/static/{name}", _static)]
