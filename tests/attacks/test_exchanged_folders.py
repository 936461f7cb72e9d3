"""The attack: another user puts a folder of their own in the place of a site's, or of a reader's memory."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddm.errors import UnsafePathError
from ddm.io.settings import load_settings, save_settings
from ddm.training.config import TrainingSettings
from silo.config import SiloSettings, Site
from tests.attacks.test_training_jobs import STRANGER, folders_of_others
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.commands import CommandResult, run_command
from tests.support.errors import has_subject
from tests.support.federation import PASSPHRASE, PlannedFederation

SILO = "north"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the rules are those of Linux"),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user"),
]


def exchange_site(site: Site, shared: Path, marker: Path) -> Path:
    """Move a site into a folder in which a group writes; a member of it puts another one in its place, by renaming.

    The other site leads to the keys and folders of the first one by links, so that its passphrase opens it. Its
    silo.toml, whose content anybody can guess, names a command of the stranger's.
    """
    shared.mkdir()
    os.chown(shared, -1, STRANGER)
    shared.chmod(0o2770)
    moved = site.path.rename(shared / ".north")
    exchanged = shared / site.path.name
    exchanged.mkdir()
    for name in ("private", "courier", "inbox", "outbox", "policy.toml"):
        (exchanged / name).symlink_to(moved / name)
    settings = load_settings(SiloSettings, moved / "silo.toml")
    command = ("/bin/sh", "-c", f"touch {marker}", "{folder}", "{launch}")
    training = TrainingSettings(device="cpu", processes=2, launcher=command)
    changed = settings.model_copy(update={"training": training})
    save_settings(changed, exchanged / "silo.toml", "a stranger's")
    for path in (exchanged, *exchanged.iterdir()):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    return exchanged


def test_command_of_a_site_that_was_exchanged_is_not_started(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    """Without the refusal, the stranger's command runs as the worker when the training begins."""
    tiny, _ = planned_once.copy(tmp_path / "copy")
    marker = tmp_path / "command-of-the-stranger"
    exchanged = exchange_site(tiny.sites[SILO], tmp_path / "shared", marker)
    (tmp_path / "pass").write_bytes(PASSPHRASE)
    known = ("--only", "worker", "--passphrase-file", tmp_path / "pass")
    refused = run_command("silo", "run", exchanged, *known)
    assert not marker.exists()
    assert refused.code == UnsafePathError.exit_code, refused.err
    assert "so that others may write there" in refused.err


def test_site_is_not_made_where_another_user_could_put_something(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir(mode=0o700)
    for place, folder in folders_of_others(tmp_path):
        with case(place=place):
            site = Site(folder / SILO)
            with pytest.raises(UnsafePathError, check=has_subject(str(site.path))):
                site.make_folders()
            assert not site.private.exists()


def test_federation_is_not_run_where_another_user_could_put_something(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    tiny, _ = planned_once.copy(tmp_path / "copy")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    moved = tiny.federation.path.rename(shared / "fed")
    refused = run_command("aggregator", "run", moved)
    assert refused.code == UnsafePathError.exit_code, refused.err


def memories_of_others(root: Path) -> Iterator[tuple[str, Path]]:
    """Folders for a reader's memory in which another user could change it."""
    for name, owner, mode in (
        ("another user's", STRANGER, 0o777),
        ("everybody's", os.geteuid(), 0o777),
        ("a group's", os.geteuid(), 0o770),
    ):
        folder = root / name.replace(" ", "-").replace("'", "")
        folder.mkdir()
        folder.chmod(mode)
        os.chown(folder, owner, STRANGER)
        yield name, folder


def verify(published: PublishedRelease, state: Path) -> CommandResult:
    return run_command(
        "ddm", "verify", published.release, "--root", published.root, "--state", state
    )


def test_reader_remembers_nothing_where_another_user_could_change_it(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    """Otherwise the other user removes the memory, and the reader takes an old release for the newest one."""
    for name, folder in memories_of_others(tmp_path):
        with case(name=name):
            refused = verify(published_once, folder)
            assert refused.code == UnsafePathError.exit_code, refused.err
    own = tmp_path / "own"
    assert verify(published_once, own).code == 0
    # The folder of this root, in which another user lets everybody write.
    (store,) = own.iterdir()
    os.chown(store, STRANGER, STRANGER)
    assert verify(published_once, own).code == UnsafePathError.exit_code
