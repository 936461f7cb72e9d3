"""Commands started with umask 000: no key, ledger, state or cohort that another user could read or change."""

import io
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tomli_w

import aggregator.cli
import ddm.cli.main
import silo.cli
from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.io.files import write_for_group
from ddm.io.modes import (
    close_to_others,
    group_folder,
    open_to_everyone,
    open_to_group,
    private_folder,
)
from ddm.protocol.base import sha256_file
from ddm.publishing.staging import copy_out, reserve
from silo.config import Site
from tests.conftest import PublishedRelease
from tests.support.federation import (
    PASSPHRASE,
    POLICY,
    TinyFederation,
    images,
    recipe,
    write_policy,
)
from tests.support.forked import fork_process, wait_for_exit
from tests.support.operators import (
    Operators,
    all_services_ended,
    serve_everything,
    set_up_federation,
)

MAINS = {"silo": silo.cli.main, "aggregator": aggregator.cli.main, "ddm": ddm.cli.main.main}
SILO = "north"
# What the other half of a site reads, by the first folder of its path; everything else is its owner's alone.
SHARED_OF_A_SITE = ("", "silo.toml", "policy.toml", "inbox", "outbox")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def tree(folder: Path) -> Iterator[Path]:
    yield folder
    yield from folder.rglob("*")


def inodes(folder: Path) -> set[int]:
    return {path.lstat().st_ino for path in tree(folder) if path.is_file()}


def exposed_of_a_federation(fed: Path) -> list[str]:
    """What anybody but its owner could reach in the aggregator's folder."""
    return [
        f"{path} {mode(path):o}"
        for path in tree(fed)
        if mode(path) & 0o077 and not path.is_symlink()
    ]


def exposed_of_a_site(site: Path) -> list[str]:
    """What the group could read beyond the list, or change, and what others could do at all."""
    sent = inodes(site / "outbox")  # an approved expert is one file under two names
    modes = []
    for path in tree(site):
        first = path.relative_to(site).parts[0] if path != site else ""
        allowed = (
            0o750
            if first in SHARED_OF_A_SITE or (path.is_file() and path.lstat().st_ino in sent)
            else 0o700
        )
        if mode(path) & 0o777 & ~allowed:
            modes.append(f"{path} {mode(path):o}")
    return modes


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Run a program's own entry in this process, each time with a umask that keeps nothing back."""

    def run(*words: object) -> None:
        os.umask(0)
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        with pytest.raises(SystemExit) as ended:
            MAINS[str(words[0])]()
        assert not ended.value.code

    # It would hold for this process, and so for the tests after these.
    for main in MAINS.values():
        monkeypatch.setattr(sys.modules[main.__module__], "forbid_core_dumps", lambda: None)

    before = os.umask(0)
    yield run
    os.umask(before)


def found(command: Callable[..., None], folder: Path) -> TinyFederation:
    """The set-up of one silo and its aggregator, to a signed plan, in folders that exist already and are wide open."""
    (folder / "secret").write_bytes(PASSPHRASE)
    secret = ("--passphrase-file", folder / "secret")
    for name in ("fed", SILO):
        (folder / name).mkdir(mode=0o777)
    command(
        "aggregator",
        "init",
        folder / "fed",
        "--name",
        "tiny",
        "--licence",
        "CC-BY-4.0",
        "--address",
        "127.0.0.1:9092",
        *secret,
    )
    np.savez(folder / "images.npz", images=images(60, -0.5, seed=0))
    invitation_path = folder / "fed" / "invitation.json"
    invitation = ("--invitation", invitation_path, "--code", sha256_file(invitation_path))
    command(
        "silo",
        "init",
        folder / SILO,
        "--id",
        SILO,
        "--data",
        folder / "images.npz",
        *invitation,
        *secret,
    )
    write_policy(Site(folder / SILO), POLICY)
    command("silo", "enroll", folder / SILO, "--out", folder / "card.json")
    command("aggregator", "enroll", "--yes", folder / "fed", folder / "card.json")
    (folder / "plan.toml").write_bytes(
        tomli_w.dumps(recipe().model_dump(mode="json", exclude_none=True)).encode()
    )
    np.savez(folder / "public.npz", images=images(240, 0.0, seed=90))
    public = ("--recipe", folder / "plan.toml", "--public", folder / "public.npz", "--yes")
    command("aggregator", "plan", folder / "fed", *public)
    return TinyFederation(folder, Federation(folder / "fed"), {SILO: Site(folder / SILO)})


def test_nothing_private_is_exposed_when_the_commands_run_with_umask_000(
    command: Callable[..., None], tmp_path: Path
) -> None:
    tiny = found(command, tmp_path)
    fed = tiny.federation.path
    site = tiny.sites[SILO]
    assert mode(fed) == mode(site.private) == mode(site.courier) == 0o700
    assert mode(site.path) == mode(site.inbox) == mode(site.outbox) == 0o750
    assert mode(tmp_path / "card.json") == 0o644
    plan_id = tiny.federation.current_plan()[0].plan_id
    command("silo", "status", site.path)  # leaves the process as the program has it
    tiny.deliver_plan(SILO, plan_id)
    open_to_group(site.inbox, site.inbox)
    tiny.work(SILO)
    command("aggregator", "status", fed)
    tiny.collect(SILO, plan_id)
    assert [receipt.verdict.kind for receipt in tiny.take_in()] == ["accepted"]
    assert exposed_of_a_federation(fed) == []
    assert exposed_of_a_site(site.path) == []
    sent = site.outbox / plan_id / "1"
    assert {mode(path) for path in tree(sent)} == {0o750, 0o640}, (
        "what left is for the courier's group to read"
    )
    assert mode(site.outbox / "status.json") == 0o640


def test_published_folder_is_for_everybody_to_read_and_its_source_is_not_opened_with_it(
    tmp_path: Path,
) -> None:
    release = tmp_path / "releases" / "1"
    (release / "metadata").mkdir(parents=True, mode=0o700)
    (release / "metadata" / "1.root.json").touch(mode=0o600)
    out = tmp_path / "www" / "out"
    before = os.umask(0o077)
    try:
        with reserve(out) as reserved:
            copy_out(release, reserved, out)
    finally:
        os.umask(before)
    assert {mode(path) for path in tree(tmp_path / "www")} == {0o755, 0o644}
    assert mode(release / "metadata" / "1.root.json") == 0o600


def test_control_an_exposed_file_is_found(tmp_path: Path) -> None:
    site = Site(tmp_path / "site")
    site.make_folders()
    (site.private / "state.json").touch()
    (site.private / "state.json").chmod(0o640)
    (site.outbox / "status.json").touch()
    (site.outbox / "status.json").chmod(0o660)
    assert len(exposed_of_a_site(site.path)) == 2
    (tmp_path / "fed").mkdir(mode=0o711)
    assert len(exposed_of_a_federation(tmp_path / "fed")) == 1


def test_folder_that_an_operator_closed_further_stays_closed(tmp_path: Path) -> None:
    for before, after in ((0o700, 0o700), (0o777, 0o750), (0o2775, 0o2750)):
        folder = tmp_path / f"{before:o}"
        folder.mkdir()
        folder.chmod(before)
        close_to_others(folder)
        assert mode(folder) == after


def test_nobody_else_can_write_to_a_readers_memory_that_was_made_with_umask_000(
    command: Callable[..., None], published: PublishedRelease, tmp_path: Path
) -> None:
    state = tmp_path / "above" / "deep" / "state"
    command("ddm", "verify", published.release, "--root", published.root, "--state", state)
    assert any(state.rglob("*.json"))
    made = [tmp_path / "above", *(tmp_path / "above").rglob("*")]
    assert [str(path) for path in made if mode(path) & 0o022] == []


def test_modes_are_exact_whatever_the_umask_and_links_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    for umask in (0o000, 0o077):
        before = os.umask(umask)
        try:
            top = tmp_path / f"{umask:o}"
            private_folder(top)
            group_folder(top / "shared")
            (top / "shared" / "below").mkdir()
            (top / "shared" / "link").symlink_to(secret)
            write_for_group(top / "shared" / "below" / "file", b"x")
            open_to_group(top / "shared", top)
            modes = {path.name: mode(path) for path in tree(top) if not path.is_symlink()}
            assert modes == {f"{umask:o}": 0o700, "shared": 0o750, "below": 0o750, "file": 0o640}
            open_to_everyone(top / "shared")
            assert mode(top / "shared" / "below" / "file") == 0o644
        finally:
            os.umask(before)
    assert mode(secret) == 0o600


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may give files to groups and become another user"
)
def test_group_of_the_outbox_reads_what_a_worker_of_another_group_approved(tmp_path: Path) -> None:
    """A file linked from the private folder has its group; what it gets is the outbox's, or a plain refusal."""
    site = Site(tmp_path / "site")
    site.make_folders()
    os.chown(site.outbox, -1, 12345)
    expert = site.private / "expert"
    expert.write_bytes(b"weights")
    (site.outbox / "1").mkdir()
    os.link(expert, site.outbox / "1" / "expert")
    open_to_group(site.outbox / "1", site.outbox)
    assert (
        (site.outbox / "1" / "expert").stat().st_gid == (site.outbox / "1").stat().st_gid == 12345
    )
    write_for_group(site.outbox / "status.json", b"{}")
    assert (site.outbox / "status.json").stat().st_gid == 12345

    def refused() -> None:
        os.chdir(site.outbox)  # the folders above it are root's
        os.setgroups([])
        os.setgid(54321)
        os.setuid(54321)
        with pytest.raises(SetupError, match="in group 12345") as refusal:
            write_for_group(Path("status.json"), b"")
        assert "usermod" in refusal.value.remedy

    os.chown(site.outbox, 54321, 12345)
    assert wait_for_exit(fork_process(refused)) == 0
    assert (site.outbox / "status.json").read_bytes() == b"{}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_private_is_exposed_when_a_whole_federation_runs_with_umask_000(
    tmp_path: Path,
) -> None:
    """Flower's own files, its database, logs and TLS keys among them."""
    before = os.umask(0)
    operators = Operators(tmp_path)
    try:
        set_up_federation(operators)
        serve_everything(operators)
        operators.wait_until(lambda: all_services_ended(operators), "the end")
        operators.stop()
        operators.call("aggregator", "router", operators.fed)
        operators.call(
            "aggregator", "publish", operators.fed, "--rehearsal", "--out", tmp_path / "release"
        )
    finally:
        operators.stop()
        os.umask(before)
    assert any(operators.fed.rglob("superlink.db")) and any(
        (tmp_path / SILO / "courier" / "flwr").iterdir()
    )
    assert exposed_of_a_federation(operators.fed) == []
    assert exposed_of_a_site(tmp_path / SILO) == []
