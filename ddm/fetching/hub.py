"""The door of huggingface_hub: where the Hub is, who the reader is, and how a release gets there.

Files come through `ddm.fetching.web`, within its bounds, and not through the package's own downloads, which believe the
lengths that the Hub states. The package says which address a file has and what identifies the reader.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from httpx import HTTPError
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, hf_hub_url
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
)

from ddm.errors import SetupError, TransportError
from ddm.fetching.address import HubAddress, is_loopback, url_problem
from ddm.fetching.hosts import FetchLimits, SentFile
from ddm.fetching.web import WebRequest, is_same_origin, open_url
from ddm.system.version import DISTRIBUTION

CARD_NAME = "README.md"
# What the Hub itself puts into a repository, and needs there.
_HUB_FILES = (".gitattributes",)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def _check_endpoint() -> None:
    problem = url_problem(constants.ENDPOINT)
    if problem is not None:
        raise SetupError(
            "HF_ENDPOINT",
            expected="https://HOST",
            got=problem,
            remedy="Set HF_ENDPOINT to the Hub's address, or leave it out for https://huggingface.co.",
        )


class HubHost:
    """A release in a repository of the Hub.

    The first answer names the commit that the revision stands for, and everything after it is asked of that commit: a
    push meanwhile must not mix two versions.
    """

    def __init__(self, address: HubAddress, limits: FetchLimits) -> None:
        _check_endpoint()
        self._address = address
        self._limits = limits
        self._revision = address.revision
        self._is_pinned = False

    def __str__(self) -> str:
        return str(self._address)

    @contextmanager
    def open(self, path: str, start: int) -> Iterator[SentFile]:
        """See `ddm.fetching.hosts.Host`."""
        url = hf_hub_url(self._address.repository, path, revision=self._revision)
        headers = build_hf_headers(library_name=DISTRIBUTION)
        request = WebRequest(url, start, headers, _may_redirect, self._pin_commit)
        with open_url(request, self._limits) as sent:
            yield sent

    def _pin_commit(self, headers: Mapping[str, str]) -> None:
        commit = headers.get("x-repo-commit", "")
        if not self._is_pinned and _COMMIT.fullmatch(commit):
            self._revision = commit
            self._is_pinned = True


def _may_redirect(first_url: str, next_url: str) -> bool:
    """Large files are at other hosts than the Hub's, whose names change; bytes are compared with what is signed."""
    if is_same_origin(first_url, next_url):
        return True
    # Nothing on the internet may lead a reader to a service of its own machine.
    return is_loopback(urlsplit(first_url)) or not is_loopback(urlsplit(next_url))


@dataclass(frozen=True)
class PushedRelease:
    """A release that was pushed.

    Attributes:
        commit: the commit that holds it.
        num_files: how many files it has there, the card included.
        num_removed: how many files of an earlier version were removed.
    """

    commit: str
    num_files: int
    num_removed: int


def push_release(
    folder: Path, names: Sequence[str], card: str, address: HubAddress, *, is_private: bool
) -> PushedRelease:
    """Put a verified release into a repository of the Hub, in one commit; readers see the old version or this one.

    Args:
        folder: the release.
        names: its signed files and its metadata, by their paths in the folder; nothing else is pushed.
        card: the text of the card at the repository's root.
        address: the repository, which is made where it is missing, and its branch.
        is_private: whether a repository that is made is private.

    Raises:
        TransportError: the Hub refuses, or does not answer.
        SetupError: HF_ENDPOINT leads to no address that may be used.
    """
    _check_endpoint()
    api = HfApi(library_name=DISTRIBUTION)
    repository = address.repository
    try:
        api.create_repo(repository, private=is_private, exist_ok=True)
        names_there = set(api.list_repo_files(repository, revision=address.revision))
        # A file of an earlier version, such as an expert that was withdrawn, must not stay beside the new ones.
        stale_names = sorted(names_there - {CARD_NAME, *_HUB_FILES, *names})
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(CARD_NAME, card.encode("utf-8"))
        ]
        for name in names:
            operations.append(CommitOperationAdd(name, str(folder / name)))
        for name in stale_names:
            operations.append(CommitOperationDelete(name))
        commit = api.create_commit(
            repository,
            operations,
            commit_message="Publish a signed release",
            revision=address.revision,
        )
    # What the package raises where an upload breaks off is not documented.
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise _refused(address, error) from error
    return PushedRelease(commit.oid, len(names) + 1, len(stale_names))


def _refused(address: HubAddress, error: Exception) -> TransportError:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    got = f"{type(error).__name__}: {ascii(str(error))[1:-1][:200]}"
    if status is not None:
        got = f"HTTP status {status}"
    return TransportError(
        str(address),
        expected="a Hub that takes the release",
        got=got,
        remedy="Log in as somebody who may write there (`hf auth login`, or HF_TOKEN), then run the same command "
        "again: files that arrived are not sent twice.",
    )
