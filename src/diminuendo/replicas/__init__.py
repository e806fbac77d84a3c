"""Many runs as one: K replicas of a model, trained by private gradient descent in one computation.

    replica        `Replica`, the settings of one run, and `Outcome`, its result
    engine         `train`, which runs all replicas in groups and keeps their results
    study          what all replicas share, checked before anything runs
    batch          the stacked state of the replicas that train together, and its update step
    perceptrons    linear layers as batched matrix products; `general` is for every other model
    cuda_graph     steps captured once on a GPU and launched as a whole; `kernels` in Triton
    results_file   results on disk, one JSON line for each replica

Runs have fixed seeds and their losses are reported without noise: they are experiments, never
private releases.
"""

from diminuendo import _extras

with _extras.needed("torch", extra="all", purpose="Training many replicas"):
    from diminuendo.replicas.engine import train
    from diminuendo.replicas.initial import initialise
    from diminuendo.replicas.replica import Outcome, Replica

__all__ = ["Outcome", "Replica", "initialise", "train"]
