"""An aggregator with all its keys that says who holds a class: readers compute it from what the silos signed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import aggregator.release.publish
from aggregator.config import Federation
from aggregator.intake.inventory import Inventory, take_inventory
from aggregator.release.publish import link_files
from aggregator.router.statistics import read_statistics
from aggregator.router.train import router_path, train_router
from ddm import open_ensemble
from ddm.errors import TensorFileError, TrustError
from ddm.io.tensors import load_tensors, save_tensors
from ddm.protocol.base import File
from ddm.protocol.manifest import Manifest
from ddm.protocol.router_report import RouterReport
from ddm.protocol.submission import class_counts_path
from ddm.publishing.contents import ReleaseContents, draft_manifest
from ddm.publishing.staging import StagedVersion
from ddm.routers.conditional import ConditionalPrior
from tests.support.commands import run_command
from tests.support.dishonest_silo import DishonestSilo
from tests.support.federation import TinyFederation, recipe
from tests.support.publishing import publish_short_pages, publish_unchecked

SIZES = {"east": 40, "north": 40, "west": 64}
CLASSES = {
    "condition": {"kind": "class", "num_classes": 2, "drop": 0.1},
    "statistics": {
        "unit": "image",
        "total": {"epsilon": 8.0, "delta": 1e-5},
        "counts": {"epsilon": 1.0, "num_groups": 4},
        "class_counts": {"epsilon": 1.0, "num_classes": 2},
    },
    "limits": {
        "expert_bytes": 1 << 20,
        "statistic_bytes": 1 << 22,
        "train_s": 600,
        "gpu_hours": 1.0,
    },
    "router": {"kind": "counts"},
    "partition": {"kind": "silo_cluster", "min_images": 10},
    "clustering": {"num_fine": 8, "num_coarse": 4},
}


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> TinyFederation:
    """Three silos were accepted, of which some clusters are too small for an expert, and the router is trained."""
    tiny = TinyFederation.create(tmp_path_factory.mktemp("classes"), SIZES)
    tiny.sign(recipe(**CLASSES))
    for silo_id, num in SIZES.items():
        DishonestSilo(tiny, silo_id).send(num)
    assert {receipt.verdict.kind for receipt in tiny.take_in()} == {"accepted"}
    train_router(tiny.federation, take_inventory(tiny.federation), seed=0)
    return tiny


@pytest.fixture
def trained(
    trained_once: TinyFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TinyFederation:
    publish_short_pages(monkeypatch)
    return trained_once.copy(tmp_path / "copy")


def shares(federation: Federation, inventory: Inventory) -> ConditionalPrior:
    """What the aggregator computes, from the histograms over groups too, which are not published."""
    statistics = read_statistics(federation, inventory)
    units = list(inventory.num_units.values())
    return ConditionalPrior.from_counts(
        statistics.files.sketch, statistics.noisy_KCG, units, 1.0, statistics.layout
    )


def test_reader_computes_from_the_release_alone_who_holds_a_class(
    trained: TinyFederation, tmp_path: Path
) -> None:
    trained.publish_only(tmp_path / "release")
    ensemble = open_ensemble(tmp_path / "release", root=trained.root)
    inventory = take_inventory(trained.federation)
    expected = shares(trained.federation, inventory)
    assert ensemble.class_prior is not None
    clusters = {silo_id: len(silo.submission.experts) for silo_id, silo in inventory.silos.items()}
    assert min(clusters.values()) < 4, "some clusters join others"
    for label in (0, 1):
        prior = torch.tensor(ensemble.class_prior(label).prior, dtype=torch.float64)
        torch.testing.assert_close(prior, expected.prior_CE[label], atol=1e-9, rtol=0)
        assert float((prior - torch.tensor(ensemble.prior)).abs().max()) > 0.02, (
            "not the plain prior"
        )
    drawn = ensemble.sample(4, condition=1, steps=2, seed=0)
    assert bool(drawn.images.isfinite().all())


def other_counts(targets: Path) -> None:
    """All of both classes to west, and none of them to anybody else."""
    path = targets / class_counts_path("west")
    counts = load_tensors(path, None, max_bytes=1 << 16)["counts"]
    path.unlink()  # it is a link to the accepted file
    save_tensors(path, {"counts": counts + 1000})


def counts_of_another(targets: Path) -> None:
    path = targets / class_counts_path("west")
    path.unlink()
    path.write_bytes((targets / class_counts_path("east")).read_bytes())


ATTACKS: dict[str, Callable[[Path], None]] = {
    "other counts": other_counts,
    "another silo's": counts_of_another,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_class_counts_that_no_silo_signed_are_refused_by_every_command(
    trained: TinyFederation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    attack: str,
) -> None:
    """Signed by the aggregator's own keys, and listed in its manifest."""

    def dishonest(
        federation: Federation, inventory: Inventory, router: RouterReport, version: StagedVersion
    ) -> None:
        link_files(federation, inventory, router, version)
        ATTACKS[attack](version.targets(inventory.plan.plan_id))

    monkeypatch.setattr(aggregator.release.publish, "link_files", dishonest)
    publish_unchecked(monkeypatch)
    trained.publish_only(tmp_path / "lie")
    release_options = (tmp_path / "lie", "--root", trained.root, "--state", tmp_path / "seen")
    for name, *more in (
        ("verify",),
        ("sample", "--num", 2, "--class", 0, "--out", tmp_path / "drawn.npz"),
    ):
        result = run_command("ddm", name, *release_options, *more)
        assert (result.code, "as the silo signed" in result.err) == (TrustError.exit_code, True)
    assert not (tmp_path / "drawn.npz").exists()


def test_release_that_leaves_a_silos_class_counts_out_is_refused(
    trained: TinyFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = class_counts_path("west")

    def shortened(contents: ReleaseContents, version: StagedVersion) -> Manifest:
        manifest = draft_manifest(contents, version)
        (version.targets(manifest.plan_id) / left_out).unlink()
        files = tuple(file for file in manifest.files if file.path != left_out)
        return manifest.model_copy(update={"files": files})

    monkeypatch.setattr(aggregator.release.publish, "draft_manifest", shortened)
    publish_unchecked(monkeypatch)
    trained.publish_only(tmp_path / "short")
    result = run_command(
        "ddm", "verify", tmp_path / "short", "--root", trained.root, "--state", tmp_path / "seen"
    )
    assert (result.code, "no signed file of this name" in result.err) == (
        TrustError.exit_code,
        True,
    )


def test_shares_of_classes_in_the_router_file_are_refused(
    trained: TinyFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they stood before readers computed them: nothing reads them, and the file is not opened."""
    federation = trained.federation
    plan_id = take_inventory(trained.federation).plan.plan_id
    path = router_path(federation, plan_id)
    num = len(
        [e for silo in take_inventory(federation).silos.values() for e in silo.submission.experts]
    )
    shares_CE = torch.zeros(2, num).index_fill_(1, torch.tensor([num - 1]), 1.0)
    save_tensors(path, {**load_tensors(path, None, max_bytes=1 << 16), "class_prior": shares_CE})
    monkeypatch.setattr(aggregator.release.publish, "load_report", _report_of_any_router(path))
    publish_unchecked(monkeypatch)
    trained.publish_only(tmp_path / "lie")
    release_options = (tmp_path / "lie", "--root", trained.root, "--state", tmp_path / "seen")
    result = run_command(
        "ddm", "sample", *release_options, "--num", 2, "--class", 0, "--out", tmp_path / "drawn.npz"
    )
    assert (result.code, "router.safetensors" in result.err) == (TensorFileError.exit_code, True)


def _report_of_any_router(path: Path) -> Callable[..., object]:
    report = RouterReport.parse(path.with_name("report.json").read_bytes(), subject="report.json")
    return lambda *_: report.model_copy(update={"router": File.of("router.safetensors", path)})
