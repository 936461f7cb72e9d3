"""Each key drilled: the old one signs nothing any more, what it signed stays verifiable, and no crash falls between."""

import os
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from aggregator.keys.removal import remove_silo
from aggregator.keys.rotation import ROTATED_KEYS, parse_key_name, rotate_key
from ddm.errors import BusyError, MissingFileError, PassphraseError, SetupError, SignatureError
from ddm.publishing.keys import load_key, load_model_signing_key
from ddm.trust.keys import PublicKey
from ddm.trust.verify import verify_bundle, verify_release
from tests.aggregator.keys.test_tls import handshake
from tests.support.errors import has_subject
from tests.support.federation_keys import PASSPHRASE, KeyedFederation
from tests.support.forked import fork_process, wait_for_exit

TUF_KEYS = ("root", "targets", "plans", "release", "online")


def verified_versions(
    keyed: KeyedFederation, release: Path, state: Path | None = None
) -> dict[str, int]:
    return dict(verify_release(release, keyed.root, state=state).versions)


@pytest.mark.parametrize("name", TUF_KEYS)
def test_releases_verify_with_the_original_root_before_and_after_a_rotation(
    keyed: KeyedFederation, name: str
) -> None:
    state = keyed.path / "state"
    old_key = load_key(keyed.federation, name, PASSPHRASE).public
    before = verified_versions(keyed, keyed.path / "first", state)
    assert rotate_key(keyed.federation, parse_key_name(name), PASSPHRASE) == []
    assert verified_versions(keyed, keyed.path / "first") == before
    after = verified_versions(keyed, keyed.publish(1, keyed.path / "second"), state)
    assert after["root"] == (1 if name in ("plans", "release") else 2)
    assert load_key(keyed.federation, name, PASSPHRASE).public != old_key
    assert (keyed.federation.keys / f"{name}.pub").read_text() == (
        f"{load_key(keyed.federation, name, PASSPHRASE).public}\n"
    )


@pytest.mark.parametrize("name", TUF_KEYS)
def test_silo_that_knew_only_the_old_root_accepts_the_next_plan(
    keyed: KeyedFederation, name: str
) -> None:
    trust = keyed.path / "silo trust"
    verify_bundle(keyed.federation.bundle("digits-00000001"), keyed.root, state=trust)
    rotate_key(keyed.federation, parse_key_name(name), PASSPHRASE)
    keyed.plan(2)
    bundle = keyed.federation.bundle("digits-00000002")
    assert verify_bundle(bundle, keyed.root, state=trust).plan_id == "digits-00000002"


@pytest.mark.parametrize("name", TUF_KEYS)
def test_plan_in_progress_is_accepted_after_a_rotation_from_the_very_bundle_that_silos_hold(
    keyed: KeyedFederation, name: str
) -> None:
    """Made anew it would be another one to every silo that has it, and verifies nothing that the old one does not."""
    bundle = keyed.federation.bundle("digits-00000001")
    before = files(bundle)
    late = keyed.path / "late"
    early = keyed.path / "early"
    verify_bundle(bundle, keyed.root, state=early)
    for _ in range(2):
        rotate_key(keyed.federation, parse_key_name(name), PASSPHRASE)
    assert files(bundle) == before
    for trust in (late, early):
        assert verify_bundle(bundle, keyed.root, state=trust).plan_id == "digits-00000001"
    keyed.plan(2)
    following = keyed.federation.bundle("digits-00000002")
    for trust in (late, early):
        assert verify_bundle(following, keyed.root, state=trust).plan_id == "digits-00000002"
    # the control: who has seen the new keys takes nothing by the old ones
    if name in (
        "targets",
        "online",
    ):
        with pytest.raises(SignatureError):
            verify_bundle(bundle, keyed.root, state=early)


@pytest.mark.parametrize("name", TUF_KEYS)
def test_old_key_signs_nothing_any_more(keyed: KeyedFederation, name: str) -> None:
    """The attack: whoever stole the old key puts it back and signs with it."""
    stolen = [(keyed.federation.keys / f"{name}.{kind}") for kind in ("key", "pub")]
    kept = [path.read_bytes() for path in stolen]
    rotate_key(keyed.federation, parse_key_name(name), PASSPHRASE)
    for path, data in zip(stolen, kept, strict=True):
        path.write_bytes(data)
    current = keyed.federation.tuf / "timestamp.json"
    before = current.read_bytes()
    if name == "root":
        waits = rotate_key(keyed.federation, "online", PASSPHRASE)
        assert waits[0].startswith("root-3.json: 0 of 1 signatures")
    elif name == "targets":
        waits = keyed.plan(2)
        assert waits[0].startswith("targets-4.json: 0 of 1 signatures")
    else:
        with pytest.raises(SignatureError):
            keyed.publish(1, keyed.path / "second") if name != "plans" else keyed.plan(2)
    assert current.read_bytes() == before


@pytest.mark.parametrize("name", ["targets", "online"])
def test_reader_who_saw_the_rotation_refuses_what_the_old_key_signed(
    keyed: KeyedFederation, name: str
) -> None:
    state = keyed.path / "state"
    rotate_key(keyed.federation, parse_key_name(name), PASSPHRASE)
    assert verified_versions(keyed, keyed.publish(1, keyed.path / "second"), state)
    with pytest.raises(SignatureError):
        verified_versions(keyed, keyed.path / "first", state)
    assert verified_versions(keyed, keyed.path / "first")


def test_receipts_key_takes_effect_with_the_next_plan_and_the_plan_in_progress_keeps_its_own(
    keyed: KeyedFederation,
) -> None:
    federation = keyed.federation
    plan, _ = federation.current_plan()
    rotate_key(federation, "receipts", PASSPHRASE)
    assert str(load_key(federation, "receipts", PASSPHRASE).public) == plan.receipt_key
    keyed.plan(2)
    following, _ = federation.current_plan()
    assert following.receipt_key != plan.receipt_key
    assert str(load_key(federation, "receipts", PASSPHRASE).public) == following.receipt_key
    assert str(PublicKey.load(federation.keys / "receipts.pub")) == following.receipt_key
    assert not list(federation.keys.glob("receipts-next*"))


def test_plan_drafted_before_the_receipts_key_was_rotated_is_not_signed(
    keyed: KeyedFederation,
) -> None:
    from aggregator.planning.sign import sign_plan

    draft = keyed.draft(2)
    rotate_key(keyed.federation, "receipts", PASSPHRASE)
    with pytest.raises(SetupError, check=has_subject("plan digits-00000002")):
        sign_plan(keyed.federation, draft, PASSPHRASE)
    assert keyed.federation.current_plan()[0].plan_id == "digits-00000001"


def test_receipts_key_is_replaced_at_once_where_no_plan_names_it(tmp_path: Path) -> None:
    keyed = KeyedFederation(tmp_path)
    keyed.found()
    before = load_key(keyed.federation, "receipts", PASSPHRASE).public
    rotate_key(keyed.federation, "receipts", PASSPHRASE)
    assert load_key(keyed.federation, "receipts", PASSPHRASE).public != before


def test_model_signing_key_changes_and_the_old_public_half_still_verifies_what_it_signed(
    keyed: KeyedFederation,
) -> None:
    federation = keyed.federation
    algorithm = ec.ECDSA(hashes.SHA256())
    signature = load_model_signing_key(federation, PASSPHRASE).sign(b"model", algorithm)
    rotate_key(federation, "model-signing", PASSPHRASE)
    new = load_pem_public_key((federation.path / "model-signing.pub.pem").read_bytes())
    (kept,) = federation.path.glob("model-signing-*.pub.pem")
    old = load_pem_public_key(kept.read_bytes())
    assert isinstance(new, ec.EllipticCurvePublicKey)
    assert isinstance(old, ec.EllipticCurvePublicKey)
    old.verify(signature, b"model", algorithm)
    with pytest.raises(InvalidSignature):
        new.verify(signature, b"model", algorithm)
    new.verify(
        load_model_signing_key(federation, PASSPHRASE).sign(b"model", algorithm),
        b"model",
        algorithm,
    )
    assert (federation.keys / "model-signing.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(PassphraseError):
        load_model_signing_key(federation, b"wrong")


def test_two_operators_cannot_sign_at_once(keyed: KeyedFederation) -> None:
    with keyed.federation.signing_lock():
        for attempt in (
            lambda: rotate_key(keyed.federation, "online", PASSPHRASE),
            lambda: keyed.plan(2),
            lambda: remove_silo(keyed.federation, "north", "left", PASSPHRASE),
        ):
            with pytest.raises(BusyError):
                attempt()
    keyed.plan(2)


def test_unknown_key_is_named_and_holders_of_a_key_that_has_none_are_refused(
    keyed: KeyedFederation,
) -> None:
    with pytest.raises(SetupError, check=has_subject("KEY")):
        parse_key_name("router")
    with pytest.raises(SetupError):
        rotate_key(keyed.federation, "online", PASSPHRASE, keyed.hold("ada", threshold=1))


def test_tls_key_changes_under_the_same_authority_and_the_same_names(
    keyed: KeyedFederation,
) -> None:
    tls = keyed.federation.path / "tls"
    old_key = (tls / "server.key").read_bytes()
    authority = (tls / "ca.pem").read_bytes()
    rotate_key(keyed.federation, "tls", PASSPHRASE)
    assert (tls / "server.key").read_bytes() != old_key
    assert (tls / "ca.pem").read_bytes() == authority
    assert (tls / "server.key").stat().st_mode & 0o777 == 0o600
    assert handshake(tls, tls / "ca.pem", "127.0.0.1") == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tls, tls / "ca.pem", "evil.example.org")


def test_tls_rotation_says_what_is_missing_when_the_authority_is_offline(
    keyed: KeyedFederation,
) -> None:
    (keyed.federation.path / "tls" / "ca.key").unlink()
    with pytest.raises(MissingFileError) as refused:
        rotate_key(keyed.federation, "tls", PASSPHRASE)
    assert "offline" in refused.value.remedy


@pytest.mark.parametrize("name", ["ca.pem", "server.pem"])
def test_tls_rotation_names_a_certificate_that_is_gone(keyed: KeyedFederation, name: str) -> None:
    (keyed.federation.path / "tls" / name).unlink()
    with pytest.raises(MissingFileError, check=has_subject(name)):
        rotate_key(keyed.federation, "tls", PASSPHRASE)


@pytest.mark.parametrize("name", ROTATED_KEYS)
def test_wrong_passphrase_rotates_nothing(keyed: KeyedFederation, name: str) -> None:
    before = files(keyed.federation.path)
    with pytest.raises(PassphraseError):
        rotate_key(keyed.federation, parse_key_name(name), b"wrong")
    assert files(keyed.federation.path) == before


CHANGING = {
    "os.rename",
    "os.remove",
    "os.link",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "shutil.rmtree",
}


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Do `work` in a process of its own that dies, as by kill -9, just before its n-th change to the disk.

    Returns:
        Whether it came to that.
    """
    seen = 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        writes = (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if writes or event in CHANGING:
            seen += 1
            if seen == number:
                os._exit(9)

    def work_until_killed() -> None:
        sys.addaudithook(watch)
        work()

    code = wait_for_exit(fork_process(work_until_killed))
    assert code in (0, 9)
    return code == 9


def state_of(keyed: KeyedFederation) -> tuple[str, ...]:
    """Which keys are in force."""
    federation = keyed.federation
    repository = keyed.repository
    return (
        str(repository.root().version),
        str(repository.delegates().plans),
        *(path.read_text() for path in sorted(federation.keys.glob("*.pub"))),
        (federation.path / "model-signing.pub.pem").read_text(),
        (federation.path / "tls" / "server.pem").read_text(),
    )


@pytest.mark.parametrize(
    ("name", "stride"),
    [("targets", 16), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ROTATED_KEYS)],
)
def test_rotation_killed_at_any_write_leaves_the_old_key_or_the_new_one_working(
    keyed: KeyedFederation, tmp_path_factory: pytest.TempPathFactory, name: str, stride: int
) -> None:
    before = state_of(keyed)
    number = 0
    decided = []
    while True:
        number += stride
        broken = keyed.copy(tmp_path_factory.mktemp("broken"))
        if not killed_at(
            number,
            lambda here=broken: rotate_key(here.federation, parse_key_name(name), PASSPHRASE),
        ):
            break
        broken.federation.require()
        decided.append(state_of(broken) != before)
        check_all_keys_work(broken)
    assert decided == sorted(decided), "once decided, it stays decided"
    assert {False, True} == set(decided)


def check_all_keys_work(keyed: KeyedFederation) -> None:
    """Every key that a federation needs opens and signs what a reader with the first root accepts."""
    federation = keyed.federation
    with federation.signing_lock():
        pass
    load_model_signing_key(federation, PASSPHRASE)
    handshake(federation.path / "tls", federation.path / "tls" / "ca.pem", "localhost")
    keyed.plan(2)
    assert verify_bundle(federation.bundle("digits-00000002"), keyed.root, state=None)
    plan, _ = federation.current_plan()
    assert str(load_key(federation, "receipts", PASSPHRASE).public) == plan.receipt_key
    assert verify_release(keyed.publish(2, keyed.path / "next"), keyed.root, state=None)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and "ceremony" not in path.parts[len(folder.parts)]
        and not path.name.endswith(".lock")
    }
