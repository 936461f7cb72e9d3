"""Reads the learning curves of a plan's experts, for this site's operator alone: nothing of them ever leaves."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddm.training.curves import CurveChart, curve_points, describe_curve, draw_chart
from ddm.training.metrics import StepMetrics, read_metrics
from silo.config import Site
from silo.plan.workspace import Workspace
from silo.worker.jobs import jobs_of

# Of the experts that are shown: the last ones, in the order in which they are trained.
MAX_CURVES = 8


@dataclass(frozen=True)
class ExpertCurve:
    """The learning curve of one expert, which has at least one line."""

    expert_id: str
    metrics: Sequence[StepMetrics]

    def as_json(self) -> dict[str, object]:
        """Return the smoothed loss at a bounded number of steps."""
        return {"expert_id": self.expert_id, "loss": curve_points(self.metrics)}

    def line(self, *, draws_bars: bool) -> str:
        """Describe it; see `ddm.training.curves.describe_curve`."""
        return f"{self.expert_id}: {describe_curve(self.metrics, draws_bars=draws_bars)}"

    @property
    def chart(self) -> CurveChart:
        """The picture for a page."""
        return draw_chart(self.metrics)


def read_curves(site: Site, plan_id: str) -> tuple[ExpertCurve, ...]:
    """Read the curves of the plan's last experts, in the order of their training; nothing where there are none."""
    settings = site.settings()
    work = Workspace(site.work_folder(plan_id))
    shared_jobs = jobs_of(settings.training, settings.silo_id)
    expert_ids = {path.name for path in (work.folder / "experts").glob("*") if path.is_dir()}
    if shared_jobs is not None:
        # An expert that trains on other machines has no folder here before it is trained.
        expert_ids |= {path.name for path in (shared_jobs / plan_id).glob("*") if path.is_dir()}
    curves = []
    # SILO-2 comes before SILO-10.
    for expert_id in sorted(expert_ids, key=lambda name: (len(name), name)):
        metrics = read_metrics(work.job(expert_id, shared_jobs).metrics)
        if not metrics:
            metrics = read_metrics(work.metrics_path(expert_id))
        if metrics:
            curves.append(ExpertCurve(expert_id, metrics))
    return tuple(curves[-MAX_CURVES:])
