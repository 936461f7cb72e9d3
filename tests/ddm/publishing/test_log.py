"""What the log says after each command, that it only grows, and that a crash leaves it as before or as after."""

import json
import os
import shutil
import stat
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from tuf.ngclient._internal.trusted_metadata_set import TrustedMetadataSet
from tuf.ngclient.config import EnvelopeType

from aggregator.config import Federation
from aggregator.keys.removal import remove_silo
from aggregator.keys.rotation import rotate_key
from aggregator.membership.withdrawal import withdraw_silo
from ddm.errors import RoleError, SetupError, SignatureError
from ddm.loading.public_log import read_public_log
from ddm.protocol.base import sha256_hex
from ddm.publishing.keys import load_key
from ddm.publishing.log import CHECKPOINT, ENTRIES, TransparencyLog, append_entries
from ddm.publishing.public_log import add_cosignatures, export_log, public_folder, sign_waiting
from ddm.trust.ceremony import SigningRequest, describe_request
from ddm.trust.drafts import draft_root, holders_of
from ddm.trust.keys import SigningKey
from ddm.trust.log.checkpoint import cosign, open_checkpoint
from ddm.trust.log.entries import SiloEnrolled, SiloKeyChanged
from ddm.trust.log.merkle import leaf_hash, root_hash
from ddm.trust.log.note import COSIGNATURE, VerifierKey
from ddm.trust.log.witness import Witnesses
from ddm.trust.metadata import sign_metadata
from ddm.trust.rules import trusted_log_keys
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.federation_keys import PASSPHRASE, KeyedFederation
from tests.support.publishing import kill_at_step


@pytest.fixture(scope="module")
def founded_once(tmp_path_factory: pytest.TempPathFactory) -> KeyedFederation:
    keyed = KeyedFederation(tmp_path_factory.mktemp("logged"))
    keyed.found()
    for silo_id in ("east", "north"):
        keyed.enroll(silo_id)
    keyed.plan(1)
    return keyed


@pytest.fixture
def keyed(founded_once: KeyedFederation, tmp_path: Path) -> KeyedFederation:
    return founded_once.copy(tmp_path)


def said(federation: Federation) -> list[str]:
    """Kind and subject of every entry."""
    names = ("federation", "key", "silo_id", "plan_id")
    entries = [json.loads(line) for line in TransparencyLog.load(federation).entries]
    return [
        f"{entry['kind']} {next(entry[name] for name in names if name in entry)}"
        for entry in entries
    ]


def sign(federation: Federation) -> TransparencyLog:
    return sign_waiting(federation, load_key(federation, "log", PASSPHRASE))


def log_keys(federation: Federation) -> list[VerifierKey]:
    roots = {path.name: path.read_bytes() for path in federation.tuf.glob("*.root.json")}
    return [VerifierKey.parse(key) for key in trusted_log_keys(roots, roots["1.root.json"], {})]


OPENED = [
    "opened digits",
    *[f"key {name}" for name in ("root", "targets", "online", "plans", "release", "log")],
    *[f"key {name}" for name in ("receipts", "model-signing", "tls")],
]


def test_every_command_that_changes_keys_or_signs_appends(
    keyed: KeyedFederation, tmp_path: Path
) -> None:
    federation = keyed.federation
    expected = [*OPENED, "silo_enrolled east", "silo_enrolled north", "plan digits-00000001"]
    assert said(federation) == expected
    for name in (
        "online",
        "plans",
        "release",
        "targets",
        "root",
        "log",
        "receipts",
        "model-signing",
        "tls",
    ):
        rotate_key(federation, name, PASSPHRASE)  # type: ignore[arg-type]
        expected.append(f"key {name}")
        with case(name=name):
            assert said(federation) == expected
    withdraw_silo(federation, "east", "asked to", load_key(federation, "receipts", PASSPHRASE))
    withdraw_silo(federation, "east", "asked to", load_key(federation, "receipts", PASSPHRASE))
    remove_silo(federation, "east", "left", PASSPHRASE)
    expected += ["withdrawn digits-00000001", "silo_removed east"]
    assert [
        line.replace("withdrawn east", "withdrawn digits-00000001") for line in said(federation)
    ] == expected
    assert sign(federation).signed == TransparencyLog.load(federation).signed
    public_log = read_public_log(public_folder(federation), keyed.root, tmp_path / "state")
    assert len(public_log.entries) == len(expected)


def test_log_of_a_rotated_key_goes_on_under_the_same_name(
    keyed: KeyedFederation, tmp_path: Path
) -> None:
    before = TransparencyLog.load(keyed.federation).signed
    assert before is not None
    rotate_key(keyed.federation, "log", PASSPHRASE)
    after = TransparencyLog.load(keyed.federation).signed
    assert after is not None
    old, new = log_keys(keyed.federation)
    assert old.name == new.name == after.checkpoint.origin
    open_checkpoint(after.encode(), [new], "checkpoint")
    with pytest.raises(SignatureError):
        open_checkpoint(after.encode(), [old], "checkpoint")
    public_log = read_public_log(public_folder(keyed.federation), keyed.root, tmp_path / "state")
    public_log.compare(before.encode(), "a checkpoint of before")


def test_repeating_the_last_word_adds_nothing_and_a_return_to_an_earlier_one_does(
    keyed: KeyedFederation,
) -> None:
    federation = keyed.federation
    here = SiloEnrolled(silo_id="east", key_fingerprint=keyed.silos["east"].public.fingerprint)
    there = SiloKeyChanged(
        silo_id="east", old_fingerprint=here.key_fingerprint, key_fingerprint="0" * 64
    )
    back = SiloKeyChanged(
        silo_id="east", old_fingerprint="0" * 64, key_fingerprint=here.key_fingerprint
    )
    size = len(TransparencyLog.load(federation).entries)
    append_entries(federation, here)
    append_entries(federation, here, here)
    assert len(TransparencyLog.load(federation).entries) == size
    append_entries(federation, there, back, back, there)
    assert len(TransparencyLog.load(federation).entries) == size + 3


def test_edited_or_shortened_log_is_never_signed_again(keyed: KeyedFederation) -> None:
    """The attack: without the checkpoint's root two histories would follow from one edit."""
    federation = keyed.federation
    path = keyed.federation.path / ENTRIES
    whole = path.read_bytes()
    for damaged in (
        whole.replace(b'"east"', b'"west"'),
        b"".join(whole.splitlines(keepends=True)[:-1]),
        b"",
    ):
        path.write_bytes(damaged)
        for act in (
            lambda: sign(federation),
            lambda: append_entries(federation),
            lambda: rotate_key(federation, "tls", PASSPHRASE),
        ):
            with pytest.raises(SetupError, check=has_subject("entries.jsonl")):
                act()
    path.write_bytes(whole)
    sign(federation)


def check_whole(federation: Federation, sizes: dict[int, bytes]) -> None:
    """The log is readable, and no checkpoint of a size has another root than one that was there before."""
    journal = TransparencyLog.load(federation)
    assert journal.signed is not None
    checkpoints = [journal.signed]
    public = public_folder(federation) / "checkpoint"
    if public.exists():
        checkpoints.append(open_checkpoint(public.read_bytes(), log_keys(federation), "public"))
    for signed in checkpoints:
        assert sizes.setdefault(signed.size, signed.root) == signed.root
        assert signed.root == root_hash(
            [leaf_hash(entry) for entry in journal.entries[: signed.size]]
        )


def crash_everywhere(keyed: KeyedFederation, folder: Path, stride: int) -> int:
    """Kill a rotation at every `stride`-th step, look before and after anything is put right; return how many."""
    for steps in count():
        there = keyed.copy(folder / str(steps))
        before = TransparencyLog.load(there.federation)
        sizes: dict[int, bytes] = {}
        killed = kill_at_step(
            steps * stride, partial(rotate_key, there.federation, "online", PASSPHRASE)
        )
        with case(step=steps * stride):
            check_whole(there.federation, sizes)
            after = TransparencyLog.load(there.federation.require())
            assert after.entries[: len(before.entries)] == before.entries
            assert len(after.entries) - len(before.entries) in (0, 1)
            check_whole(there.federation, sizes)
            sign(there.federation)
            check_whole(there.federation, sizes)
            read_public_log(public_folder(there.federation), keyed.root, folder / "state")
        shutil.rmtree(there.path)
        if not killed:
            return steps
    raise AssertionError


def test_log_killed_at_some_step_is_as_before_or_as_after(
    keyed: KeyedFederation, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert crash_everywhere(keyed, tmp_path_factory.mktemp("crashes"), stride=23) >= 3


@pytest.mark.slow
def test_log_killed_at_any_step_is_as_before_or_as_after(
    keyed: KeyedFederation, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert crash_everywhere(keyed, tmp_path_factory.mktemp("crashes"), stride=1) >= 60


def test_public_copy_grows_and_keeps_every_file(keyed: KeyedFederation, tmp_path: Path) -> None:
    export_log(keyed.federation, tmp_path / "served")
    old = {path: path.read_bytes() for path in (tmp_path / "served").rglob("*") if path.is_file()}
    rotate_key(keyed.federation, "online", PASSPHRASE)
    export_log(keyed.federation, tmp_path / "served")
    changed = [path.name for path, data in old.items() if path.read_bytes() != data]
    assert changed == ["checkpoint"]
    read_public_log(tmp_path / "served", keyed.root, tmp_path / "state")


@pytest.mark.parametrize("umask", [0o077, 0o022])
def test_copy_for_everyone_is_read_by_every_user_with_the_folders_made_above_it(
    keyed: KeyedFederation, tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        out = tmp_path / "www" / "log"
        export_log(keyed.federation, out, for_everyone=True)
        rotate_key(keyed.federation, "online", PASSPHRASE)
        export_log(keyed.federation, out, for_everyone=True)
        export_log(keyed.federation, tmp_path / "private")
    finally:
        os.umask(before)
    copy = [tmp_path / "www", *(tmp_path / "www").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in copy if path.is_dir()} == {0o755}
    assert {stat.S_IMODE(path.stat().st_mode) for path in copy if path.is_file()} == {0o644}
    read_public_log(out, keyed.root, tmp_path / "state")
    checkpoint = tmp_path / "private" / "checkpoint"
    assert stat.S_IMODE(checkpoint.stat().st_mode) == 0o644 & ~umask


def test_cosignature_of_a_witness_is_kept_until_the_log_grows(
    keyed: KeyedFederation, tmp_path: Path
) -> None:
    federation = keyed.federation
    witness = SigningKey.generate()
    signed = sign(federation).signed
    assert signed is not None
    (tmp_path / "cosigned").write_bytes(
        cosign(signed, "witness.example/w1", witness, 1_700_000_000).encode()
    )
    assert add_cosignatures(federation, tmp_path / "cosigned") == 1
    assert add_cosignatures(federation, tmp_path / "cosigned") == 0
    sign(federation)
    vkey = VerifierKey("witness.example/w1", witness.public, COSIGNATURE)
    public = public_folder(federation)
    trusted = Witnesses((vkey,))
    times = trusted.check([read_public_log(public, keyed.root, tmp_path / "state").signed])
    assert times["witness.example/w1"].year == 2023
    rotate_key(federation, "online", PASSPHRASE)
    with pytest.raises(SignatureError):
        trusted.check([read_public_log(public, keyed.root, tmp_path / "state").signed])
    with pytest.raises(SetupError, check=has_subject("cosigned")):
        add_cosignatures(federation, tmp_path / "cosigned")


def test_log_begins_with_the_fingerprint_of_the_root(keyed: KeyedFederation) -> None:
    first = json.loads(TransparencyLog.load(keyed.federation).entries[0])
    assert first["root_digest"] == sha256_hex(keyed.root)
    assert (keyed.federation.path / CHECKPOINT).is_file()


def signed_root(keyed: KeyedFederation, log_key: str | None) -> bytes:
    """The next root, signed by its holder, with this log key."""
    root = keyed.repository.root()
    draft = draft_root(root.version + 1, holders_of(root), keyed.now, log_key)
    return sign_metadata(draft, [load_key(keyed.federation, "root", PASSPHRASE)])


def test_later_root_that_leaves_out_or_exchanges_the_log_is_refused(keyed: KeyedFederation) -> None:
    """The attack: the holders of the root are talked into a federation without a log, or with a new one."""
    (key,) = log_keys(keyed.federation)
    other = VerifierKey("archipelago/digits/another", key.public)
    for log_key in (None, str(other)):
        view = {"1.root.json": keyed.root, "2.root.json": signed_root(keyed, log_key)}
        with case(log_key), pytest.raises(RoleError, check=has_subject("root")):
            trusted_log_keys(view, keyed.root, {})
    view = {"1.root.json": keyed.root, "2.root.json": signed_root(keyed, str(key))}
    assert trusted_log_keys(view, keyed.root, {}) == (str(key),)


def test_holders_read_which_log_they_sign_for(keyed: KeyedFederation) -> None:
    root = keyed.repository.root()
    (key,) = log_keys(keyed.federation)
    other = VerifierKey(key.name, SigningKey.generate().public)
    for log_key, words in (
        (str(key), f"log: {key}"),
        (None, "log: LEAVES"),
        (str(other), f"log: {other} (was {key})"),
    ):
        draft = draft_root(2, holders_of(root), keyed.now, log_key)
        assert words in describe_request(SigningRequest.to_sign(draft, "because", root))


def test_other_clients_of_tuf_accept_a_root_that_names_a_log(keyed: KeyedFederation) -> None:
    trusted = TrustedMetadataSet(keyed.root, EnvelopeType.METADATA)
    assert trusted.root.version == 1
    trusted.update_root(signed_root(keyed, str(log_keys(keyed.federation)[0])))
    assert trusted.root.version == 2
