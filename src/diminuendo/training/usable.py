"""Data that cannot be trained on stop a run before anything is spent.

Whether a run is stopped depends on the private data, and so does the message. Both reach whoever
holds the data and started the run, as a wrong shape or type does; nothing has been released, and
no file holds the message. What would go on and only warn is not checked: a warning in a published
log would tell about the data for free.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from diminuendo.errors import InputError
from diminuendo.training.sampling import arrays_of

_NAMED = 5


def refuse_not_finite(data: Any, precision: torch.dtype) -> None:
    """Raise where an array of the dataset holds NaN, or a number beyond the model's precision.

    Arrays and tensors are looked at; a map-style dataset is not, since reading it may take hours.
    """
    for place, part in enumerate(arrays_of(data) or ()):
        rows = part if isinstance(part, Tensor) else np.asarray(part)
        floats = rows.is_floating_point() if isinstance(rows, Tensor) else rows.dtype.kind == "f"
        if floats and len(rows):
            _refuse(rows, place, torch.finfo(precision).max)


def _refuse(rows: Any, place: int, largest: float) -> None:
    library: Any = torch if isinstance(rows, Tensor) else np
    broken = ~library.isfinite(rows)
    if float(library.finfo(rows.dtype).max) > largest:
        broken = broken | (abs(rows) > largest)
    if not bool(broken.any()):
        return
    flat = np.asarray(broken.cpu() if isinstance(broken, Tensor) else broken)
    flat = flat.reshape(len(flat), -1)
    columns = np.flatnonzero(flat.any(axis=0))
    named = ", ".join(map(str, columns[:_NAMED])) + (", …" if len(columns) > _NAMED else "")
    which = f" (columns {named})" if flat.shape[1] > 1 else ""
    raise InputError(
        "finite numbers",
        name=f"the values of array {place} of the dataset",
        value=f"NaN or infinity in {int(flat.any(axis=1).sum())} of {len(flat)} rows{which}",
        remedy="An example without a finite gradient adds nothing but its share of the cost. "
        "Leave the column out, or fill it by a rule that looks at one row at a time.",
    )
