"""A federation that belongs to the user of a service: commands of another user, such as root, write nothing there."""

import os
from pathlib import Path

import pytest

from tests.support.commands import run_command
from tests.support.federation_keys import KeyedFederation

USER_WITHOUT_NAME = 54321
REFUSED = {
    "invite": (),
    "enroll": ("card.json",),
    "remove": ("north", "--reason", "left"),
    "base": ("--recipe", "plan.toml", "--public", "public.npz"),
    "plan": ("--recipe", "plan.toml"),
    "run": (),
    "release": ("--out", "release"),
    "router": (),
    "publish": ("--out", "release"),
    "withdraw": ("north", "--reason", "left"),
    "admit": ("north", "--reason", "telephoned"),
    "refuse": ("north", "--reason", "noise"),
    "complete": (),
    "rotate": ("online",),
    "log": (),
}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.fixture(scope="module")
def folder_of_another_user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keyed = KeyedFederation(tmp_path_factory.mktemp("owned"))
    keyed.found()
    folder = keyed.federation.path
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER_WITHOUT_NAME, USER_WITHOUT_NAME)
    return folder


@pytest.mark.parametrize("command", REFUSED)
def test_command_that_writes_is_refused_to_another_user_than_the_folders_owner(
    folder_of_another_user: Path, command: str
) -> None:
    result = run_command("aggregator", command, folder_of_another_user, *REFUSED[command])
    assert result.code == 3, result.err
    assert f"user {USER_WITHOUT_NAME}, who owns the folder" in result.err
    assert "runuser -u OWNER -- aggregator" in result.err
    owners = {path.stat().st_uid for path in folder_of_another_user.rglob("*")}
    assert owners == {USER_WITHOUT_NAME}


def test_root_reads_the_status_of_another_users_federation(folder_of_another_user: Path) -> None:
    result = run_command("aggregator", "status", folder_of_another_user)
    assert result.code == 0, result.err
