"""The counts router as a family; apart from the router, to which the inputs of every other family refer."""

from ddm.routers.counts import CountsRouter, counts_router_specs
from ddm.routers.family import FittedRouter, RouterFamily, RouterInputs, StoredRouter


class CountsFamily(RouterFamily):
    """The counts router as it is."""

    def fit(self, inputs: RouterInputs) -> FittedRouter:
        """See `RouterFamily.fit`."""
        if inputs.layout is None:
            return FittedRouter(inputs.counts)
        return FittedRouter(inputs.counts.split(inputs.layout))

    def load(self, stored: StoredRouter) -> CountsRouter:
        """See `RouterFamily.load`."""
        num_groups = stored.plan.statistics.counts.num_groups
        specs = counts_router_specs(len(stored.experts), num_groups)
        return CountsRouter.from_tensors(stored.read_tensors(specs), stored.sketch, stored.path)
