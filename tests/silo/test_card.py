"""What a site states about its size when it enrolls, and what it holds its plans and its own data to."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

from ddm.errors import DataError, MissingFileError, PolicyError, SetupError
from ddm.protocol.enrolment import CARD_KIND, MAX_CARD_BYTES, AgreedSize, Card
from ddm.system.console import run_app
from ddm.trust.envelope import open_sealed
from ddm.trust.keys import SigningKey
from silo.cli import app
from silo.config import Site
from silo.data.first_look import UnitCounts, count_units
from silo.setup import make_card, round_up
from tests.support.cohorts import source_at
from tests.support.errors import has_subject
from tests.support.federation import POLICY, PlannedFederation, TinyFederation, cohort, write_policy
from tests.support.submissions import SILO


@pytest.fixture
def planned(planned_once: PlannedFederation, tmp_path: Path) -> PlannedFederation:
    """A site of 40 images, enrolled for 64, with a plan in its inbox."""
    return planned_once.copy(tmp_path / "copy")


def hold(tiny: TinyFederation, **arrays: np.ndarray) -> None:
    """Give the site other data."""
    site = tiny.sites[SILO]
    path = tiny.path / "other.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    settings = site.path / "silo.toml"
    settings.write_text(settings.read_text().replace(site.settings().data, str(path)))


def stated(site: Site, key: SigningKey, **numbers: int) -> AgreedSize:
    payload, signer = open_sealed(
        make_card(site, key, **numbers), CARD_KIND, key.public, MAX_CARD_BYTES
    )
    assert signer == key.public
    card = Card.parse(payload, subject="card")
    assert card.limits.privacy.max_epsilon == site.policy().privacy.max_epsilon
    return card.agreed


@pytest.mark.parametrize(
    ("num", "most"),
    [(1, 16), (3, 16), (16, 16), (17, 32), (129, 256), (256, 256), (340_000, 524_288)],
)
def test_card_states_the_next_power_of_two_so_that_it_reveals_no_number(
    num: int, most: int
) -> None:
    assert round_up(num) == most


def test_card_counts_the_data_until_a_person_states_a_number_which_then_stays(
    planned: PlannedFederation,
) -> None:
    site = planned[0].sites[SILO]
    key = planned[0].key(SILO)
    site.card_path.unlink()
    assert stated(site, key) == AgreedSize(images=64)
    assert stated(site, key, images=50) == AgreedSize(images=50) == site.agreed()
    assert stated(site, key) == AgreedSize(images=50)
    for numbers in ({"images": 1}, {"images": 50, "patients": 51}):
        with pytest.raises(SetupError, check=has_subject("--images, --patients")):
            stated(site, key, **numbers)


def test_card_of_a_site_that_protects_patients_counts_them(
    planned: PlannedFederation,
) -> None:
    tiny, _ = planned
    site = tiny.sites[SILO]
    key = tiny.key(SILO)
    write_policy(site, POLICY | {"privacy": {"unit": "patient"}})
    with pytest.raises(DataError, match="patients"):
        stated(site, key)
    hold(tiny, **cohort(100, 0.0, 1, patients=True))
    assert stated(site, key) == AgreedSize(images=128, patients=64)
    assert (
        Card.parse(site.card_path.read_bytes(), subject="card.json").limits.privacy.unit
        == "patient"
    )
    assert stated(site, key, images=110, patients=40) == AgreedSize(images=110, patients=40)


def test_command_writes_the_card_and_says_what_it_states(
    planned: PlannedFederation, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny, _ = planned
    (tiny.path / "pass").write_text("correct horse\n")
    arguments = ["enroll", tiny.sites[SILO].path, "--out", tiny.path / "new.json", "--images", 48]
    with pytest.raises(SystemExit) as left:
        run_app(
            app,
            [str(argument) for argument in (*arguments, "--passphrase-file", tiny.path / "pass")],
        )
    assert left.value.code == 0
    assert "for at most 48 images" in capsys.readouterr().out
    assert tiny.sites[SILO].agreed() == AgreedSize(images=48)


@pytest.mark.parametrize("images", [None, 63, 65])
def test_plan_that_states_another_size_than_the_card_is_refused(
    planned: PlannedFederation, images: int | None
) -> None:
    """A smaller number would lower this silo's prior, a larger one raise it, behind its operator's back."""
    tiny, _ = planned
    site = tiny.sites[SILO]
    make_card(site, tiny.key(SILO), images=images)
    if images is None:
        site.card_path.unlink()
    problem = tiny.work(SILO, until="plan_refused").problem
    assert problem is not None and problem.code == PolicyError.exit_code
    assert "agreed size of north" in problem.message and "silo enroll" in problem.remedy


def test_site_whose_data_grew_beyond_its_card_stops_before_it_trains(
    planned: PlannedFederation,
) -> None:
    tiny, plan_id = planned
    hold(tiny, **cohort(65, 0.0, 1))
    with pytest.raises(PolicyError, check=has_subject("images of this site")):
        tiny.work(SILO)
    assert tiny.state_of(SILO).state == "plan_accepted"
    hold(tiny, **cohort(64, 0.0, 1))
    assert tiny.work(SILO, until="scanned").plan_id == plan_id


def test_data_that_cannot_be_counted_are_refused_and_no_image_is_read(tmp_path: Path) -> None:
    patients = np.array(["p", "q", "p", "", "r", "s", "t"])
    np.savez(tmp_path / "a.npz", images=np.zeros((7, 1, 4, 4), np.uint8), patients=patients)
    with (
        zipfile.ZipFile(tmp_path / "a.npz") as whole,
        zipfile.ZipFile(tmp_path / "cut.npz", "w") as cut,
    ):
        cut.writestr("images.npy", whole.read("images.npy")[:130])
    # by its header and the archive's directory
    with pytest.raises(DataError, match="does not read as one"):
        count_units(source_at(tmp_path / "cut.npz", tmp_path / "scans"), patients=False)
    assert count_units(
        source_at(tmp_path / "a.npz", tmp_path / "scans"), patients=False
    ) == UnitCounts(7, None)
    with pytest.raises(DataError, match="none for 1 of 7 images"):
        count_units(source_at(tmp_path / "a.npz", tmp_path / "scans"), patients=True)
    np.savez(tmp_path / "scalar.npz", images=np.float32(3))
    np.savez(tmp_path / "objects.npz", images=np.array([None, {}]))
    np.savez(tmp_path / "other.npz", pixels=np.zeros(3))
    (tmp_path / "text.npz").write_text("hello")
    for name in ("scalar", "objects", "other", "text"):
        with pytest.raises(
            DataError, match="an npz without|an array called images|an array of images|pickled"
        ):
            count_units(source_at(tmp_path / f"{name}.npz", tmp_path / "scans"), patients=False)
    with pytest.raises(MissingFileError):
        count_units(source_at(tmp_path / "nothing.npz", tmp_path / "scans"), patients=False)


def test_card_is_made_again_where_the_workers_user_cannot_read_the_couriers_folder(
    planned: PlannedFederation,
) -> None:
    tiny, _ = planned
    site = tiny.sites[SILO]
    node_key = (site.courier / "node.pub").read_text("utf-8").strip()
    # The tests may run as root, which no mode keeps out, so that the file itself is absent.
    (site.courier / "node.pub").unlink()
    key = tiny.key(SILO)
    payload, _ = open_sealed(make_card(site, key), CARD_KIND, key.public, MAX_CARD_BYTES)
    assert Card.parse(payload, subject="card").node_key == node_key
