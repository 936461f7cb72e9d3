"""Opens a release on a host: its metadata are verified before any other file is fetched.

`open_hosted` downloads and verifies the metadata, compares their versions with those seen before, fetches all files but
the experts, and lays them out in the cache as a release. `ddm.loading.release.open_release` then verifies that folder
as it does any other.
"""

import tempfile
from importlib.util import find_spec
from pathlib import Path

from ddm.errors import SetupError
from ddm.fetching.address import Address, HubAddress, read_address
from ddm.fetching.cache import FileCache
from ddm.fetching.download import read_file
from ddm.fetching.hosted import FetchOptions, HostedRelease, OnProgress, no_progress
from ddm.fetching.hosts import FetchLimits, FolderHost, Host
from ddm.fetching.web import WebHost
from ddm.protocol.base import sha256_hex
from ddm.trust.updater import download_metadata
from ddm.trust.verify import verify_release_metadata


def open_hosted(
    source: Address | Path,
    root: bytes,
    options: FetchOptions,
    on_progress: OnProgress = no_progress,
) -> HostedRelease:
    """Verify the metadata of the release that is current at a host, and fetch all its files but the experts.

    Args:
        source: an address; or a folder with a release among other files.
        root: the content of 1.root.json, known out of band.
        options: how it is fetched.
        on_progress: see `OnProgress`.

    Raises:
        RootError: the release has another root.
        RollbackError: it is older than one that was seen before.
        TrustError, FormatError: something that the host sent is not what was signed.
        TransportError: the host does not answer, or leads elsewhere.
        SetupError: the Hub is named and its package is not installed, or the cache cannot be used.
    """
    host = host_of(source, options.limits)
    cache = FileCache(options.cache, sha256_hex(root))
    with tempfile.TemporaryDirectory(dir=cache.folder / "partial") as scratch:
        metadata_files = download_metadata(
            lambda path, max_bytes: read_file(host, path, max_bytes, options.limits),
            root,
            Path(scratch),
            archived=options.archived,
        )
    metadata = verify_release_metadata(
        metadata_files, root, state=options.state, archived=options.archived
    )
    # The timestamp's digest stands for all: it names the snapshot, which names every other file.
    folder = cache.folder / "releases" / sha256_hex(metadata_files["timestamp.json"])
    for name, data in metadata_files.items():
        cache.place(data, folder / "metadata" / name)
    hosted = HostedRelease(host, cache, folder, metadata.targets, options.limits)
    hosted.fetch_documents(on_progress)
    return hosted


def host_of(source: Address | Path, limits: FetchLimits) -> Host:
    """Return the host of a source.

    Raises:
        SetupError: the Hub is named and its package is not installed.
    """
    if isinstance(source, Path):
        return FolderHost(source)
    if isinstance(source, HubAddress):
        require_hub_package()
        # An import at the top would fail where the package is not installed.
        from ddm.fetching.hub import HubHost

        return HubHost(source, limits)
    return WebHost(source.url, limits)


def require_hub_package() -> None:
    """Refuse to continue without the package through which the Hub is reached.

    Raises:
        SetupError: it is not installed.
    """
    if find_spec("huggingface_hub") is None:
        raise SetupError(
            "hf://",
            expected="the package huggingface_hub",
            got="no such package in this environment",
            remedy="Install it: in Archipelago's repository, pip install '.[hub]'.",
        )


def place_of(
    text: str, root: bytes, options: FetchOptions, on_progress: OnProgress = no_progress
) -> Path | HostedRelease:
    """Return the place that a person named: a folder of this machine as a path, an address as a release on a host.

    Raises:
        SetupError: an address of another kind; or see `open_hosted`, as for all others.
    """
    address = read_address(text)
    if address is None:
        return Path(text)
    return open_hosted(address, root, options, on_progress)


def require_hub_address(text: str) -> HubAddress:
    """Read the address of a repository of the Hub.

    Raises:
        SetupError: it is another one, or a folder.
    """
    address = read_address(text)
    if not isinstance(address, HubAddress):
        raise SetupError(
            ascii(text[:200]), expected="hf://OWNER/NAME[@BRANCH]", got="another address"
        )
    return address
