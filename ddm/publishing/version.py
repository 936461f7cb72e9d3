"""Signs one version of a release: enters it in the log, signs its files, and opens it as a researcher would."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ddm.errors import SetupError
from ddm.io.changes import Change
from ddm.io.copying import copy_documents
from ddm.io.files import write_atomic
from ddm.loading.ensemble import build_ensemble
from ddm.loading.log import entry_of
from ddm.loading.release import open_release
from ddm.protocol.base import File, sha256_file, sha256_hex
from ddm.protocol.manifest import Manifest
from ddm.publishing.home import Home
from ddm.publishing.journal import sizes_given_out, stage
from ddm.publishing.keys import load_key, load_model_signing_key
from ddm.trust.drafts import log_key_of
from ddm.trust.model_signature import MODEL_SIGNATURE_NAME, sign_model
from ddm.trust.paths import LOG_NAMES, PLAN_LOG_NAMES, RELEASE, RELEASE_NAMES, owner
from ddm.trust.repository import Repository

_MEMORY_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class Version:
    """A version that is complete but for its manifest and signatures.

    Attributes:
        home: whose keys sign.
        change: puts the version and its signatures into force together.
        release: the folder of the version, inside the change.
        manifest: the manifest.
        roles: each silo's signed metadata, published unchanged.
    """

    home: Home
    change: Change
    release: Path
    manifest: Manifest
    roles: Mapping[str, bytes]

    @property
    def targets(self) -> Path:
        """The folder of the version's files."""
        return self.release / "targets" / self.manifest.plan_id


def sign_version(version: Version, passphrase: bytes, now: datetime) -> None:
    """Write the manifest, sign everything, open the release, and put it into force.

    Raises:
        PassphraseError: wrong passphrase.
        SetupError: the root names no log, or the log on disk is damaged.
        TrustError, FormatError: what a researcher would meet; nothing was published.
    """
    home, targets, manifest = version.home, version.targets, version.manifest
    write_atomic(targets / "manifest.json", manifest.encode())
    written = _write_down(version, passphrase)
    key = load_model_signing_key(home, passphrase)
    digests = {**_digests(manifest), **written, **_plan_proofs(targets)}
    write_atomic(targets / MODEL_SIGNATURE_NAME, sign_model(manifest.plan_id, digests, key))
    _sign(version, passphrase, now)
    _check_that_it_loads(version.release, (home.tuf / "1.root.json").read_bytes())
    version.change.commit()


def memory_for(manifest: Manifest) -> int:
    """Return the bytes of memory that a release's experts may take here: enough for two, or for all small ones."""
    return max(_MEMORY_BYTES, 2 * max(expert.file.bytes for expert in manifest.experts))


def _write_down(version: Version, passphrase: bytes) -> Mapping[str, str]:
    """Enter the manifest in the log, which grows with this change, and write the proofs; return their digests."""
    home, manifest = version.home, version.manifest
    log_key = log_key_of(Repository(home.tuf).root())
    if log_key is None:
        raise SetupError(
            "root", expected="the key of the federation's log, log_key", got="a root without it"
        )
    entry = entry_of(manifest, manifest.digest)
    journal = stage(home, version.change, log_key, load_key(home, "log", passphrase), [entry])
    proofs = dict(zip(LOG_NAMES, journal.prove(entry, sizes_given_out(home)), strict=True))
    for name, data in proofs.items():
        write_atomic(version.targets / name, data)
    return {name: sha256_hex(data) for name, data in proofs.items()}


def _plan_proofs(targets: Path) -> Mapping[str, str]:
    """Return the digests of the plan's own proofs, which its role signs."""
    return {
        name: sha256_file(targets / name) for name in PLAN_LOG_NAMES if (targets / name).is_file()
    }


def _digests(manifest: Manifest) -> Mapping[str, str]:
    """Return the digest of every file that `model.sig` covers, all in the plan's folder, from their documents."""
    own = {silo.silo_id for silo in manifest.silos if silo.standing != "carried"}
    listed = [*manifest.files, manifest.router.file]
    listed += [silo.submission for silo in manifest.silos if silo.silo_id in own]
    listed += [expert.file for expert in manifest.experts if expert.silo_id in own]
    return {"manifest.json": manifest.digest, **{file.path: file.digest for file in listed}}


def _sign(version: Version, passphrase: bytes, now: datetime) -> None:
    """Sign a copy of the metadata, and export the part that readers need into the release."""
    home, targets, plan_id = version.home, version.targets, version.manifest.plan_id
    names = {*RELEASE_NAMES, *(file.path for file in version.manifest.files)}
    own = sorted(name for name in names if owner(f"{plan_id}/{name}", plan_id) == RELEASE)
    described = {name: File.of(name, targets / name) for name in own if (targets / name).is_file()}
    metadata = version.change.put("tuf/metadata")
    copy_documents(home.tuf, metadata)
    repository = Repository(metadata)
    repository.publish(
        plan_id,
        version.roles,
        {f"{plan_id}/{name}": (file.bytes, file.digest) for name, file in described.items()},
        release_key=load_key(home, "release", passphrase),
        online_key=load_key(home, "online", passphrase),
        now=now,
    )
    repository.export_release(version.release)


def _check_that_it_loads(release: Path, root: bytes) -> None:
    """Open the release as researchers do, one expert after the other; what they would refuse is not published."""
    opened = open_release(release, root=root, state=None, experts_later=True)
    plan, manifest = opened.plan, opened.manifest
    experts = build_ensemble(
        plan, manifest, opened.folder, memory_bytes=memory_for(manifest)
    ).experts
    for k in range(len(experts)):
        experts[k]
