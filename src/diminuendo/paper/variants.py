"""The variants that are compared at the same (ε, δ): the paper's setting and improvements."""

from __future__ import annotations

from dataclasses import dataclass

from diminuendo.budget import Budget, Conversion
from diminuendo.tuning.space import Space

PRINTED = Space(steps=(50, 150), lr=0.1, clip=4.0, momentum=0.0, fall=(0.25, 1.0))
"""The paper's setting: clip norm 4, learning rate 0.1, T between 50 and 150."""

EPSILON, DELTA = 4.0, 1e-8


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to spend the same (ε, δ).

    key                short name in files
    title              name on pages
    conversion         how (ε, δ) becomes R (`Budget.conversion`)
    family, space      the schedules that are tuned, and over which ranges
    measured_momentum  plan with the influence measured at this momentum; None for no influence
    everywhere         run at every N, or only at the one in focus
    auxiliary          the kind of labels of the synthetic data (`tuning.auxiliary.gaussian`)
    minimise           the objective of tuning
    """

    key: str
    title: str
    conversion: Conversion
    family: str
    space: Space = PRINTED
    measured_momentum: float | None = None
    everywhere: bool = False
    auxiliary: str = "teacher"
    minimise: str = "train-loss"

    @property
    def budget(self) -> Budget:
        """(4, 1e-8) under this variant's conversion."""
        return Budget(epsilon=EPSILON, delta=DELTA, conversion=self.conversion)


UNIFORM = Variant(
    key="uniform",
    title="uniform, as printed",
    conversion="zcdp",
    family="uniform",
    everywhere=True,
)
EXPONENTIAL = Variant(
    key="exponential",
    title="exponential, as printed",
    conversion="zcdp",
    family="exponential",
    everywhere=True,
)
MOMENTUM = 0.5
VARIANTS = (
    UNIFORM,
    EXPONENTIAL,
    Variant(
        key="uniform-exact",
        title="uniform, exact conversion",
        conversion="exact",
        family="uniform",
    ),
    Variant(
        key="exponential-exact",
        title="exponential, exact conversion",
        conversion="exact",
        family="exponential",
    ),
    Variant(
        key="optimal-exact",
        title="optimal for the measured influence, exact",
        conversion="exact",
        family="optimal",
        measured_momentum=0.0,
    ),
    Variant(
        key="momentum-exact",
        title=f"momentum {MOMENTUM:g} with its own schedule, exact",
        conversion="exact",
        family="optimal",
        space=Space(steps=(50, 150), lr=0.1, clip=4.0, momentum=MOMENTUM),
        measured_momentum=MOMENTUM,
    ),
    Variant(
        key="all",
        title="all together: also clip, rate and momentum tuned, exact",
        conversion="exact",
        family="exponential",
        space=Space(
            steps=(50, 150), lr=(0.1, 1.0), clip=(0.5, 4.0), momentum=(0.0, 0.6), fall=(0.25, 1.0)
        ),
    ),
)
