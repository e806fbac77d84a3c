"""One thread at a time."""

from __future__ import annotations

import threading
from types import TracebackType

from diminuendo.errors import UsageError


class OneThread:
    """Within, no other thread may be: it is refused, and not kept waiting. Copies are apart."""

    def __init__(self) -> None:
        self._held = threading.RLock()

    def __enter__(self) -> None:
        if not self._held.acquire(blocking=False):
            raise UsageError(
                "Another thread is in the middle of a step of this PrivateGradients, and its batch "
                "and its sum are not yours. Take steps from one thread at a time; nothing was "
                "charged for this call."
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held.release()

    def __reduce__(self) -> tuple[type[OneThread], tuple[()]]:
        return OneThread, ()
