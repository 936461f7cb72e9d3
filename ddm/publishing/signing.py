"""Completes a version: writes its pages and its manifest, signs everything, and opens it as a researcher would."""

from collections.abc import Mapping
from pathlib import Path

import torch

from ddm.io.copying import copy_documents
from ddm.io.files import write_atomic
from ddm.loading.ensemble import build_ensemble
from ddm.loading.log import entry_of
from ddm.loading.release import open_release
from ddm.protocol.base import File, sha256_file, sha256_hex
from ddm.protocol.manifest import Manifest
from ddm.publishing.contents import ReleaseContents
from ddm.publishing.keys import load_key, load_model_signing_key
from ddm.publishing.log import require_log_key, sizes_given_out, stage_entries
from ddm.publishing.pages import PAGE_NAMES, memory_for, write_pages
from ddm.publishing.staging import StagedVersion
from ddm.system.progress import ProgressCallback
from ddm.trust.model_signature import MODEL_SIGNATURE_NAME, sign_model
from ddm.trust.paths import LOG_NAMES, PLAN_LOG_NAMES, RELEASE, RELEASE_NAMES, owner
from ddm.trust.repository import Repository


def complete_version(
    version: StagedVersion,
    contents: ReleaseContents,
    draft: Manifest,
    passphrase: bytes,
    *,
    device: torch.device | str = "cpu",
    on_progress: ProgressCallback | None = None,
) -> Manifest:
    """Write the pages, sign everything, check that the release opens, and put it into force; return the manifest.

    Args:
        version: its files are in place, except for pages, manifest and signatures.
        contents: what it states.
        draft: see `ddm.publishing.contents.draft_manifest`.
        passphrase: opens the publisher's keys.
        device: where images are drawn for the report.
        on_progress: called, while images are drawn, with the batches done and the batches in all.

    Raises:
        PassphraseError: wrong passphrase.
        SetupError: the root names no log, or the log on disk is damaged.
        TrustError, FormatError: a researcher could not open the release; nothing was published.
    """
    # The first root, which researchers have pinned: later ones are reached from it.
    root = (version.publisher.tuf / "1.root.json").read_bytes()
    targets = version.targets(draft.plan_id)
    write_pages(
        contents,
        draft,
        targets,
        root_digest=sha256_hex(root),
        device=device,
        on_progress=on_progress,
    )
    # The pages show the manifest's figures and the manifest lists the pages' digests, so that pages come first.
    manifest = _with_pages(draft, targets)
    write_atomic(targets / "manifest.json", manifest.encode())
    # The log proves the manifest, and `model.sig` covers that proof; both are listed by the TUF metadata.
    log_digests = _enter_in_log(version, manifest, passphrase)
    _sign_for_other_tools(version, manifest, log_digests, passphrase)
    sign_tuf_metadata(version, contents, manifest, passphrase)
    check_release_opens(version.folder, root)
    # Until here nothing is in force: a crash leaves the previous version as it was.
    version.change.commit()
    return manifest


def _with_pages(draft: Manifest, targets: Path) -> Manifest:
    """Return the manifest with the pages, which were made from it, among its files."""
    pages = [File.of(name, targets / name) for name in PAGE_NAMES]
    files = sorted([*draft.files, *pages], key=lambda file: file.path)
    return draft.model_copy(update={"files": tuple(files)})


def _enter_in_log(
    version: StagedVersion, manifest: Manifest, passphrase: bytes
) -> Mapping[str, str]:
    """Enter the manifest in the log, which grows with this change, and write the proofs; return their digests."""
    publisher = version.publisher
    log_key = require_log_key(publisher)
    key = load_key(publisher, "log", passphrase)
    entry = entry_of(manifest, manifest.digest)
    log = stage_entries(publisher, version.change, log_key, key, [entry])
    targets = version.targets(manifest.plan_id)
    proofs = log.prove(entry, sizes_given_out(publisher))
    digests = {}
    for name, proof in zip(LOG_NAMES, proofs, strict=True):
        write_atomic(targets / name, proof)
        digests[name] = sha256_hex(proof)
    return digests


def _sign_for_other_tools(
    version: StagedVersion,
    manifest: Manifest,
    log_digests: Mapping[str, str],
    passphrase: bytes,
) -> None:
    """Write `model.sig`, the OpenSSF model signature over all files in the plan's folder."""
    targets = version.targets(manifest.plan_id)
    # The plan's own proofs are not in the manifest: the role `plans` signs them.
    plan_proofs = {
        name: sha256_file(targets / name) for name in PLAN_LOG_NAMES if (targets / name).is_file()
    }
    digests = {**digests_to_sign(manifest), **log_digests, **plan_proofs}
    key = load_model_signing_key(version.publisher, passphrase)
    write_atomic(targets / MODEL_SIGNATURE_NAME, sign_model(manifest.plan_id, digests, key))


def digests_to_sign(manifest: Manifest) -> Mapping[str, str]:
    """Return the digest of the manifest and of every file in the plan's folder that it lists.

    The files of carried silos are in the folder of the plan for which they signed, beside this one.
    """
    own_silos = {silo.silo_id for silo in manifest.silos if silo.standing != "carried"}
    files = [*manifest.files, manifest.router.file]
    files += [silo.submission for silo in manifest.silos if silo.silo_id in own_silos]
    files += [expert.file for expert in manifest.experts if expert.silo_id in own_silos]
    return {"manifest.json": manifest.digest, **{file.path: file.digest for file in files}}


def sign_tuf_metadata(
    version: StagedVersion, contents: ReleaseContents, manifest: Manifest, passphrase: bytes
) -> None:
    """Sign a copy of the TUF metadata, and export the part that readers need into the release."""
    publisher = version.publisher
    plan_id = manifest.plan_id
    targets = version.targets(plan_id)
    release_files = {}
    for name in {*RELEASE_NAMES, *(file.path for file in manifest.files)}:
        path = f"{plan_id}/{name}"
        # The role `plans` and the silos' roles have signed the other files already.
        if owner(path, plan_id) == RELEASE and (targets / name).is_file():
            file = File.of(name, targets / name)
            release_files[path] = (file.bytes, file.digest)

    # A copy is signed; the metadata in force are replaced together with the release.
    metadata = version.change.put("tuf/metadata")
    copy_documents(publisher.tuf, metadata)
    repository = Repository(metadata)
    repository.publish(
        plan_id,
        {member.silo_id: member.role for member in contents.members},
        release_files,
        release_key=load_key(publisher, "release", passphrase),
        online_key=load_key(publisher, "online", passphrase),
        now=version.created_at,
    )
    repository.export_release(version.folder)


def check_release_opens(release: Path, root: bytes) -> None:
    """Open the release as researchers do, one expert after the other; what they would refuse is not published."""
    # Without a state: a version that is not in force yet must not be remembered as seen.
    opened = open_release(release, root=root, state=None, experts_later=True)
    memory_bytes = memory_for(opened.manifest)
    ensemble = build_ensemble(
        opened.plan, opened.manifest, opened.folder, memory_bytes=memory_bytes
    )
    for number in range(len(ensemble.experts)):
        # Loading an expert checks its digest and its tensors.
        ensemble.experts[number]
