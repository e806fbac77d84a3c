"""The page and its facts over HTTP: anybody who reaches it reads; writing needs a token."""

from __future__ import annotations

import hmac
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diminuendo import __version__, _extras
from diminuendo.budget import Budget
from diminuendo.errors import BudgetRefused, DiminuendoError, InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger import mechanisms, view
from diminuendo.ledger.book import Ledger
from diminuendo.ledger.page import html
from diminuendo.ledger.records import Event

LOOPBACK = "127.0.0.1"
_STATUS = {"BudgetRefused": 409, "LedgerError": 503}


def application(
    url: str | None, *, token: str | None = None, hosts: tuple[str, ...] = ("localhost", LOOPBACK)
) -> Any:
    """A Starlette application for the ledger at a URL.

    token  what a write must send as "Authorization: Bearer …"; without one nothing is written
    hosts  the names by which the server may be addressed: a page elsewhere cannot reach it by
           pointing a name of its own here
    """
    with _extras.needed("starlette", extra="serve", purpose="Serving a ledger"):
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import Request
        from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse
        from starlette.routing import Route

    verified = _Verified()

    def answered(work: Callable[[Ledger, Request, Any], Any], *, write: bool = False) -> Any:
        """A handler that opens the ledger in a thread, and says an error as JSON."""

        def ask(request: Request, body: Any) -> Any:
            try:
                with Ledger(url, readonly=not write, create=False) as ledger:
                    return work(ledger, request, body)
            except DiminuendoError as error:
                status = _STATUS.get(type(error).__name__, 400)
                return JSONResponse({"error": str(error)}, status_code=status)

        async def handle(request: Request) -> Any:
            if write and not _allowed(request.headers.get("authorization", ""), token):
                words = "Writing needs the token" if token else "This server only reads"
                return JSONResponse({"error": f"{words}."}, status_code=403)
            try:
                body = await request.json() if write else None
            except ValueError:
                return JSONResponse({"error": "The body is not JSON."}, status_code=400)
            return await run_in_threadpool(ask, request, body)

        return handle

    def facts(ledger: Ledger) -> dict[str, Any]:
        return {**view.facts(ledger, check=False), "verification": verified.state(ledger)}

    def budget_of(ledger: Ledger, request: Request) -> dict[str, Any]:
        return view.budget_facts(ledger, ledger.status(request.path_params["name"]))

    def summaries(ledger: Ledger) -> Any:
        return JSONResponse([view.summary(status) for status in ledger.budgets()])

    def csv(text: str) -> Any:
        return PlainTextResponse(text, media_type="text/csv")

    routes = [
        ("/", "GET", answered(lambda ledger, *_: HTMLResponse(html(facts(ledger))))),
        ("/api/ledger", "GET", answered(lambda ledger, *_: JSONResponse(facts(ledger)))),
        ("/api/verify", "GET", answered(lambda ledger, *_: JSONResponse(verified.state(ledger)))),
        ("/api/runs.csv", "GET",
         answered(lambda ledger, *_: csv(view.runs_csv(facts(ledger)["budgets"])))),
        ("/api/budgets", "GET", answered(lambda ledger, *_: summaries(ledger))),
        ("/api/budgets/{name}", "GET",
         answered(lambda ledger, request, _: JSONResponse(budget_of(ledger, request)))),
        ("/api/budgets/{name}/runs.csv", "GET",
         answered(lambda ledger, request, _: csv(view.runs_csv([budget_of(ledger, request)])))),
        ("/api/budgets/{name}/history.csv", "GET",
         answered(lambda ledger, request, _: csv(view.history_csv(budget_of(ledger, request))))),
        ("/api/budgets", "POST",
         answered(lambda ledger, _, body: JSONResponse(_create(ledger, body)), write=True)),
        ("/api/budgets/{name}/charge", "POST",
         answered(lambda ledger, request, body: JSONResponse(
             _charge(ledger, request.path_params["name"], body)), write=True)),
        ("/openapi.json", "GET", lambda _: JSONResponse(openapi())),
    ]  # fmt: skip
    return Starlette(
        routes=[Route(path, handler, methods=[method]) for path, method, handler in routes],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
    )


class _Verified:
    """Whether the ledger is consistent; a record that was verified is not read again.

    A ledger that no longer contains what was verified before is not consistent, from then on.
    """

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="diminuendo-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._state, self._lock = Path(folder) / "verified.json", threading.Lock()

    def state(self, ledger: Ledger) -> dict[str, Any]:
        """What `view.verification` says."""
        with self._lock:
            return view.verification(ledger, state=self._state)


def run(url: str | None, *, host: str, port: int, token: str | None) -> None:
    """Serve until interrupted."""
    with _extras.needed("uvicorn", extra="serve", purpose="Serving a ledger"):
        import uvicorn
    app = application(url, token=token, hosts=("localhost", LOOPBACK, host))
    uvicorn.run(app, host=host, port=port, log_level="warning")


def _allowed(header: str, token: str | None) -> bool:
    return bool(token) and hmac.compare_digest(header.encode(), f"Bearer {token}".encode())


def _create(ledger: Ledger, body: Any) -> dict[str, Any]:
    fields = _fields(body, set(_CREATE))
    terms = {name: fields.pop(name) for name in ("epsilon", "delta", "relation") if name in fields}
    name = fields.pop("name", None)
    try:
        budget = Budget(**terms)
        return ledger.create(name, budget, **fields).terms.to_dict()
    except TypeError as error:
        raise InputError("complete", name="the body", value=str(error)) from None


def _charge(ledger: Ledger, name: str, body: Any) -> dict[str, Any]:
    fields = _fields(body, set(_CHARGE))
    label = fields.pop("label", "")
    event: Event
    try:
        if "mechanism" in fields:
            kind, count = fields.pop("mechanism"), fields.pop("count", 1)
            event = mechanisms.from_json(kind, fields.pop("parameters", {}), count)
            if fields:
                raise InputError("without steps", name="a mechanism", value=sorted(fields))
        else:
            event = GaussianStep(**fields)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("complete", name="the body", value=str(error)) from None
    run = ledger.charge(name, [event], label=label)
    return {"run": run.id, "spent": ledger.status(name).spent}


def _fields(body: Any, known: set[str]) -> dict[str, Any]:
    if not isinstance(body, dict) or not set(body) <= known:
        expected = f"an object with some of {', '.join(sorted(known))}"
        raise InputError(expected, name="the body", value=body)
    return dict(body)


_CREATE = {
    "name": "string", "epsilon": "number", "delta": "number", "relation": "string",
    "data": "string", "unit": "string", "composition": "string", "order": "integer",
    "parent": "string", "window": "string", "members": "array", "two_persons": "boolean",
}  # fmt: skip
_CHARGE = {
    "noise_multiplier": "number", "sampling_rate": "number", "count": "integer", "label": "string",
    "mechanism": "string", "parameters": "object",
}  # fmt: skip
"""What can be sent, and its type in JSON."""


def openapi() -> dict[str, Any]:
    """The description of the interface, in OpenAPI 3.1."""
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    token: list[dict[str, list[str]]] = [{"token": []}]
    refused = {
        "400": {"description": "The request is wrong."},
        "403": {"description": "The token is missing or wrong, or the server only reads."},
        "409": {"description": f"{BudgetRefused.__doc__}"},
    }

    def get(summary: str, kind: str = "application/json", **more: Any) -> dict[str, Any]:
        answer = {"200": {"description": summary, "content": {kind: {}}}}
        return {"get": {"summary": summary, "responses": answer, **more}}

    def post(summary: str, required: list[str], fields: dict[str, str], **more: Any) -> Any:
        properties = {field: {"type": kind} for field, kind in fields.items()}
        schema = {"type": "object", "required": required, "properties": properties}
        content = {"application/json": {"schema": schema}}
        answer = {"200": {"description": summary}, **refused}
        request = {"required": True, "content": content}
        return {"post": {"summary": summary, "security": token, "requestBody": request,
                         "responses": answer, **more}}  # fmt: skip

    return {
        "openapi": "3.1.0",
        "info": {"title": "diminuendo ledger", "version": __version__},
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/api/ledger": get("Every budget with its runs, and the verification state"),
            "/api/verify": get("Whether every record is consistent"),
            "/api/runs.csv": get("Every run of every budget", "text/csv"),
            "/api/budgets/{name}": get("One budget", parameters=[name]),
            "/api/budgets/{name}/runs.csv": get("Its runs", "text/csv", parameters=[name]),
            "/api/budgets/{name}/history.csv": get("Its history", "text/csv", parameters=[name]),
            "/api/budgets": {
                **get("What is spent and left of every budget, and what may be claimed"),
                **post("Create a budget", ["name", "epsilon", "delta"], _CREATE),
            },
            "/api/budgets/{name}/charge": post(
                "Charge what another program releases: Gaussian steps (noise_multiplier), or a "
                f"mechanism ({', '.join(mechanisms.KINDS)}) with its parameters",
                [],
                _CHARGE,
                parameters=[name],
            ),
        },
    }
