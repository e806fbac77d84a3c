"""diminuendo page"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from diminuendo import _extras, _files
from diminuendo.cli.options import AsJson, print_json, working
from diminuendo.errors import InputError

_HELP = "What the form shows first."


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("page")(page)


def page(
    epsilon: Annotated[float | None, typer.Option(help=_HELP)] = None,
    delta: Annotated[float | None, typer.Option(help=_HELP)] = None,
    examples: Annotated[int | None, typer.Option(help=_HELP)] = None,
    parameters: Annotated[int | None, typer.Option(help=_HELP)] = None,
    clip: Annotated[float | None, typer.Option(help=_HELP)] = None,
    steps: Annotated[str | None, typer.Option(help=f"{_HELP} A number or auto.")] = None,
    sampling_rate: Annotated[float | None, typer.Option(help=_HELP)] = None,
    gamma: Annotated[float | None, typer.Option(help=_HELP)] = None,
    kappa: Annotated[float | None, typer.Option(help=_HELP)] = None,
    lr: Annotated[str | None, typer.Option(help=_HELP)] = None,
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8719,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Only print the address; open no browser.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write a snapshot to this file, and serve nothing."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A page to plan on, in the browser: drag, and see schedule, ε, gain and the price of mistakes.

    The numbers are computed and certified by this process, which listens on 127.0.0.1 alone. Only
    public facts belong there. Ctrl-C ends it.

    Example: diminuendo page --epsilon 2 --delta 1e-5 --examples 60000 --sampling-rate 0.01
    """
    from diminuendo.page import Settings, snapshot

    given = {
        "epsilon": epsilon,
        "delta": delta,
        "examples": examples,
        "parameters": parameters,
        "clip": clip,
        "steps": None if steps is None else _steps(steps),
        "sampling_rate": sampling_rate,
        "gamma": gamma,
        "kappa": kappa,
        "lr": lr,
    }
    start = Settings.read(_stated(given))
    if output is not None:
        with working("planning"):
            text = snapshot(start)
        _files.write_text(output, text)
        print_json({"page": str(output)}) if as_json else print(output)
        return
    from diminuendo.page import server

    for module in ("starlette", "uvicorn"):  # before a port is taken and a browser opened
        with _extras.needed(module, extra="serve", purpose="The planner page"):
            importlib.import_module(module)
    with _listening(server.LOOPBACK, port) as listening:
        address = f"http://{server.LOOPBACK}:{listening.getsockname()[1]}/"
        if as_json:
            print_json({"address": address})
        else:
            print(f"{address}\nCtrl-C ends it.", flush=True)
        if not no_open and _has_screen():
            threading.Timer(0.5, webbrowser.open, [address]).start()
        with contextlib.suppress(KeyboardInterrupt):
            server.run(listening, start)


def _stated(given: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, and which of gamma and kappa counts."""
    stated = {name: value for name, value in given.items() if value is not None}
    known = [name for name in ("gamma", "kappa") if name in stated]
    if len(known) > 1:
        raise InputError("left out where --gamma is given", name="--kappa", value=stated["kappa"])
    return {**stated, **({"known": known[0]} if known else {})}


def _steps(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


def _has_screen() -> bool:
    """Whether a browser would have a window: without one it would take over the terminal."""
    named = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    return sys.platform != "linux" or any(os.environ.get(name) for name in named)


def _listening(host: str, port: int) -> socket.socket:
    """A bound socket, so that a port that is taken is an error in words before anything opens."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen()
    except (OSError, OverflowError) as error:
        found.close()
        raise InputError(
            "a port that is free",
            name="--port",
            value=port,
            remedy=f"({getattr(error, 'strerror', None) or error}) --port 0 takes any.",
        ) from None
    return found
