"""A run's σ_t, ε so far and learning rate in MLflow: `MLflowLogger`.

    fit(model, data, plan, loss=…, lr=…, progress=Progress(logger=MLflowLogger("mortality")))

What is sent is fixed by the plan or was paid for. See `diminuendo.training.Logger`.
"""

from __future__ import annotations

from collections.abc import Mapping

from diminuendo import _extras
from diminuendo.training import Fact

with _extras.needed("mlflow", extra="mlflow", purpose="MLflowLogger"):
    import mlflow


class MLflowLogger:
    """Sends one run to MLflow: to the active run, or to one of its own that ends with it.

    experiment    the name of the experiment; MLflow's own choice unless given, and "Default"
                  where a tracking_uri is
    run_name      the name of the run of its own
    tracking_uri  where MLflow keeps runs; MLflow's own choice unless given
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        self.experiment, self.run_name, self.tracking_uri = experiment, run_name, tracking_uri
        self.run_id: str | None = None
        self._owned = False

    def begin(self, facts: Mapping[str, Fact]) -> None:
        """Open the run, and keep the plan's facts as its parameters."""
        if self.tracking_uri is not None:
            mlflow.set_tracking_uri(self.tracking_uri)
            # the one that was chosen before may not be there
            mlflow.set_experiment(self.experiment or "Default")
        elif self.experiment is not None:
            mlflow.set_experiment(self.experiment)
        self._owned = mlflow.active_run() is None
        run = mlflow.start_run(run_name=self.run_name) if self._owned else mlflow.active_run()
        self.run_id = run.info.run_id
        mlflow.log_params({f"dp.{name}": value for name, value in facts.items()})

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each metric."""
        named = {f"dp.{name}": value for name, value in values.items()}
        mlflow.log_metrics(named, step=step, run_id=self.run_id)

    def end(self, facts: Mapping[str, Fact]) -> None:
        """Keep how the run ended as tags; a run of its own is ended."""
        mlflow.set_tags({f"dp.{name}": str(value) for name, value in facts.items()})
        if self._owned:
            finished = facts["status"] in ("done", "refused")
            mlflow.end_run("FINISHED" if finished else "KILLED")
