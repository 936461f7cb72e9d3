"""`aggregator init`: a federation and the passphrase of its keys, in one command."""

import stat
from pathlib import Path

from aggregator.config import Federation
from ddm.publishing.keys import load_key
from tests.support.commands import run_command


def test_init_makes_the_passphrase_file_and_sets_the_largest_share_of_a_silo(
    tmp_path: Path,
) -> None:
    federation = Federation(tmp_path / "fed")
    secret = tmp_path / "keys" / "fed.pass"
    words = ("--name", "tiny", "--licence", "CC-BY-4.0", "--address", "127.0.0.1:9092")
    options = ("--max-influence", 0.7, "--new-passphrase-file", secret)
    result = run_command("aggregator", "init", federation.path, *words, *options)
    assert result.code == 0, result.err
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert load_key(federation, "plans", secret.read_bytes().strip())
    settings = federation.settings()
    assert settings.max_influence == 0.7
    assert settings.passphrase_file == str(secret)
