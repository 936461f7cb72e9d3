"""`silo join`: from an invitation and images to a site and its card, in one command that can be given again."""

import io
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import silo.setup
from aggregator.membership.invitation import renew_invitation
from aggregator.membership.registry import enroll_silo, read_cards
from ddm.io.locks import locked
from ddm.protocol.base import sha256_file
from ddm.protocol.enrolment import AgreedSize
from ddm.trust.comparison import CodeSubject, comparison_code
from silo.config import Policy, Site
from tests.support.commands import CommandResult, TypedAnswers, run_command
from tests.support.dicom_files import waves
from tests.support.federation import cohort
from tests.support.federation_keys import KeyedFederation

SILO = "north"


class Joining:
    """A federation, the images of a hospital, and the command that makes a site of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keyed = KeyedFederation(folder)
        self.keyed.found()
        self.data = folder / "images.npz"
        self.write_arrays(patients=True)
        self.site = Site(folder / SILO)
        self.card = folder / f"{SILO}.card.json"
        self.secret = folder / "keys" / "north.pass"

    def write_arrays(self, *, patients: bool) -> None:
        np.savez(self.data, **cohort(40, 0.0, seed=1, patients=patients))  # type: ignore[arg-type]

    @property
    def invitation(self) -> Path:
        return self.keyed.federation.path / "invitation.json"

    @property
    def code(self) -> str:
        return comparison_code(sha256_file(self.invitation), CodeSubject.INVITATION)

    def command(self, *options: object) -> CommandResult:
        """Give the command without a code, without consent."""
        return run_command(
            *("silo", "join", self.site.path, "--data", self.data),
            *("--invitation", self.invitation),
            *("--new-passphrase-file", self.secret, *options),
        )

    def unattended(self, *options: object) -> CommandResult:
        """Give the command as a script does."""
        return self.command("--code", self.code, "--yes", *options)


@pytest.fixture
def joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Joining]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    yield Joining(tmp_path)


def test_one_command_makes_a_site_whose_card_is_enrolled_by_the_printed_code(
    joining: Joining,
) -> None:
    result = joining.unattended()
    assert result.code == 0, result.err
    code = comparison_code(joining.site.card().digest, CodeSubject.CARD)
    assert code in result.out
    card = enroll_silo(joining.keyed.federation, joining.card, code=code)
    assert card.agreed == AgreedSize(images=64, patients=16)
    assert list(read_cards(joining.keyed.federation)) == [SILO]
    # What was shown of the licence is what the site holds plans against.
    assert joining.site.policy().approval.licences == ("CC-BY-4.0",)
    assert joining.site.policy().data.kind == "arrays"
    assert stat.S_IMODE(joining.secret.stat().st_mode) == 0o600


def test_folder_of_pictures_is_scanned_and_joined_as_it_comes(joining: Joining) -> None:
    joining.data = joining.folder / "pictures"
    joining.data.mkdir()
    rows = ["file,patient_id"]
    for number in range(6):
        name = f"{number}.png"
        Image.fromarray(waves(high=200 + number, dtype=np.uint8)).save(joining.data / name)
        rows.append(f"{name},p{number // 2}")
    (joining.data / "metadata.csv").write_text("\n".join(rows) + "\n")
    result = joining.unattended()
    assert result.code == 0, result.err
    assert "6 images accepted" in result.out
    assert joining.site.card().agreed == AgreedSize(images=16, patients=16)


def test_images_behind_links_are_read_where_the_option_allows_it_and_the_report_names_it(
    joining: Joining,
) -> None:
    elsewhere = joining.folder / "elsewhere"
    elsewhere.mkdir()
    joining.data = joining.folder / "pictures"
    joining.data.mkdir()
    for number in range(6):
        name = f"{number}.png"
        Image.fromarray(waves(high=200 + number, dtype=np.uint8)).save(elsewhere / name)
        (joining.data / name).symlink_to(elsewhere / name)
    scan = ("silo", "scan", "--data", joining.data, "--private", joining.folder / "scans")
    refused_scan = run_command(*scan)
    assert "allow it with --outside" in refused_scan.out
    assert "6 images accepted" in run_command(*scan, "--outside").out
    refused = joining.unattended("--unit", "image")
    assert refused.code == 7
    # The report of the scan says what to do.
    assert "`silo scan --data PATH`" in refused.err
    joined = joining.unattended("--unit", "image", "--outside")
    assert joined.code == 0, joined.err
    assert joining.site.settings().images.outside


def test_resumed_command_does_not_pass_over_an_option_that_the_settings_contradict(
    joining: Joining,
) -> None:
    assert joining.unattended().code == 0
    refused = joining.unattended("--outside")
    assert refused.code == 3
    assert "outside = true" in refused.err


def test_wrong_code_makes_nothing_and_does_not_show_the_right_one(joining: Joining) -> None:
    wrong = comparison_code("0" * 64, CodeSubject.INVITATION)
    result = joining.command("--code", wrong, "--yes")
    assert result.code == 19
    assert joining.code not in result.err
    assert not joining.site.path.exists()
    assert not joining.secret.exists()


def test_images_without_patients_wait_for_a_person_to_say_whom_they_show(joining: Joining) -> None:
    joining.write_arrays(patients=False)
    refused = joining.unattended()
    assert refused.code == 7
    assert "--unit image" in refused.err
    assert not (joining.site.path / "silo.toml").exists()
    joined = joining.unattended("--unit", "image")
    assert joined.code == 0
    assert 'statistics.unit = "image" alone' in joined.out
    assert joining.site.policy().privacy.unit == "image"
    assert joining.site.card().limits.privacy.unit == "image"


def test_person_at_a_terminal_is_asked_for_all_that_no_option_says(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining.write_arrays(patients=False)
    answers = [joining.code.upper(), "Nord", "nord", "y", "y"]
    monkeypatch.setattr(sys, "stdin", TypedAnswers(*answers))
    result = joining.command()
    assert result.code == 0, result.err
    assert joining.site.settings().silo_id == "nord"
    assert joining.site.policy().privacy.unit == "image"
    assert (joining.folder / "nord.card.json").exists()


def test_person_who_does_not_join_leaves_no_key_and_no_site(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", TypedAnswers("", "n"))
    assert joining.command("--code", joining.code).code != 0
    assert not (joining.site.path / "silo.toml").exists()
    assert not joining.site.key_path.exists()
    assert not joining.secret.exists()


@pytest.mark.parametrize("step", ["prepare_ledger", "save_settings", "make_card"])
def test_command_that_was_cut_short_is_given_again_and_keeps_its_keys(
    joining: Joining, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def cut_short(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(silo.setup, step, cut_short)
        assert joining.unattended().code == 130
    key = joining.site.key_path.read_bytes()
    secret = joining.secret.read_bytes()
    assert joining.unattended().code == 0
    assert joining.site.key_path.read_bytes() == key
    assert joining.secret.read_bytes() == secret
    enroll_silo(joining.keyed.federation, joining.card)


def test_command_given_again_writes_the_same_card_whose_code_may_be_compared_already(
    joining: Joining,
) -> None:
    assert joining.unattended("--images", 50).code == 0
    card = joining.card.read_bytes()
    joining.card.unlink()
    assert joining.unattended("--images", 50).code == 0
    assert joining.card.read_bytes() == card
    assert joining.unattended("--images", 60).code == 0
    assert joining.site.card().agreed.images == 60


def test_unit_that_the_policy_contradicts_is_refused_and_an_edited_policy_gives_a_new_card(
    joining: Joining,
) -> None:
    assert joining.unattended().code == 0
    assert joining.unattended("--unit", "image").code == 3
    policy = joining.site.path / "policy.toml"
    policy.write_text(policy.read_text().replace('unit = "patient"', 'unit = "image"'))
    assert joining.unattended("--unit", "image").code == 0
    assert joining.site.card().limits.privacy.unit == "image"


def test_folder_of_another_site_is_refused(joining: Joining) -> None:
    assert joining.unattended().code == 0
    assert joining.unattended("--id", "south").code == 6
    joining.data = joining.data.rename(joining.folder / "others.npz")
    assert joining.unattended().code == 6


def test_site_takes_a_new_address_with_the_invitation_whose_code_it_compares(
    joining: Joining,
) -> None:
    assert joining.unattended().code == 0
    card = joining.card.read_bytes()
    old_code = joining.code
    assert renew_invitation(joining.keyed.federation, "new.example.org:9443")
    # The code of the earlier invitation is not that of the new one.
    assert joining.command("--code", old_code, "--yes").code == 19
    assert joining.site.settings().address != "new.example.org:9443"
    with locked(joining.site.courier, "courier"):
        assert joining.unattended().code == 6
    result = joining.unattended()
    assert result.code == 0, result.err
    assert "at new.example.org:9443 from now on" in result.out
    assert joining.site.settings().address == "new.example.org:9443"
    assert joining.card.read_bytes() == card
    # Nothing is left to change, so that the command makes the card as before.
    assert "Card in" in joining.unattended().out


def test_worker_of_two_users_cannot_take_a_new_address_and_is_told_who_can(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert joining.unattended().code == 0
    # As where the courier's folder belongs to another user; the superuser, who may run this test, enters any folder.
    monkeypatch.setattr(Site, "hides_courier", lambda site: True)
    assert joining.unattended().code == 0
    assert renew_invitation(joining.keyed.federation, "new.example.org:9443")
    refused = joining.unattended()
    assert refused.code == 3
    assert "as root" in refused.err
    assert joining.site.settings().address != "new.example.org:9443"


def test_policy_of_a_file_is_kept_and_only_completed_by_what_the_data_are(joining: Joining) -> None:
    file = joining.folder / "policy.toml"
    file.write_text('[training]\nmin_images = 20\n[approval]\nlicences = ["CC0-1.0"]\n')
    result = joining.unattended("--policy", file)
    assert result.code == 0
    assert "NOT ALLOWED" in result.out
    policy = joining.site.policy()
    assert policy.training.min_images == 20
    assert policy.approval.licences == ("CC0-1.0",)
    assert policy.data.shape == (1, 4, 4)
    assert policy.sizes == Policy().sizes


def test_two_passphrase_files_are_refused(joining: Joining) -> None:
    assert joining.unattended("--passphrase-file", joining.secret).code == 3
    assert not (joining.site.path / "silo.toml").exists()
