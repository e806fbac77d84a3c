"""Optional packages: where one is missing, say which extra brings it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diminuendo.errors import MissingExtra

_PACKAGES = {
    "torch": "PyTorch",
    "sklearn": "scikit-learn",
    "dp_accounting": "dp-accounting",
    "jax_privacy": "jax-privacy",
}
"""The names under which people know these modules."""


@contextmanager
def needed(module: str, *, extra: str | None, purpose: str) -> Iterator[None]:
    """Around imports: if `module` is not installed, raise a MissingExtra that says what to install.

    `extra` is the extra of diminuendo that brings it ("torch", or several: "torch,plots"), or None
    for a package that no extra brings; `purpose` begins the message, e.g. "Training". A package
    that is installed and broken raises its own error.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if isinstance(error, MissingExtra) or (error.name or "").split(".")[0] != module:
            raise
        package = _PACKAGES.get(module, module)
        wanted = f"'diminuendo[{extra}]'" if extra else package
        raise MissingExtra(
            f"{purpose} needs {package}, which is not installed. "
            f"Install it with: pip install {wanted}",
            name=module,
        ) from None
