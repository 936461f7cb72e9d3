"""One budget for a data holder: any number of its sites name one ledger, and the strictest of their policies counts.

A holder that takes part in several federations, or whose images several sites share, makes a folder for the ledger and
names it in every site's silo.toml. Ledger, draws and the secret that keys dataset digests then lie there: the same
images are the same data set at every site, and what one site spends none can spend again. Each site works on one plan
at a time; the ledger serves one process at a time.
"""

import secrets
from errno import ENOENT
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ddm.errors import LedgerError
from ddm.io.files import read_bounded, require_file, write_atomic
from ddm.io.locks import lock_file
from ddm.io.modes import private_folder
from ddm.protocol.base import Digest, Document, LocalText, Model, SiloId, Unit
from ddm.protocol.statistics import Budget
from silo.config import LEDGER, Policy, SiloSettings, Site
from silo.privacy.anchor import Anchor, Guard, sent_chains, unwritable
from silo.privacy.ledger import Ledger, make_ledger

_SITES = "ledger.sites"
_MAX_BYTES = 1 << 20
MADE_BY_INIT = (
    "Restore it from backup. A new ledger would forget what was spent, and the aggregator "
    "refuses it."
)


class SiteStatement(Model):
    """What one site says about the ledger that it names.

    Attributes:
        silo_id: its name.
        root_digest: the digest of the first root of its federation.
        budget: by its policy.
        unit: by its policy.
        anchor: by its silo.toml.
    """

    silo_id: SiloId
    root_digest: Digest
    budget: Budget
    unit: Unit
    anchor: LocalText | None = None

    @property
    def name(self) -> tuple[str, str]:
        """What identifies the site: two federations may have silos of one id."""
        return self.silo_id, self.root_digest


class Sites(Document):
    """Every site that ever named this ledger, with what it said last."""

    format: Literal["archipelago/ledger-sites/1"] = "archipelago/ledger-sites/1"
    sites: Annotated[tuple[SiteStatement, ...], Field(max_length=1024)] = ()

    def with_site(self, statement: SiteStatement) -> "Sites":
        """Return it with what one site says now in place of what it said."""
        others = [site for site in self.sites if site.name != statement.name]
        return Sites(sites=(*others, statement))

    @property
    def budget(self) -> Budget:
        """The least that any site states: raising it takes all of them."""
        return Budget(
            epsilon=min(site.budget.epsilon for site in self.sites),
            delta=min(site.budget.delta for site in self.sites),
        )

    @property
    def unit(self) -> Unit:
        """`patient` as soon as one site counts patients."""
        if any(site.unit == "patient" for site in self.sites):
            return "patient"
        return "image"

    @property
    def anchors(self) -> tuple[Path, ...]:
        """Every anchor that a site names, each once."""
        named = dict.fromkeys(site.anchor for site in self.sites)
        return tuple(Path(anchor) for anchor in named if anchor)


def prepare_ledger(folder: Path) -> None:
    """Make a ledger and its salt, or join those that are there; only `silo join` and `silo init` call this.

    Raises:
        LedgerError: part of them is there.
    """
    private_folder(folder)
    salt = folder / "dataset.salt"
    ledger = folder / LEDGER
    if not salt.exists():
        # With a new salt the same images would count as another data set, and be debited again.
        if ledger.exists():
            raise LedgerError(
                "ledger",
                expected="the salt beside the ledger",
                got="no dataset.salt",
                remedy="Restore dataset.salt from backup.",
            )
        # The salt comes before the ledger: a crash between the two leaves a salt alone, with which the next call goes
        # on.
        write_atomic(salt, secrets.token_bytes(32), mode=0o600)
    make_ledger(ledger)


def join_ledger(
    site: Site,
    settings: SiloSettings,
    *,
    anchor: Path | None = None,
) -> None:
    """Check the ledger that settings name before they are used: its records, and what it is compared with.

    Args:
        site: the silo's folder.
        settings: which need not be written yet.
        anchor: to make, where it is not there yet.

    Raises:
        LedgerError: it does not verify, or does not extend its anchor or what was sent.
    """
    path = site.ledger_folder_in(settings) / LEDGER
    anchors = _guard(site, settings, _read(path)).anchors
    # An anchor that is still to be made would count as missing.
    existing_anchors = tuple(existing for existing in anchors if existing != anchor)
    # This ledger spends nothing, so that its budget does not matter; by image, it reads either unit.
    ledger = Ledger(
        path,
        budget=Budget(epsilon=1.0, delta=0.0),
        unit="image",
        guard=Guard(existing_anchors, sent_chains(site.outbox)),
    )
    head_digest, num_entries, digests = ledger.head
    if anchor is None:
        return
    # A folder made here would be where the disk is not mounted.
    if not anchor.parent.is_dir():
        raise unwritable(anchor, FileNotFoundError(ENOENT, "no such folder"))
    if anchor.exists():
        # It may be behind this ledger, and is then brought up to it, but must not contradict it.
        Guard((anchor,)).hold(ledger.genesis, digests)
        return
    head = Anchor(num_entries=num_entries, head_digest=head_digest)
    try:
        write_atomic(anchor, head.encode(), mode=0o600)
    except OSError as error:
        raise unwritable(anchor, error) from error


def open_ledger(site: Site, policy: Policy) -> Ledger:
    """Open the ledger that a site names, under the strictest budget of all its sites; nothing is written.

    Raises:
        MissingFileError: there is none.
        LedgerError: the record of its sites, or a submission in the outbox, cannot be read.
    """
    settings = site.settings()
    path = site.ledger_path
    require_file(path, "this site's privacy ledger", MADE_BY_INIT)
    # This site's own statement as its policy is now, which may be stricter than the one that was written down.
    statement = _statement(site, settings, policy)
    sites = _read(path).with_site(statement)
    return Ledger(
        path,
        budget=sites.budget,
        unit=sites.unit,
        guard=_guard(site, settings, sites),
    )


def note_site(site: Site, policy: Policy) -> None:
    """Write down what this site's policy says, before it spends: it binds every site of the ledger."""
    path = require_file(site.ledger_path, "this site's privacy ledger", MADE_BY_INIT)
    # Sites of one holder write the same file: without the lock one statement could overwrite another.
    with lock_file(path.with_name(f"{_SITES}.lock")):
        sites = _read(path)
        statement = _statement(site, site.settings(), policy)
        updated = sites.with_site(statement)
        if updated != sites:
            write_atomic(path.with_name(_SITES), updated.encode(), mode=0o600)


def _guard(site: Site, settings: SiloSettings, sites: Sites) -> Guard:
    anchors = list(sites.anchors)
    own_anchor = site.anchor_path_in(settings)
    if own_anchor and own_anchor not in anchors:
        anchors.append(own_anchor)
    return Guard(tuple(anchors), sent_chains(site.outbox))


def _statement(site: Site, settings: SiloSettings, policy: Policy) -> SiteStatement:
    privacy = policy.privacy
    anchor = site.anchor_path_in(settings)
    anchor_text = None
    if anchor:
        anchor_text = str(anchor)
    return SiteStatement(
        silo_id=settings.silo_id,
        root_digest=settings.root_digest,
        budget=Budget(epsilon=privacy.budget_epsilon, delta=privacy.budget_delta),
        unit=privacy.unit,
        anchor=anchor_text,
    )


def _read(ledger: Path) -> Sites:
    path = ledger.with_name(_SITES)
    if not path.exists():
        return Sites()
    data = read_bounded(path, _MAX_BYTES)
    return Sites.parse(data, subject=_SITES)
