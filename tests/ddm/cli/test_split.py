"""`ddm split`: the passphrase of the keys that it makes."""

import stat
from pathlib import Path

from ddm.islands.folder import Islands
from ddm.publishing.keys import load_key
from tests.support.commands import run_command
from tests.support.islands import Owner


def test_new_passphrase_file_opens_the_keys_of_the_islands(tmp_path: Path) -> None:
    owner = Owner.make(tmp_path)
    passphrase_file = tmp_path / "new.pass"
    options = ("--data", tmp_path / "data.npz", "--recipe", tmp_path / "plan.toml", "--islands", 2)
    result = run_command(
        "ddm", "split", *options, "--out", owner.run, "--new-passphrase-file", passphrase_file
    )
    assert result.code == 0, result.err
    assert stat.S_IMODE(passphrase_file.stat().st_mode) == 0o600
    assert load_key(Islands(owner.run), "release", passphrase_file.read_bytes().strip())
