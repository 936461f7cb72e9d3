"""The federation for which a document was signed, named by the digest of its first root of trust.

A silo's signature says who signed, and not for whom. Anybody who has a public release can publish it again under a root
of trust of their own, with everything that its silos signed moved over unchanged; it would be the ensemble of a
federation that these silos never joined. Therefore everything that a silo signs names its federation, itself or by the
digest of a document that does, and anybody who reads it compares the name with the root that it pinned (docs/adr/0075).

The first root, `1.root.json`, is the one that people compare. It stays the same when the keys of the root are rotated.
"""

from ddm.errors import FederationError
from ddm.protocol.base import Digest, Document


class FederationDocument(Document):
    """A document of one federation.

    Attributes:
        root_digest: sha256 of the federation's first root, `1.root.json`.
    """

    root_digest: Digest

    def check_federation(self, root_digest: str, subject: str, remedy: str | None = None) -> None:
        """Refuse the document unless it is of the federation with this root; see `check_federation`."""
        check_federation(self.root_digest, root_digest, subject, remedy)


def check_federation(
    named: str | None, root_digest: str, subject: str, remedy: str | None = None
) -> None:
    """Refuse what was signed for another federation, or for none.

    Args:
        named: the federation that was signed: the digest of its first root; None where nothing was.
        root_digest: sha256 of the first root of the federation that this reader trusts, or is.
        subject: what to call the signed document.
        remedy: what to do; that of `FederationError` when None.

    Raises:
        FederationError: they differ.
    """
    if named == root_digest:
        return
    got = "no federation named"
    if named is not None:
        got = f"one for root {named[:16]}..."
    raise FederationError(
        subject,
        expected=f"a signature for the federation with root {root_digest[:16]}...",
        got=got,
        remedy=remedy,
    )
