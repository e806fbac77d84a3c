"""The page over HTTP, on this machine only: it plans from public facts and keeps nothing.

Who may ask: pages that this server handed out. The Host header must name this machine, so that a
page elsewhere cannot reach it by pointing a name of its own here; a question must be JSON and must
not come from another origin, so that a page elsewhere cannot make it work.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from diminuendo import _extras
from diminuendo.errors import DiminuendoError
from diminuendo.page import document
from diminuendo.page.settings import Settings
from diminuendo.page.worker import LONGEST, GivenUp, Worker

if TYPE_CHECKING:
    import socket

LOOPBACK = "127.0.0.1"
HOSTS = ("localhost", LOOPBACK)
LARGEST_BODY = 1 << 15
KINDS = ("plan", "running", "plan.json")


def application(start: Settings | None = None, *, longest: float = LONGEST) -> Any:
    """A Starlette application that serves the page and answers it.

    start     what the form shows first
    longest   seconds after which a question is given up
    """
    with _extras.needed("starlette", extra="serve", purpose="The planner page"):
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import Response
        from starlette.routing import Route

    page = document.live(start or Settings())
    worker: list[Worker] = []

    @asynccontextmanager
    async def working(_: Any) -> AsyncIterator[None]:
        worker.append(Worker(longest=longest))
        worker[0].start()
        yield
        worker[0].stop()

    def replied(content: Any, status: int = 200) -> Response:
        return Response(
            json.dumps(content, ensure_ascii=False),
            status_code=status,
            media_type="application/json",
            headers=document.HEADERS,
        )

    async def shown(_: Request) -> Response:
        return Response(
            page,
            media_type="text/html",
            headers={**document.HEADERS, "Content-Security-Policy": document.policy(page)},
        )

    async def asked(request: Request) -> Response:
        refused = _foreign(request.headers.get)
        if refused:
            return replied({"error": refused}, 403)
        try:
            data = await _body(request)
            if data is None:
                return replied({"error": "The question is too long."}, 413)
            kind = request.path_params["kind"]
            if kind not in KINDS:
                return replied({"error": "There is no such question."}, 404)
            result = await worker[0].ask(kind, data, request.is_disconnected)
        except ValueError:
            return replied({"error": "The question is not JSON."}, 400)
        except DiminuendoError as error:
            return replied({"error": str(error)}, 422)
        except (GivenUp, ClientDisconnect):
            return Response(status_code=499)
        return replied(result)

    return Starlette(
        routes=[
            Route("/", shown, methods=["GET"]),
            Route("/api/{kind}", asked, methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS))],
        lifespan=working,
    )


def run(listening: socket.socket, start: Settings | None = None) -> None:
    """Serve on a socket that is bound already, until interrupted."""
    with _extras.needed("uvicorn", extra="serve", purpose="The planner page"):
        import uvicorn
    server = uvicorn.Server(
        uvicorn.Config(application(start), log_level="warning", timeout_graceful_shutdown=1)
    )
    server.run(sockets=[listening])


async def _body(request: Any) -> Any:
    """The JSON of a request, or None where it is longer than a form can be."""
    read = b""
    async for part in request.stream():
        read += part
        if len(read) > LARGEST_BODY:
            return None
    try:
        return json.loads(read)
    except RecursionError:
        raise ValueError from None


def _foreign(header: Callable[[str], str | None]) -> str:
    """Why this question may not have come from the page itself; empty where it may."""
    if (header("content-type") or "").split(";")[0].strip().lower() != "application/json":
        return "A question must be sent as application/json."
    origin = header("origin")
    if origin is not None and origin != f"http://{header('host')}":
        return "Questions from other pages are not answered."
    if header("sec-fetch-site") not in (None, "same-origin", "none"):
        return "Questions from other pages are not answered."
    return ""
