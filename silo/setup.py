"""Make a site: its folders, keys, configuration, pinned root and enrolment card."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)
from pydantic import ValidationError

from ddm.errors import BusyError, DataError, PassphraseError, RootError, SetupError
from ddm.io.files import read_bounded, require_file, write_atomic
from ddm.io.locks import locked
from ddm.io.modes import open_to_group
from ddm.io.settings import save_settings
from ddm.protocol.base import now_utc, sha256_hex
from ddm.protocol.enrolment import (
    CARD_KIND,
    MAX_INVITATION_BYTES,
    AgreedSize,
    Card,
    Invitation,
    RotatedCard,
)
from ddm.system.console import remembered
from ddm.trust.comparison import CodeSubject, is_code_of, parse_code
from ddm.trust.envelope import seal
from ddm.trust.keys import SigningKey
from ddm.trust.rules import trusted_log_keys
from silo.config import ImagesSettings, LedgerSettings, Policy, SiloSettings, Site
from silo.courier.supernode import make_node_key
from silo.data.declared import facts_of
from silo.data.first_look import FirstLook, UnitCounts, count_units, look_at, needs_scan
from silo.images.adoption import adopt_decisions
from silo.images.decisions import FILE as DECISIONS_FILE
from silo.images.source import FOLDER, ImageSource, default_folder
from silo.privacy.holder import join_ledger, prepare_ledger

POLICY_HEADING = (
    "What this site lets a plan require; docs/reference/policy.md explains every field."
)
MIN_AGREED = 16
SETTINGS_HEADING = "This silo: who it is, where its data are, how it reaches the federation."


def read_invitation(path: Path, code: str) -> Invitation:
    """Read an invitation and check all of it against the code, or the digest, that came through a second channel.

    Raises:
        MissingFileError: there is no such file.
        DocumentError: the file is not an invitation.
        SetupError: the text is not a code.
        RootError: it is the code of another invitation, or of a root; or the invitation contradicts itself.
    """
    require_file(path, "the aggregator's invitation.json")
    data = read_bounded(path, MAX_INVITATION_BYTES)
    invitation = Invitation.parse(data, subject=path.name, limit=MAX_INVITATION_BYTES)
    root = invitation.root.encode()
    root_digest = sha256_hex(root)
    # The second channel decides: anybody who sent the file could have replaced root, address and certificate together.
    expected_code = parse_code(code)
    if not is_code_of(expected_code, invitation.digest, CodeSubject.INVITATION):
        raise _wrong_code(path.name, expected_code, root_digest)
    # The invitation is what the aggregator's operator made. One that contradicts itself is refused all the same.
    if root_digest != invitation.root_digest:
        raise RootError(
            f"{path.name}, root_digest",
            expected="the digest of the root",
            got="a different one",
            remedy="Ask the aggregator's operator to write it again: `aggregator invite FED`.",
        )
    if trusted_log_keys({"1.root.json": root}, root, {}) != (invitation.log_key,):
        raise RootError(
            f"{path.name}, log_key",
            expected="the log key that the root names",
            got="a different one",
            remedy="Ask the aggregator's operator to write it again: `aggregator invite FED`.",
        )
    return invitation


def _wrong_code(name: str, expected_code: str, root_digest: str) -> RootError:
    """Return the error of an invitation that does not have the code which a person typed."""
    # Its own code is not shown: to type it from here would trust anybody who sent the file.
    if is_code_of(expected_code, root_digest, CodeSubject.ROOT):
        return RootError(
            name,
            expected="the code of the invitation",
            got="the code of the root, which does not cover the address to which this silo would send",
            remedy="Ask the aggregator's operator for the code of the invitation: `aggregator invite FED` prints it.",
        )
    return RootError(
        name,
        expected=f"an invitation with the code {expected_code}",
        got="an invitation with another code",
        remedy="Ask the aggregator's operator to read out the code of the invitation again, as `aggregator invite FED` "
        "prints it. If the words are the same, somebody replaced the file on its way: get it in another way.",
    )


def renew_address(site: Site, invitation: Invitation) -> bool:
    """Let a site reach its federation as a newer invitation says.

    Args:
        site: a site of the invitation's federation.
        invitation: the invitation whose code was compared.

    Returns:
        Whether address or certificate authority have changed.

    Raises:
        SetupError: worker and courier are two users, and this process may not write the files of both.
        BusyError: worker or courier are running.
    """
    settings = site.settings()
    certificate = invitation.ca_certificate.encode()
    is_same_address = settings.address == invitation.address
    if site.hides_courier():
        if is_same_address:
            return False
        raise SetupError(
            str(site.courier),
            expected="a user who may write the files of worker and courier",
            got="a folder of another user",
            remedy="Give this command as root, then give both users their files again (docs/how-to/install.md).",
        )
    ca_path = site.courier / "ca.pem"
    if is_same_address and ca_path.read_bytes() == certificate:
        return False
    with locked(site.private, "worker"), locked(site.courier, "courier"):
        write_atomic(ca_path, certificate)
        settings = settings.model_copy(update={"address": invitation.address})
        save_settings(settings, site.path / "silo.toml", SETTINGS_HEADING)
        open_to_group(site.path / "silo.toml", site.path)
    return True


def new_source(site: Site, data: Path, images: ImagesSettings) -> ImageSource:
    """Return the images of a site that is to be made; what a scan finds is remembered in its private folder."""
    return ImageSource(data, site.private / FOLDER, images)


def first_look(
    site: Site, source: ImageSource, advance: Callable[[int], None] = lambda num_files: None
) -> FirstLook:
    """Look at the data of a site that is to be made; decisions about its images from before are carried over.

    Raises:
        BusyError: the folder already is a site; nothing is overwritten.
        MissingFileError: there is nothing at the path.
        DataError: the data hold nothing that any plan could take, see `silo.data.first_look.look_at`.
    """
    if (site.path / "silo.toml").exists():
        raise BusyError(
            str(site.path),
            expected="a folder that is no site yet",
            got="a folder with silo.toml",
            remedy="Choose another folder; keys are never overwritten.",
        )
    is_new = not site.path.exists()
    earlier_folder = default_folder(source.data)
    if needs_scan(source) or (earlier_folder / DECISIONS_FILE).exists():
        # A scan remembers what it found in the private folder, so that this must be there, closed to others, before
        # it.
        site.make_folders()
    try:
        num_adopted = adopt_decisions(earlier_folder, source.folder)
        return replace(look_at(source, advance), num_adopted=num_adopted)
    except SetupError:
        if is_new and site.path.exists():
            shutil.rmtree(site.path)  # made a moment ago, for the scan alone
        raise


@dataclass(frozen=True)
class SiteSetup:
    """What is decided about a site when it is made.

    Attributes:
        silo_id: the silo's name.
        data: its private images.
        passphrase_file: the file whose path the configuration keeps.
        images: how images are found and decoded.
        ledger: where the privacy ledger is; one that exists already is joined.
        policy: what it lets a plan ask for; by default one that declares what the data's headers say, unless its
            operator wrote one already.
    """

    silo_id: str
    data: Path
    passphrase_file: Path | None = None
    images: ImagesSettings = ImagesSettings()
    ledger: LedgerSettings = LedgerSettings()
    policy: Policy | None = None


def init_site(
    site: Site,
    setup: SiteSetup,
    invitation: Invitation,
    passphrase: bytes,
    *,
    looked: bool = False,
) -> SigningKey:
    """Make a site's folders, keys and configuration.

    Args:
        site: the folder.
        setup: what is decided about it.
        invitation: from the aggregator.
        passphrase: encrypts the signing key.
        looked: whether `first_look` was called already.

    Raises:
        BusyError, MissingFileError, DataError: see `first_look`.
        LedgerError: the ledger or its anchor is there and does not fit.
    """
    source = new_source(site, setup.data, setup.images)
    if not looked:
        first_look(site, source)
    settings = SiloSettings(
        silo_id=setup.silo_id,
        data=str(setup.data.resolve()),
        federation=invitation.federation,
        address=invitation.address,
        root_digest=invitation.root_digest,
        passphrase_file=remembered(setup.passphrase_file),
        images=setup.images,
        ledger=setup.ledger,
    )
    site.make_folders()
    # Keys before settings: an interrupted call finds them again, and makes no second ones.
    key = _signing_key(site.key_path, passphrase)
    prepare_ledger(site.ledger_folder_in(settings))
    join_ledger(site, settings, anchor=site.anchor_path_in(settings))
    node_key = _node_key(site.courier / "node.key")
    write_atomic(site.courier / "node.pub", f"{node_key}\n".encode())
    write_atomic(site.courier / "ca.pem", invitation.ca_certificate.encode())
    # Worker and courier each verify by a copy of their own.
    write_atomic(site.root_path, invitation.root.encode())
    write_atomic(site.courier / "1.root.json", invitation.root.encode())
    # An operator may have written the policy first, or an earlier `silo init` was interrupted after this.
    policy_path = site.path / "policy.toml"
    if not policy_path.exists():
        save_settings(setup.policy or declare_data(Policy(), source), policy_path, POLICY_HEADING)
    elif setup.policy is not None and setup.policy != site.policy():
        save_settings(setup.policy, policy_path, POLICY_HEADING)
    # Last of the files, since a folder with silo.toml counts as a site: whatever is interrupted before is done again.
    save_settings(settings, site.path / "silo.toml", SETTINGS_HEADING)
    # The courier, perhaps another user, reads both.
    open_to_group(site.path / "policy.toml", site.path)
    open_to_group(site.path / "silo.toml", site.path)
    return key


def declare_data(policy: Policy, source: ImageSource) -> Policy:
    """Return a policy that declares what the data's headers say, unless it declares something already."""
    if policy.data.kind is not None:
        return policy
    facts = facts_of(source)
    data = policy.data.model_copy(
        update={"kind": facts.kind, "shape": facts.shape, "range": facts.range}
    )
    return policy.model_copy(update={"data": data})


def set_anchor(site: Site, path: Path) -> None:
    """Let a file on another disk keep the ledger's head from now on.

    Raises:
        LedgerError: the ledger does not verify, does not extend the file that is there, or the file cannot be written.
        BusyError: the worker is running.
    """
    with locked(site.private, "worker"):
        settings = site.settings()
        # Before the settings name it: the anchor must hold this ledger's head, or one that the ledger extends.
        join_ledger(site, settings, anchor=path)
        ledger = settings.ledger.model_copy(update={"anchor": str(path)})
        settings = settings.model_copy(update={"ledger": ledger})
        save_settings(settings, site.path / "silo.toml", SETTINGS_HEADING)
        open_to_group(site.path / "silo.toml", site.path)


def _signing_key(path: Path, passphrase: bytes) -> SigningKey:
    """Make the signing key, or take the one that an interrupted init has made."""
    if path.exists():
        try:
            return SigningKey.load(path, passphrase)
        except PassphraseError as error:
            error.remedy = (
                "An earlier attempt to make this site was cut short: give its passphrase, or choose "
                "another folder."
            )
            raise
    key = SigningKey.generate()
    key.save(path, passphrase)
    return key


def _node_key(path: Path) -> str:
    """Make the node key, or take the one that an interrupted init has made; return the public key."""
    if not path.exists():
        return make_node_key(path)
    try:
        public = load_ssh_private_key(path.read_bytes(), None).public_key()
    except ValueError as error:
        raise SetupError(
            str(path),
            expected="a whole node key",
            got="a file that cannot be read as one",
            remedy=(
                "An earlier attempt to make this site was cut short. Remove this file, then run the "
                "command again."
            ),
        ) from error
    return public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode("ascii")


def make_card(
    site: Site,
    key: SigningKey,
    *,
    images: int | None = None,
    patients: int | None = None,
    advance: Callable[[int], None] = lambda num_files: None,
    on_count: Callable[[UnitCounts], None] = lambda counts: None,
) -> bytes:
    """Return this silo's public keys, size and what its policy allows, sealed with its signing key; the site keeps it.

    Args:
        site: the silo's folder.
        key: its signing key, opened.
        images: the most images that this site may bring to a plan. By default what its last card states, else what its
            data hold, rounded up by `round_up`.
        patients: the most patients, where its policy counts them; by default in the same way.
        advance: called with the number of files that are finished, while there is a scan.
        on_count: called with what was counted, if anything had to be.

    Raises:
        SetupError: more patients than images, or fewer than two.
        MissingFileError, DataError: see `silo.data.first_look.count_units`.
    """
    settings = site.settings()
    card = Card(
        # Anybody who gets this card cannot enroll the silo in a federation that it never joined.
        root_digest=site.root_digest,
        agreed=_agreed(site, images, patients, advance, on_count),
        limits=site.policy().public_limits(settings.batch_parts),
        silo_id=settings.silo_id,
        signing_key=str(key.public),
        node_key=_node_public_key(site),
        created_at=now_utc(),
    )
    # Kept, since plans are compared with what was stated last (`Site.agreed`).
    write_atomic(site.card_path, card.encode())
    return seal(card.encode(), CARD_KIND, key)


def is_card_current(site: Site, images: int | None, patients: int | None) -> bool:
    """Return whether the site's last card states these sizes, and what its policy says now.

    Args:
        site: the silo's folder.
        images: most images; None for those of the card.
        patients: most patients; None for those of the card.
    """
    if not site.card_path.exists():
        return False
    card = site.card()
    limits = site.policy().public_limits(site.settings().batch_parts)
    return (
        images in (None, card.agreed.images)
        and patients in (None, card.agreed.patients)
        and limits == card.limits
    )


def sealed_card(site: Site, key: SigningKey) -> bytes:
    """Return the site's last card, sealed once more: the same bytes, with the same code.

    Raises:
        MissingFileError: no card was made yet.
    """
    return seal(site.card().encode(), CARD_KIND, key)


def lacks_patients(error: DataError) -> bool:
    """Return whether images were refused because the patients whom they show are not known."""
    return "patients" in f"{error.subject} {error.expected}"


def with_rotations(card: bytes, rotations: tuple[str, ...]) -> bytes:
    """Return what the aggregator is given: the card alone, or with the rotations that led to its key."""
    if not rotations:
        return card
    return RotatedCard(card=card.decode(), rotations=rotations).encode()


def round_up(num: int) -> int:
    """Return the next power of two, at least 16: so a card reveals how large a cohort is to within a factor of two."""
    return max(MIN_AGREED, 1 << (num - 1).bit_length())


def _node_public_key(site: Site) -> str:
    """Return the courier's public key, which never changes: from the last card, else from the courier's folder."""
    # Where worker and courier are two users, the worker's user cannot enter the courier's folder.
    if site.card_path.is_file():
        return site.card().node_key
    return (site.courier / "node.pub").read_text("utf-8").strip()


def _agreed(
    site: Site,
    images: int | None,
    patients: int | None,
    advance: Callable[[int], None],
    on_count: Callable[[UnitCounts], None],
) -> AgreedSize:
    """Return the size to agree on: as the operator says, else as on the last card, else as counted."""
    by_patient = site.policy().privacy.unit == "patient"
    last_card = site.agreed()
    if last_card is not None and (not by_patient or last_card.patients is not None):
        images = images or last_card.images
        patients = patients or last_card.patients
    if images is None or (by_patient and patients is None):
        try:
            counts = count_units(ImageSource.of_site(site), patients=by_patient, advance=advance)
        except DataError as error:
            if by_patient and lacks_patients(error):
                error.remedy = (
                    "Give every image its patient: patients in an npz, a column patient in a table of paths. Where "
                    "every image is of another person, a different name for each image is enough. Only if the "
                    "aggregator's operator says that the plans of this federation protect images "
                    '(statistics.unit = "image"), set unit = "image" under [privacy] in policy.toml instead: a site '
                    "without patients can take no plan that protects patients."
                )
            raise
        on_count(counts)
        images = images or round_up(counts.images)
        if patients is None and counts.patients is not None:
            patients = round_up(counts.patients)
        if patients is not None:
            patients = min(patients, images)
    try:
        return AgreedSize(images=images, patients=patients)
    except ValidationError as error:
        got = f"{images} images"
        if patients is not None:
            got += f" and {patients} patients"
        raise SetupError(
            "--images, --patients",
            expected="at least two images, and at most as many patients as images",
            got=got,
        ) from error
