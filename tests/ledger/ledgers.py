"""What the ledger's tests share."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable

from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from diminuendo import GaussianStep


def new_database(uri: str) -> str:
    """A database of its own on the server."""
    url = make_url(uri).set(drivername="postgresql+psycopg")
    name = "t" + uuid.uuid4().hex
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return url.set(database=name, drivername="postgresql").render_as_string(hide_password=False)


def step(sigma: float = 20.0, count: int = 1, rate: float = 1.0) -> GaussianStep:
    return GaussianStep(noise_multiplier=sigma, sampling_rate=rate, count=count)


def in_child(work: Callable[[], None]) -> int:
    """Fork; the child does the work and ends without pytest's clean-up. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException as error:
        os.write(2, f"child: {type(error).__name__}: {error}\n".encode())
        os._exit(1)
