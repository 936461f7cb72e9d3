"""A federation: its folders, federation.toml, the current plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from ddm.errors import DigestError, MissingFileError, SetupError
from ddm.io.changes import is_unfinished
from ddm.io.files import read_bounded
from ddm.io.own_folder import require_owner
from ddm.io.settings import Settings, load_settings
from ddm.protocol.address import HostName
from ddm.protocol.base import (
    MAX_DOCUMENT_BYTES,
    Digest,
    Document,
    Licence,
    PlanId,
    ShortText,
    check_json,
    sha256_hex,
)
from ddm.protocol.plan import Plan
from ddm.publishing.folder import MAX_TUF_BYTES, PublisherFolder
from ddm.trust.paths import PLANS, split_silo_role

PUBLIC_NAME = "public.npz"  # a plan's public hold-out
SETTINGS_HEADING = (
    "This federation: its name, the address that silos reach, the size of a transfer's shards."
)
BUSY_PORT_REMEDY = (
    "Stop the program that listens there. Silos know this port from their invitation: for another one, "
    "`aggregator invite FED --address HOST:PORT`, then give every silo the new invitation."
)
KEY_NAMES = ("root", "targets", "plans", "release", "online", "receipts", "log")


class WitnessSettings(Settings):
    """A witness of the federation's log, whom commands that publish ask to cosign.

    Attributes:
        url: the prefix to which `/add-checkpoint` is appended.
        key: its verifier key, `NAME+HASH+KEY`, as the witness publishes it.
    """

    url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s?#]{1,400}$")]
    key: Annotated[
        str, StringConstraints(pattern=r"^[^\s+]{1,255}\+[0-9a-f]{8}\+[A-Za-z0-9+/=]{1,100}$")
    ]


class FederationSettings(Settings):
    """federation.toml: the federation's name, public address, transfer sizes and terms of publication."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,40}$")]
    host: HostName
    port: Annotated[int, Field(gt=0, lt=65536)]
    # Of the releases. Every plan states it, so that silos agree to it before they train.
    licence: Licence
    # A larger shard takes more memory in every process on its way (`aggregator.monitoring.probes` has the figures).
    shard_bytes: Annotated[int, Field(ge=65536, le=128 * 1024**2)] = 64 * 1024**2
    max_bytes_per_s: Annotated[int, Field(ge=65536)] | None = None
    max_silo_bytes_per_s: Annotated[int, Field(ge=65536)] | None = None
    passphrase_file: str | None = None
    # A silo with a larger share of the prior waits in quarantine for a person (`aggregator.intake.claims`).
    max_influence: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    quorum: Annotated[int, Field(gt=0, le=10_000)] = 1
    witnesses: Annotated[tuple[WitnessSettings, ...], Field(max_length=16)] = ()
    cite: ShortText = "McAllister et al., Decentralized Diffusion Models, CVPR 2025"


class CurrentPlan(Document):
    """The plan on which the federation works now."""

    plan_id: PlanId
    plan_digest: Digest


@dataclass(frozen=True)
class Federation(PublisherFolder):
    """The operator's folder."""

    @property
    def registry(self) -> Path:
        """Enrolment cards, and the last known state of each silo's ledger."""
        return self.path / "registry"

    @property
    def incoming(self) -> Path:
        """Files from silos, written by the ServerApp; hostile until intake has verified them."""
        return self.path / "incoming"

    @property
    def accepted(self) -> Path:
        """Submissions that passed intake."""
        return self.path / "accepted"

    @property
    def withdrawn(self) -> Path:
        """Accepted submissions of silos that were withdrawn later, with the reason."""
        return self.path / "withdrawn"

    @property
    def screening(self) -> Path:
        """Measurements of submitted experts on public images."""
        return self.path / "screening"

    @property
    def attempts(self) -> Path:
        """How often intake has started on each submission that it has not answered yet."""
        return self.path / "attempts"

    @property
    def quarantine(self) -> Path:
        """Submissions that wait for a person's decision."""
        return self.path / "quarantine"

    @property
    def decisions(self) -> Path:
        """The record of submissions admitted from quarantine or refused, and why."""
        return self.path / "decisions.jsonl"

    @property
    def receipts(self) -> Path:
        """Signed receipts and refusals; the ServerApp reads and delivers them."""
        return self.path / "receipts"

    def accepted_folder(self, plan: Plan, silo_id: str) -> Path:
        """The folder of a silo's accepted submission, also of one that the plan carries over from an earlier one."""
        return self.accepted / plan.origin(silo_id) / silo_id

    def plan_folder(self, plan_id: str) -> Path:
        """The folder of a plan's bundle, public hold-out and router."""
        return self.path / "plans" / plan_id

    def bundle(self, plan_id: str) -> Path:
        """The files sent to every silo."""
        return self.plan_folder(plan_id) / "bundle"

    def plan_targets(self, plan_id: str) -> Path:
        """The folder that holds `plan.json` and `plan/`."""
        return self.bundle(plan_id) / "targets" / plan_id

    def settings(self) -> FederationSettings:
        """Read federation.toml."""
        return load_settings(FederationSettings, self.path / "federation.toml")

    def require(self) -> "Federation":
        """Return the federation if it was made by `aggregator init`.

        Raises:
            MissingFileError: the folder holds no federation.toml.
        """
        if not (self.path / "federation.toml").is_file():
            got = "a folder without it" if self.path.is_dir() else "nothing there"
            raise MissingFileError(
                str(self.path),
                expected="a federation folder with federation.toml",
                got=got,
                remedy=(
                    "Name the folder of a federation, or make one: `aggregator init FED --name NAME "
                    "--licence TEXT --address HOST:PORT`."
                ),
            )
        if is_unfinished(self.path):
            # Taking the lock finishes a change that was committed before an interruption.
            with self.signing_lock():
                pass
        return self

    def require_owner(self) -> "Federation":
        """Return the federation, for a command that writes, if its folder is this user's.

        Raises:
            SetupError: the folder is another user's; the command is root's, and the service has a user of its own.
            MissingFileError: see `require`.
        """
        # Before `require`, which may write.
        if self.path.is_dir():
            require_owner(self.path, "aggregator")
        return self.require()

    def current_plan(self) -> tuple[Plan, str]:
        """Read the current plan and its digest.

        Raises:
            MissingFileError: no plan was signed yet.
            SetupError: its silos were all removed, or the signing of another plan was interrupted.
            DigestError: the plan's file has changed.
        """
        path = self.path / "plans" / "current.json"
        if not path.is_file():
            raise MissingFileError(
                "plan",
                expected="a signed plan",
                got="no plans/current.json",
                remedy="Sign one: `aggregator plan FED --recipe FILE --public FILE`.",
            )
        current = CurrentPlan.parse(path.read_bytes(), subject=path.name)
        # Both files come into force with one change. Where they differ, silos were removed, or one file was put back.
        delegated_plan = self.delegated_plan() if self.delegations() else None
        if delegated_plan != current.plan_id:
            raise SetupError(
                "delegations in targets.json",
                expected=f"delegations to the silos of plan {current.plan_id}",
                got=f"delegations for {delegated_plan or 'no silo'}",
                remedy=(
                    "Silos were removed, or signing a plan was interrupted. Sign a new plan: `aggregator "
                    "plan FED --recipe FILE --public FILE`."
                ),
            )
        data = read_bounded(self.plan_targets(current.plan_id) / "plan.json", MAX_DOCUMENT_BYTES)
        digest = sha256_hex(data)
        if digest != current.plan_digest:
            raise DigestError(
                "plan.json",
                expected=f"the signed bytes, sha256 {current.plan_digest}",
                got=f"sha256 {digest}",
                remedy="Restore plans/ from backup, or sign a new plan.",
            )
        return Plan.parse(data, subject="plan.json"), current.plan_digest

    def delegated_plan(self) -> str:
        """Read the plan whose files the newest `targets` delegates to the role `plans`; empty before the first one."""
        return self._targets().plan_id

    def delegations(self) -> Mapping[str, str]:
        """Read the key to which the newest `targets` delegates each silo's role."""
        return self._targets().key_of_role

    def _targets(self) -> "_DelegatedRoles":
        return _parse_delegations(read_bounded(self.tuf / "targets.json", MAX_TUF_BYTES))


@dataclass(frozen=True)
class _DelegatedRoles:
    """What `targets` delegates: the plan whose files `plans` may list, and the key of each silo's role."""

    plan_id: str
    key_of_role: Mapping[str, str]


# The file is read again each time and parsed when it has changed: intake asks once for each submission, and to parse
# the delegations to a thousand silos takes longer than to verify one of them.
@lru_cache(maxsize=1)
def _parse_delegations(data: bytes) -> _DelegatedRoles:
    targets = check_json(data, subject="targets.json", limit=MAX_TUF_BYTES)
    delegations = targets["signed"]["delegations"]
    plan_id = ""
    key_of_role = {}
    for role in delegations["roles"]:
        name = str(role["name"])
        if name == PLANS and role["paths"]:
            # Targets are called PLAN_ID/NAME, so that the first part of any path is the plan.
            plan_id = str(role["paths"][0]).split("/")[0]
        if split_silo_role(name):
            # A silo's role has one key.
            key = delegations["keys"][role["keyids"][0]]
            key_of_role[name] = f"ed25519:{key['keyval']['public']}"
    return _DelegatedRoles(plan_id, key_of_role)
