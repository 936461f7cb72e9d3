"""A site that belongs to the user of a service: commands of another user, such as root, write nothing there."""

import os
from pathlib import Path

import pytest

from tests.support.commands import run_command

USER_WITHOUT_NAME = 54321
DIGEST = "0" * 64
REFUSED = {
    "pause": (),
    "resume": (),
    "scan": (),
    "review": (),
    "review --images": (),
    "approve": ("--digest", DIGEST),
    "accept": ("--digest", DIGEST),
    "waive": ("--role", "head", "--reason", "agreed", "--until", "2099-01-01"),
    "retrain": ("--yes",),
    "withdraw": ("--yes",),
    "enroll": ("--out", "card.json"),
    "rotate": ("--out", "card.json"),
}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.fixture
def site_of_another_user(tmp_path: Path) -> Path:
    site = tmp_path / "north"
    (site / "private").mkdir(parents=True)
    (site / "silo.toml").touch()
    for path in (site, *site.rglob("*")):
        os.chown(path, USER_WITHOUT_NAME, USER_WITHOUT_NAME)
    return site


@pytest.mark.parametrize("command", REFUSED)
def test_command_that_writes_is_refused_to_another_user_than_the_worker(
    site_of_another_user: Path, command: str
) -> None:
    result = run_command("silo", *command.split(), site_of_another_user, *REFUSED[command])
    assert result.code == 3, result.err
    assert f"user {USER_WITHOUT_NAME}, who owns the folder" in result.err
    assert "runuser -u OWNER -- silo" in result.err
    files = {path.relative_to(site_of_another_user) for path in site_of_another_user.rglob("*")}
    assert files == {Path("private"), Path("silo.toml")}
