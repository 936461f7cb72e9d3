"""The file of a new passphrase: only its owner may know what is in it, also where the file is there already."""

import os
import stat
from pathlib import Path

import pytest

from ddm.errors import PassphraseError
from ddm.system.console import choose_passphrase_file

PLANTED = "known to the attacker"


def test_new_passphrase_is_for_its_owner_alone_and_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "new.pass"
    assert choose_passphrase_file(None, path) == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    passphrase = path.read_text()
    assert choose_passphrase_file(None, path) == path
    assert path.read_text() == passphrase


def test_owner_of_a_service_passes_through_the_folder_that_is_made_for_the_passphrase(
    tmp_path: Path,
) -> None:
    before = os.umask(0o077)
    try:
        path = tmp_path / "etc" / "archipelago" / "new.pass"
        choose_passphrase_file(None, path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o755
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_file_that_others_can_open_is_no_new_passphrase(tmp_path: Path, mode: int) -> None:
    """The attack: another user puts a passphrase of theirs where a key's passphrase is about to be made."""
    path = tmp_path / "planted.pass"
    path.write_text(PLANTED)
    path.chmod(mode)
    with pytest.raises(PassphraseError) as caught:
        choose_passphrase_file(None, path)
    assert caught.value.subject == str(path)
    assert PLANTED not in str(caught.value)
    # Whoever says that it is their own passphrase decides so.
    assert choose_passphrase_file(path, None) == path


@pytest.mark.parametrize("target", ["planted.pass", "nowhere"])
def test_link_is_no_new_passphrase(tmp_path: Path, target: str) -> None:
    (tmp_path / "planted.pass").write_text(PLANTED)
    (tmp_path / "planted.pass").chmod(0o600)
    link = tmp_path / "new.pass"
    link.symlink_to(tmp_path / target)
    with pytest.raises(PassphraseError):
        choose_passphrase_file(None, link)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file of another user")
def test_file_of_another_user_is_no_new_passphrase(tmp_path: Path) -> None:
    path = tmp_path / "planted.pass"
    path.write_text(PLANTED)
    path.chmod(0o600)
    os.chown(path, 54321, -1)
    with pytest.raises(PassphraseError):
        choose_passphrase_file(None, path)
