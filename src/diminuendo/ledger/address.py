"""Where a ledger is: one URL, of which messages never show the secret parts."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from diminuendo.errors import InputError

VARIABLE = "DIMINUENDO_LEDGER"
_SHARED = ("nfs", "cifs", "smb", "9p", "afs", "afp", "ceph", "lustre", "gpfs", "glusterfs",
           "pvfs", "orangefs", "ncpfs", "davfs", "webdav", "sshfs", "s3fs", "gcsfuse", "rclone",
           "moosefs", "ocfs2", "gfs2", "virtiofs", "vboxsf", "prl_fs", "beegfs")  # fmt: skip
_WORDS = "sqlite:///path/to/ledger.sqlite, a path, or postgresql://user@host/database"
_SCHEME = re.compile(r"(sqlite|postgres|file)[\w+]*:|:memory:", re.IGNORECASE)
_MOUNTS = Path("/proc/self/mountinfo")
_MAKING = threading.Lock()


def default() -> str:
    """$DIMINUENDO_LEDGER, or a SQLite file in the user's data folder."""
    url = os.environ.get(VARIABLE)
    return url if url else str(_data_folder() / "diminuendo" / "ledger.sqlite")


def _data_folder() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")


def parse(text: str | Path) -> URL:
    """The URL with the driver that this library uses. Errors do not repeat it: it may be secret."""
    if not isinstance(text, (str, Path)):
        raise InputError(_WORDS, name="the ledger", value=type(text).__name__)
    if isinstance(text, Path) or "://" not in text:
        path = Path(text).expanduser()
        if _SCHEME.match(str(text)) or not path.name:
            raise InputError(_WORDS, name="the ledger's URL", value="something else")
        return URL.create("sqlite", database=str(path))
    try:
        url = make_url(text)
        backend = url.get_backend_name()
    except (ArgumentError, ValueError):
        raise InputError(
            _WORDS, name="the ledger's URL", value="a URL that cannot be parsed"
        ) from None
    if backend in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    if backend != "sqlite" or not url.database:
        raise InputError(_WORDS, name="the ledger's URL", value=f"a {backend} URL")
    if _SCHEME.match(url.database) or url.query:
        raise InputError(
            "a file without options",
            name="the ledger's URL",
            value="a URL with options",
            remedy="Options can switch off locks or durability. Write sqlite:///path.",
        )
    return URL.create("sqlite", database=str(Path(url.database).expanduser()))


def display(url: URL) -> str:
    """The URL to show: without password and options, since options can hold a password."""
    bare = url.set(password=None, query={})
    return bare.set(drivername=url.get_backend_name()).render_as_string()


def secrets(url: URL) -> list[str]:
    """The parts of the URL that must not appear in a message."""
    values = [url.password, *(v for key, v in url.query.items() if "pass" in key.lower())]
    return [str(value) for value in values if value]


def file_of(url: URL) -> Path | None:
    """The SQLite file; None for PostgreSQL and for file: URIs."""
    if url.get_backend_name() != "sqlite" or str(url.database).startswith("file:"):
        return None
    return Path(str(url.database)).absolute()


def refuse_absent(url: URL) -> None:
    """Raise InputError if there is no file: a mistyped path must not become a new, empty ledger."""
    path = file_of(url)
    if path is not None and not path.exists():
        raise InputError(
            "an existing file",
            name="the ledger",
            value=str(path),
            remedy="`diminuendo ledger create` creates it with its first budget; --ledger or "
            f"${VARIABLE} choose another.",
        )


def make_file(path: Path) -> None:
    """Create the ledger's file, readable by its owner alone; refuse a shared file system.

    An existing file is not opened: closing any handle of it would drop the locks that other
    connections of this process hold on it, and another process could then delete the log that
    they use.
    """
    kind = file_system(path)
    if kind is not None and _is_shared(kind):
        raise InputError(
            "on a local disk",
            name="the ledger's file",
            value=str(path),
            remedy=f"It lies on a network file system ({kind}), where the locks that keep two "
            "programs from spending the same budget cannot be relied on. Use a local path, or "
            "PostgreSQL.",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _MAKING:
            if not path.exists():
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            elif path.is_dir():
                raise IsADirectoryError(0, "Is a directory")
            elif path.stat().st_mode & stat.S_IWOTH:
                raise InputError(
                    "writable by its owner or group only",
                    name="the ledger's file",
                    value=str(path),
                    remedy="Everybody on this machine can change it, and spend without a record: "
                    f"chmod o-w {path}",
                )
    except FileExistsError as error:
        if not path.exists():  # else another process was faster
            raise _unusable(path, error.strerror) from None
    except OSError as error:
        raise _unusable(path, error.strerror) from None


def _unusable(path: Path, reason: str | None) -> InputError:
    return InputError(
        "a file that can be created and written",
        name="the ledger",
        value=str(path),
        remedy=f"({reason})",
    )


def _is_shared(kind: str) -> bool:
    names = kind.lower().split(".")
    return any(name.startswith(shared) for name in names for shared in _SHARED)


def file_system(path: Path) -> str | None:
    """The type of the file system that a path is on; None if it is not known."""
    real = Path(os.path.realpath(path))
    mounts = _mounts()
    at = [where for where in mounts if real.is_relative_to(where)]
    return mounts[max(at, key=lambda where: len(where.parts))] if at else None


def _mounts() -> dict[Path, str]:
    if _MOUNTS.exists():
        types = {}
        for line in _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            left, _, right = line.partition(" - ")
            where = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), left.split()[4])
            types[Path(where)] = right.split()[0]
        return types
    if sys.platform == "darwin":
        return _mac_mounts(subprocess.run(["mount"], capture_output=True, text=True).stdout)
    return {}


def _mac_mounts(listing: str) -> dict[Path, str]:
    types = {}
    for line in listing.splitlines():
        _, _, rest = line.partition(" on ")
        where, _, kind = rest.rpartition(" (")
        types[Path(where)] = kind.split(",")[0].rstrip(")")
    return types
