"""The page and its facts over HTTP: anybody who reaches it reads; writing needs a token."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from diminuendo import __version__, _extras
from diminuendo.budget import Budget
from diminuendo.errors import BudgetRefused, DiminuendoError, InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger import view
from diminuendo.ledger.book import Ledger
from diminuendo.ledger.page import html

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
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import Request
        from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse
        from starlette.routing import Route

    def answered(work: Callable[[Ledger, Request, Any], Any], *, write: bool = False) -> Any:
        """A handler that opens the ledger, and says an error as JSON."""

        async def handle(request: Request) -> Any:
            if write and not _allowed(request.headers.get("authorization", ""), token):
                words = "Writing needs the token" if token else "This server only reads"
                return JSONResponse({"error": f"{words}."}, status_code=403)
            try:
                body = await request.json() if write else None
            except ValueError:
                return JSONResponse({"error": "The body is not JSON."}, status_code=400)
            try:
                with Ledger(url, readonly=not write, create=False) as ledger:
                    result = work(ledger, request, body)
            except DiminuendoError as error:
                status = _STATUS.get(type(error).__name__, 400)
                return JSONResponse({"error": str(error)}, status_code=status)
            return result

        return handle

    def budget_of(ledger: Ledger, request: Request) -> dict[str, Any]:
        return view.budget_facts(ledger, ledger.status(request.path_params["name"]))

    routes = [
        ("/", "GET", answered(lambda ledger, *_: HTMLResponse(html(view.facts(ledger))))),
        ("/api/ledger", "GET", answered(lambda ledger, *_: JSONResponse(view.facts(ledger)))),
        ("/api/verify", "GET",
         answered(lambda ledger, *_: JSONResponse(view.verification(ledger)))),
        ("/api/budgets/{name}", "GET",
         answered(lambda ledger, request, _: JSONResponse(budget_of(ledger, request)))),
        ("/api/budgets/{name}/runs.csv", "GET",
         answered(lambda ledger, request, _: PlainTextResponse(
             view.runs_csv([budget_of(ledger, request)]), media_type="text/csv"))),
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


def run(url: str | None, *, host: str, port: int, token: str | None) -> None:
    """Serve until interrupted."""
    with _extras.needed("uvicorn", extra="serve", purpose="Serving a ledger"):
        import uvicorn
    app = application(url, token=token, hosts=("localhost", LOOPBACK, host))
    uvicorn.run(app, host=host, port=port, log_level="warning")


def _allowed(header: str, token: str | None) -> bool:
    return bool(token) and hmac.compare_digest(header.encode(), f"Bearer {token}".encode())


def _create(ledger: Ledger, body: Any) -> dict[str, Any]:
    fields = _fields(body, {"name", "epsilon", "delta", "relation", "data", "unit", "composition"})
    relation = {"relation": fields.pop("relation")} if "relation" in fields else {}
    name = fields.pop("name", None)
    budget = Budget(
        epsilon=fields.pop("epsilon", None), delta=fields.pop("delta", None), **relation
    )
    return asdict(ledger.create(name, budget, **fields).terms)


def _charge(ledger: Ledger, name: str, body: Any) -> dict[str, Any]:
    fields = _fields(body, {"noise_multiplier", "sampling_rate", "count", "label"})
    label = fields.pop("label", "")
    run = ledger.charge(name, [GaussianStep(**fields)], label=label)
    return {"run": run.id, "spent": ledger.status(name).spent}


def _fields(body: Any, known: set[str]) -> dict[str, Any]:
    if not isinstance(body, dict) or not set(body) <= known:
        expected = f"an object with some of {', '.join(sorted(known))}"
        raise InputError(expected, name="the body", value=body)
    return dict(body)


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
            "/api/budgets/{name}": get("One budget", parameters=[name]),
            "/api/budgets/{name}/runs.csv": get("Its runs", "text/csv", parameters=[name]),
            "/api/budgets": post(
                "Create a budget",
                ["name", "epsilon", "delta"],
                {"name": "string", "epsilon": "number", "delta": "number", "relation": "string",
                 "data": "string", "unit": "string", "composition": "string"},
            ),
            "/api/budgets/{name}/charge": post(
                "Charge Gaussian steps that another program releases",
                ["noise_multiplier"],
                {"noise_multiplier": "number", "sampling_rate": "number", "count": "integer",
                 "label": "string"},
                parameters=[name],
            ),
        },
    }  # fmt: skip
