"""A site: where its folders are, what silo.toml and policy.toml say."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from ddm.errors import MissingFileError
from ddm.images.patients import PatientRule
from ddm.images.table import ColumnName
from ddm.io.files import read_bounded, require_file
from ddm.io.modes import close_to_others, group_folder, private_folder
from ddm.io.own_folder import require_own_path, require_owner
from ddm.io.settings import Settings, load_settings
from ddm.protocol.address import HostAndPort
from ddm.protocol.base import Delta, Digest, Epsilon, Model, ShortText, SiloId, sha256_file
from ddm.protocol.classes import Classes
from ddm.protocol.data import PixelSide, PixelValue
from ddm.protocol.enrolment import MAX_CARD_BYTES, AgreedSize, Card
from ddm.protocol.federation import FederationDocument
from ddm.protocol.policy import (
    AuditLimits,
    Licences,
    PolicyLimits,
    PrivacyLimits,
    SizeLimits,
    TrainingLimits,
)
from ddm.protocol.submission import Waiver
from ddm.training.config import TrainingSettings

# In the environment of every container that follows systemd's container interface.
_CONTAINER_VARIABLE = "container"
LEDGER = "ledger.jsonl"
AUDIT_REPORT = "audit.json"
# Metadata of plans that do not verify yet, and receipts.
_INBOX_SLACK_BYTES = 128 * 1024**2


PositiveNumber = Annotated[int, Field(gt=0)]


class TextSettings(Settings):
    """Where this silo finds the text encoder that turns captions into vectors."""

    encoder: str


class ImagesSettings(Settings):
    """How this silo's images are found and decoded, where they are more than arrays that a plan takes as they are.

    Attributes:
        columns: other names of a table's columns.
        outside: whether links, and paths in a table, may lead to files outside of the data folder.
        memory_mib: limit of the address space of each decoder process.
        seconds: time limit for each file, plus one second per MB.
        processes: number of decoder processes; by default one per core.
    """

    columns: dict[ColumnName, Annotated[str, Field(min_length=1, max_length=1024)]] = {}
    outside: bool = False
    memory_mib: Annotated[int, Field(ge=512, le=1 << 20)] = 4096
    seconds: Annotated[float, Field(ge=1, le=86400)] = 60.0
    processes: Annotated[int | None, Field(ge=1, le=256)] = None


class LedgerSettings(Settings):
    """The folder of the privacy ledger, and its anchor.

    Attributes:
        folder: the folder of ledger, draws and salt, which any number of sites of one data holder may name; `private`
            by default.
        anchor: a file on another disk that keeps the ledger's head.
    """

    folder: str | None = None
    anchor: str | None = None


class SiloSettings(Settings):
    """silo.toml: who this silo is, where its data are, how it reaches the federation."""

    silo_id: SiloId
    data: str
    federation: str
    address: HostAndPort
    root_digest: Digest
    passphrase_file: str | None = None
    poll_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    max_bundle_bytes: PositiveNumber = 2 * 1024**3
    max_inbox_bytes: PositiveNumber | None = None
    max_inbox_files: PositiveNumber = 4096
    max_bytes_per_s: Annotated[int, Field(ge=65536)] | None = None
    training: TrainingSettings = TrainingSettings()
    images: ImagesSettings = ImagesSettings()
    ledger: LedgerSettings = LedgerSettings()
    text: TextSettings | None = None

    @property
    def batch_parts(self) -> int:
        """The parts into which this machine divides a batch; fewer of its images take less memory at once."""
        parts = self.training.accumulate
        if isinstance(self.training.processes, int):
            parts *= self.training.processes
        return parts

    @property
    def inbox_bytes(self) -> int:
        """Most bytes of the whole inbox: by default two bundles and some more."""
        if self.max_inbox_bytes is not None:
            return self.max_inbox_bytes
        return 2 * self.max_bundle_bytes + _INBOX_SLACK_BYTES


class PrivacyPolicy(PrivacyLimits, strict=False):
    """The privacy unit, the most that one plan may spend, and the site's budget over all plans it will ever answer."""

    budget_epsilon: Epsilon = 10.0
    budget_delta: Delta = 1e-5


class PlansPolicy(Settings):
    """Whether a person accepts each plan, those that contain networks, or none; the policy is checked in any case."""

    # A network that came with a plan sees private images before anything is noised (`silo.plan.consent`).
    accept: Literal["person", "networks", "policy"] = "networks"


class DataPolicy(Settings):
    """What this site's data are, as the site declares it; a plan is compared with this alone, never with the data.

    Attributes:
        kind: arrays that plans take as they are, latents, or pictures and volumes in files of their own.
        shape: the shape of one row of arrays or latents, as it is stored.
        range: lowest and highest value of floating point arrays; none for whole numbers.
        classes: how many there are, or their names; none where images have no class.
        captions: whether images have texts.
        min_images: the site has at least this many images; by default training.min_images.
        parts: the parts of the data set that are trained on and counted, such as train and validation; all but test by
            default. Images that belong to no part are always used.
        patients: which part of an identifier distinguishes patients: its letters and digits (`spelling`), or its digits
            without leading zeros (`digits`).
    """

    kind: Literal["arrays", "latents", "pictures"] | None = None
    shape: Annotated[tuple[PixelSide, ...], Field(min_length=1, max_length=4)] | None = None
    range: tuple[PixelValue, PixelValue] | None = None
    classes: Annotated[int, Field(ge=2, le=65536)] | tuple[ShortText, ...] | None = None
    captions: bool = False
    min_images: PositiveNumber | None = None
    parts: tuple[ShortText, ...] | None = None
    patients: PatientRule = "spelling"

    @property
    def known_classes(self) -> Classes | None:
        """The classes, where there are some."""
        if self.classes is None:
            return None
        if isinstance(self.classes, int):
            return Classes(self.classes)
        return Classes(len(self.classes), self.classes)


class TrainingPolicy(TrainingLimits, strict=False):
    """The most work and the largest files that one plan may require, and the fewest images of an expert."""

    # Fewer than a few hundred images are what an expert learns by heart (ADR 0053).
    min_images: PositiveNumber = 300


class SizePolicy(SizeLimits, strict=False):
    """The largest sizes that a plan's numbers may imply, see `ddm.protocol.policy.SizeLimits`."""


class AuditPolicy(AuditLimits, strict=False):
    """The leak audit of this site.

    Attributes:
        waiver: the waiver of an inconclusive audit; `silo waive` writes it.
        max_holdout_units: the largest number of units held out.
        num_samples: the largest number of samples drawn of each expert, to look for copies.
    """

    waiver: Waiver | None = None
    max_holdout_units: Annotated[int, Field(ge=2, le=10**6)] = 1000
    num_samples: Annotated[int, Field(ge=1, le=10**6)] = 10_000


class ApprovalPolicy(Settings):
    """Whether a person approves each submission, or this policy does; and what may be done with it afterwards.

    Attributes:
        kind: who approves.
        carry_over: whether later plans of the same federation and licence may carry the submission over.
        serve_as_base: whether later plans of the same federation may start training from the experts.
        licences: under which releases may be published; with none, any licence.
    """

    kind: Literal["person", "policy"] = "person"
    # A late silo then costs this site neither training nor epsilon; each submission states it (docs/adr/0081).
    carry_over: bool = True
    serve_as_base: bool = False
    licences: Licences = ()


class Policy(Settings):
    """policy.toml: what this site allows a plan to require."""

    privacy: PrivacyPolicy = PrivacyPolicy()
    plans: PlansPolicy = PlansPolicy()
    data: DataPolicy = DataPolicy()
    training: TrainingPolicy = TrainingPolicy()
    sizes: SizePolicy = SizePolicy()
    audit: AuditPolicy = AuditPolicy()
    approval: ApprovalPolicy = ApprovalPolicy()

    @property
    def min_images(self) -> int:
        """How many images there are at least, as the site declares."""
        return self.data.min_images or self.training.min_images

    def public_limits(self, batch_parts: int) -> PolicyLimits:
        """Return what the site's card states: without its budget, its declared data and its waivers.

        Args:
            batch_parts: the number of parts into which this machine divides a batch.
        """
        return PolicyLimits(
            privacy=_narrowed(PrivacyLimits, self.privacy),
            training=_narrowed(TrainingLimits, self.training),
            sizes=_narrowed(SizeLimits, self.sizes),
            audit=_narrowed(AuditLimits, self.audit),
            licences=self.approval.licences,
            batch_parts=batch_parts,
        )


LimitsT = TypeVar("LimitsT", bound=Model)


def _narrowed(limits: type[LimitsT], policy: LimitsT) -> LimitsT:
    """Return a part of a policy without the fields that only the site needs to know."""
    return limits(**policy.model_dump(include=set(limits.model_fields)))


Isolation = Literal["none", "users", "containers"]


@dataclass(frozen=True)
class Site:
    """One silo's folder. The worker works in `private`, the courier in `courier`; they share inbox and outbox."""

    path: Path

    @property
    def private(self) -> Path:
        """Keys, ledger, state, checkpoints, trust: the worker's alone."""
        return self.path / "private"

    def work_folder(self, plan_id: str) -> Path:
        """Return the folder for the work on a plan; it exists from acceptance on, also after the work is done."""
        return self.private / "checkpoints" / plan_id

    @property
    def courier(self) -> Path:
        """Node key, certificate of the federation, Flower's own files: the courier's alone."""
        return self.path / "courier"

    @property
    def inbox(self) -> Path:
        """Files that the courier received. The worker treats them as hostile."""
        return self.path / "inbox"

    @property
    def outbox(self) -> Path:
        """Approved submissions, the only files of the worker that the courier reads."""
        return self.path / "outbox"

    @property
    def key_path(self) -> Path:
        """The silo's signing key, encrypted."""
        return self.private / "silo.key"

    @property
    def card_path(self) -> Path:
        """A copy of the last enrolment card, which states the size that plans must agree with."""
        return self.private / "card.json"

    @property
    def root_path(self) -> Path:
        """The pinned root of trust."""
        return self.private / "trust" / "1.root.json"

    @property
    def root_digest(self) -> str:
        """The digest of the pinned root, which names this site's federation in everything that the site signs.

        Raises:
            MissingFileError: the file is gone.
        """
        remedy = "Restore private/trust/ from backup."
        return sha256_file(require_file(self.root_path, "the pinned root", remedy))

    def check_federation(self, document: FederationDocument, subject: str) -> None:
        """Refuse a document of another federation than the one that this site joined.

        Raises:
            FederationError: it names another root than the pinned one.
        """
        remedy = (
            "Do not accept such a plan. Ask the aggregator for one of the federation that this site "
            "joined; if private/trust/ was changed here, restore it from backup (`silo check SITE` "
            "compares it)."
        )
        document.check_federation(self.root_digest, subject, remedy)

    @property
    def ledger_folder(self) -> Path:
        """The folder of ledger, draws and salt: `private`, or the one that silo.toml names."""
        return self.ledger_folder_in(self.settings())

    def ledger_folder_in(self, settings: SiloSettings) -> Path:
        """Return the same by settings that are perhaps not written yet."""
        if settings.ledger.folder is None:
            return self.private
        return self.path / settings.ledger.folder

    def anchor_path_in(self, settings: SiloSettings) -> Path | None:
        """Return the file on another disk that keeps the ledger's head, if the settings name one."""
        if settings.ledger.anchor is None:
            return None
        return self.path / settings.ledger.anchor

    @property
    def salt_path(self) -> Path:
        """The secret that keys dataset digests."""
        return self.ledger_folder / "dataset.salt"

    def agreed(self) -> AgreedSize | None:
        """Read the size that this site's last card states; None before the first card was made."""
        if not self.card_path.exists():
            return None
        return self.card().agreed

    def card(self) -> Card:
        """Read the copy of this site's last card.

        Raises:
            MissingFileError: no card was made yet.
        """
        require_file(
            self.card_path, "this site's last card", "Make one: `silo enroll SITE --out card.json`."
        )
        data = read_bounded(self.card_path, MAX_CARD_BYTES)
        return Card.parse(data, subject="private/card.json", limit=MAX_CARD_BYTES)

    def salt(self) -> bytes:
        """Read the secret of `salt_path`.

        Raises:
            MissingFileError: the file is gone.
        """
        remedy = "Restore dataset.salt from backup; without it, every data set counts as a new one."
        return require_file(self.salt_path, "the salt beside the ledger", remedy).read_bytes()

    @property
    def ledger_path(self) -> Path:
        """The privacy ledger of this site's data holder."""
        return self.ledger_folder / LEDGER

    @property
    def isolation(self) -> Isolation:
        """What keeps the courier from the data, as this process sees it.

        `containers` in a container that does not show the courier's folder; `users` where that folder belongs to
        another user than the private one; else `none`.
        """
        if self.in_container():
            return "containers"
        # Permissions divide users: one user may open the folders of both programs.
        if self.courier.stat().st_uid == self.private.stat().st_uid:
            return "none"
        return "users"

    def in_container(self) -> bool:
        """Whether this process is in a container that shows the worker's half of the site alone."""
        return not self.courier.exists() and bool(os.environ.get(_CONTAINER_VARIABLE))

    def hides_courier(self) -> bool:
        """Whether this process, the worker's, is kept from the courier's folder, as it should be."""
        if self.in_container():
            return True
        # Without the right to search it, no file in a folder can be opened (path_resolution(7)).
        return self.courier.is_dir() and not os.access(self.courier, os.X_OK)

    def settings(self) -> SiloSettings:
        """Read silo.toml."""
        return load_settings(SiloSettings, self.path / "silo.toml")

    def policy(self) -> Policy:
        """Read policy.toml."""
        return load_settings(Policy, self.path / "policy.toml")

    def require(self) -> "Site":
        """Return the site if it was made by `silo init`.

        Raises:
            MissingFileError: the folder holds no silo.toml.
        """
        if not (self.path / "silo.toml").is_file():
            got = "a folder without it" if self.path.is_dir() else "nothing there"
            raise MissingFileError(
                str(self.path),
                expected="a site folder with silo.toml",
                got=got,
                remedy="Name the folder of a site, or make one: `silo join SITE --help`.",
            )
        return self

    def require_owner(self) -> "Site":
        """Return the site, for a command that writes in `private`, if this folder is this user's.

        The worker runs as this user, and stops at a file of root's that it cannot read: a log, a state, a lock.

        Raises:
            MissingFileError: see `require`.
            SetupError: the folder is another user's; the command is root's, and the worker has a user of its own.
        """
        site = self.require()
        # In a container the site's own folder may be made by the container; this one is always the worker's.
        if self.private.is_dir():
            require_owner(self.private, "silo")
        return site

    def require_own_path(self) -> None:
        """Refuse a site whose files another user could exchange.

        silo.toml names the command that starts a training and the file of the passphrase, and policy.toml says what may
        leave. Anybody who can rename a folder above the site can put another site in its place, with links to the keys
        of this one.

        Raises:
            UnsafePathError: another user could put something into the site's folder, or another one in its place.
        """
        require_own_path(self.path)

    def make_folders(self) -> None:
        """Create the site's folders: `private` and `courier` for their owner alone, the others for a group to read.

        Raises:
            UnsafePathError: see `require_own_path`.
        """
        # An operator may have made the folder, with a group of its own choice for the courier: that group stays.
        if self.path.exists():
            close_to_others(self.path)
        else:
            group_folder(self.path)
        self.require_own_path()
        for folder in (self.inbox, self.outbox):
            group_folder(folder)
        for folder in (self.private, self.courier, self.private / "trust"):
            private_folder(folder)
