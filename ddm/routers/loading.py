"""Loads a published router: selects its family, checks its tensors, builds it on the plan's sketch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ddm.errors import DocumentError, MathError, TensorFileError
from ddm.io.tensors import TensorSpec, load_tensors
from ddm.protocol.manifest import PublishedExpert, PublishedRouter
from ddm.protocol.plan import Plan
from ddm.protocol.routers import CountsSettings, RouterSettings
from ddm.routers.calibration import Calibrated
from ddm.routers.families import family_of
from ddm.routers.family import StoredRouter
from ddm.routers.sketch import Sketch

MAX_VALUE = 1e6


def load_router(
    published: PublishedRouter,
    folder: Path,
    *,
    plan: Plan,
    sketch: Sketch,
    experts: Sequence[PublishedExpert],
) -> Calibrated:
    """Load a router, with the manifest's temperature and training prior applied.

    Args:
        published: its family, file and calibration, from the verified manifest.
        folder: holds the file.
        plan: gives the number of groups, the released dimensions and the network's size.
        sketch: the plan's.
        experts: the manifest's, in the router's class order.

    Raises:
        DocumentError: a temperature or a training prior out of range, or a training prior of other experts.
        DigestError: the file differs from the one listed.
        TensorFileError: the file is not such a router, its values are not shares, or the manifest and the
            plan disagree on the family.
    """
    file = published.file
    if len(published.training_prior) != len(experts):
        raise DocumentError(
            "manifest.json, router.training_prior",
            expected=f"{len(experts)} shares",
            got=str(len(published.training_prior)),
        )
    # The aggregator publishes counts where the plan's own family did worse.
    settings: RouterSettings = plan.router
    if published.kind == "counts":
        settings = CountsSettings()
    if published.kind != settings.kind:
        expected = f"a router of the kind counts or {settings.kind}, as the plan says"
        raise TensorFileError(file.path, expected=expected, got=published.kind)

    def read_tensors(specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        return load_tensors(
            folder / file.path,
            specs,
            max_bytes=file.bytes,
            max_abs=MAX_VALUE,
            digest=file.digest,
        )

    stored = StoredRouter(
        plan=plan,
        sketch=sketch,
        experts=experts,
        t_release=published.t_release,
        file_name=file.path,
        read_tensors=read_tensors,
    )
    try:
        router = family_of(settings).load(stored)
    except MathError as error:
        raise TensorFileError(
            f"{file.path}, {error.subject}", expected=error.expected, got=error.got
        ) from error
    try:
        return Calibrated(router, published.temperature, published.training_prior, stored.path)
    except MathError as error:
        raise DocumentError(
            f"manifest.json, {error.subject}", expected=error.expected, got=error.got
        ) from error
