"""Which weights a student of a release starts from."""

from dataclasses import replace

from ddm.distillation.start import initial_weights
from ddm.loading.release import Release, open_release
from ddm.protocol.architecture import ClassCondition, Dit
from ddm.protocol.learning import Objective, SiloObjective
from tests.conftest import PublishedRelease


def opened(published: PublishedRelease) -> Release:
    return open_release(published.release, root=published.root, state=None)


def start(release: Release) -> str | None:
    """Return the digest of the weights, which the file itself must have."""
    plan = release.plan
    start = initial_weights(release, plan.expert.architecture, plan.condition)
    if start is None:
        return None
    folder, file = start
    assert type(file).of(file.path, folder / file.path) == file
    return file.digest


def taught(release: Release, **predictions: str) -> Release:
    """The release as if these silos' experts predicted something else."""
    exceptions = [
        SiloObjective(silo_id=silo, prediction=what) for silo, what in sorted(predictions.items())
    ]
    objective = Objective(exceptions=tuple(exceptions))
    return replace(release, plan=release.plan.model_copy(update={"objective": objective}))


def test_largest_expert_that_predicts_as_a_student_does_is_the_start(
    published_once: PublishedRelease,
) -> None:
    release = opened(published_once)
    digests = {expert.silo_id: expert.file.digest for expert in release.manifest.experts}
    assert start(release) == digests["north"]
    assert start(taught(release, north="x_0")) == digests["east"]
    assert start(taught(release, east="x_0")) == digests["north"]
    assert start(taught(release, east="x_0", north="eps")) is None


def test_student_of_another_form_has_no_start(published_once: PublishedRelease) -> None:
    release = opened(published_once)
    plan = release.plan
    wider = Dit(patch=2, hidden=24, depth=2, heads=2)
    assert initial_weights(release, wider, plan.condition) is None
    assert initial_weights(release, plan.expert.architecture, ClassCondition(num_classes=3)) is None
