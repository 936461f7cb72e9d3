"""Every error Archipelago raises on purpose, with its exit code and what to do about it.

The tree is flat where it can be:

    ArchipelagoError                    1  (a bug if it ever surfaces bare)
    ├── SetupError                      3  configuration, folders, files the operator named
    │   ├── MissingFileError            4
    │   ├── PassphraseError             5
    │   ├── BusyError                   6  a port or a folder in use by another process
    │   ├── DataError                   7  images or a table that cannot be used
    │   └── DiskError                   9  a folder that cannot be written, or a disk with too little room
    ├── TrustError                     10  something received cannot be trusted
    │   ├── SignatureError             11
    │   ├── DigestError                12  bytes differ from what was signed
    │   ├── RollbackError              13  older than what was seen before
    │   ├── ExpiredError               14
    │   ├── UnlistedFileError          15  a file that no signature covers
    │   ├── AbsentFileError            16  a signed file is not there
    │   ├── RoleError                  17  listed by a role that must not list it
    │   ├── UnsafePathError            18  `..`, absolute path, symbolic link, special file
    │   ├── RootError                  19  not the root of trust that was pinned
    │   ├── SplitViewError             27  two histories of one log
    │   └── FederationError            28  signed for another federation
    ├── FormatError                    20  received bytes that do not parse as what they claim
    │   ├── DocumentError              21
    │   ├── TensorFileError            22
    │   ├── ReplayError                23  right form, wrong plan, silo or sequence
    │   └── PlanFailedError            24  a received plan that cannot be read or checked here
    ├── RefusedError                   30  a rule of ours forbids it
    │   ├── PolicyError                31
    │   ├── BudgetError                32  the privacy ledger would go over
    │   ├── AuditError                 33
    │   ├── ApprovalError              34
    │   ├── LedgerError                35  the ledger itself is damaged
    │   ├── SubmissionRefusedError     36  the aggregator refused what this silo sent
    │   ├── MemoryLimitError           37  it would take more memory than it may
    │   └── DecisionLogError           39  a site's log of decisions is damaged
    ├── TransportError                 40  Flower, the network, or a host of releases
    ├── ArchivedWarningError           50  verified, but only because --archived was given
    └── MathError                      60  a caller's mistake inside the library
        ├── ShapeError                 61
        └── NumericalError             62  not finite, not converged

Codes are stable and never reused. `docs/reference/errors.md` lists them with remedies; a test holds the two
together. Interrupting a command exits 130, as shells expect.
"""

from typing import ClassVar


class ArchipelagoError(Exception):
    """The root: a subject, what was expected, what was found, what to do.

    Messages never hold data values, paths of images or patient identifiers.

    Args:
        subject: what the sentence is about, e.g. ``"north.npz"``.
        expected: what should have been there.
        got: what was there.
        remedy: what the reader can do; the class's own remedy when omitted.
    """

    exit_code: ClassVar[int] = 1
    default_remedy: ClassVar[str] = (
        "This looks like a bug in Archipelago; please report it with the log."
    )

    def __init__(
        self,
        subject: str,
        *,
        expected: str | None = None,
        got: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.subject = subject
        self.expected = expected
        self.got = got
        self.remedy = remedy or self.default_remedy
        super().__init__(subject)

    def __str__(self) -> str:
        parts = []
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.got:
            parts.append(f"got {self.got}")
        if not parts:
            return self.subject
        return f"{self.subject}: {', '.join(parts)}"


class SetupError(ArchipelagoError):
    """Configuration, folders or files that the operator named do not fit."""

    exit_code = 3
    default_remedy = (
        "Change it to what is expected, on the command line or in the configuration file, then "
        "run the command again."
    )


class MissingFileError(SetupError):
    """A file or folder that the operator named does not exist."""

    exit_code = 4
    default_remedy = "Check the path, or run the command that makes this file first."


class PassphraseError(SetupError):
    """A private key does not open with the passphrase given."""

    exit_code = 5
    default_remedy = "Give the right passphrase with --passphrase-file, or type it when asked."


class BusyError(SetupError):
    """A port or a folder is in use by another process."""

    exit_code = 6
    default_remedy = "Stop the other process, or choose another port or folder."


class DataError(SetupError):
    """Images or a table that cannot be used as training data."""

    exit_code = 7
    default_remedy = "Correct the data so that they are as expected, then run the command again."


class DiskError(SetupError):
    """A folder that cannot be written, or a disk with too little free space for what is to come."""

    exit_code = 9
    default_remedy = (
        "Free space on this disk, or name a folder on a larger one; then run the command again."
    )


class TrustError(ArchipelagoError):
    """Something received cannot be trusted."""

    exit_code = 10
    default_remedy = (
        "Do not use these files. Fetch or copy them again; if that does not help, ask the "
        "federation's operator."
    )


class SignatureError(TrustError):
    """A signature is missing, wrong, by a key that does not hold the role, or by another key than remembered."""

    exit_code = 11


class DigestError(TrustError):
    """The bytes of a file differ from what was signed."""

    exit_code = 12
    default_remedy = (
        "The file changed after it was signed. Fetch it again from where it came, or restore it "
        "from backup."
    )


class RollbackError(TrustError):
    """Older than what this state has already seen."""

    exit_code = 13
    default_remedy = (
        "This copy is older than what was seen before, or was put back from an old backup. Fetch "
        "the current one, or restore the newest backup."
    )


class ExpiredError(TrustError):
    """Signed metadata is past its expiry."""

    exit_code = 14
    default_remedy = (
        "Fetch a fresh copy. If there is none, ask the operator to sign again; to read an old "
        "release knowingly, use --archived."
    )


class UnlistedFileError(TrustError):
    """A file that no signature covers is among signed ones."""

    exit_code = 15
    default_remedy = "Remove the file, or fetch the release again into an empty folder."


class AbsentFileError(TrustError):
    """A signed file is not there."""

    exit_code = 16
    default_remedy = "The copy is incomplete. Fetch it again."


class RoleError(TrustError):
    """A file is listed by a role that must not list it."""

    exit_code = 17


class UnsafePathError(TrustError):
    """A path with `..`, an absolute path, a symbolic link or a special file."""

    exit_code = 18


class RootError(TrustError):
    """Not the root of trust that was pinned, or an invitation with another code."""

    exit_code = 19
    default_remedy = "Compare the root's code with the one the operator gave you out of band."


class SplitViewError(TrustError):
    """The federation's log shows two histories."""

    exit_code = 27
    default_remedy = "Do not use these files. Show both checkpoints to the operator, the silos and other readers."


class FederationError(TrustError):
    """Signed for another federation than the one with the pinned root."""

    exit_code = 28
    default_remedy = (
        "Do not use these files: their silos signed for another federation. Ask the silos themselves for the "
        "fingerprint of the root of the federation that they joined."
    )


class FormatError(ArchipelagoError):
    """Received bytes that do not parse as what they claim to be."""

    exit_code = 20
    default_remedy = (
        "Do not use this file. Copy or fetch it again; if that does not help, ask its sender for "
        "a fresh copy."
    )


class DocumentError(FormatError):
    """A JSON document that is too large, malformed, or not of its schema."""

    exit_code = 21


class TensorFileError(FormatError):
    """A safetensors file whose header, names, dtypes, shapes or values are not those expected."""

    exit_code = 22


class ReplayError(FormatError):
    """Well formed, but for another plan, another silo, or a sequence already seen."""

    exit_code = 23
    default_remedy = (
        "Do not use it: it was made for another purpose, or was sent before. Ask its sender for "
        "what belongs to this plan and silo."
    )


class PlanFailedError(FormatError):
    """A received plan that cannot be read or checked on this machine, for a reason that no other error names."""

    exit_code = 24
    default_remedy = (
        "Nothing was trained or drawn, and the next plan is received as usual. "
        "Tell the aggregator; the log of this command says where it failed."
    )


class RefusedError(ArchipelagoError):
    """A rule of this site forbids it."""

    exit_code = 30
    default_remedy = "Change the request; change the rule only if you know why it is there."


class PolicyError(RefusedError):
    """A plan asks for more than the silo's policy allows."""

    exit_code = 31
    default_remedy = (
        "Ask the aggregator for a plan within this limit; or, where policy.toml names it, change "
        "it there and restart the worker."
    )


class BudgetError(RefusedError):
    """The site's privacy ledger would go over its budget."""

    exit_code = 32
    default_remedy = (
        "No noise was drawn. Ask for a plan with a smaller epsilon, or raise the budget knowingly."
    )


class AuditError(RefusedError):
    """The leak audit was inconclusive, and no waiver for this plan is in force."""

    exit_code = 33
    default_remedy = (
        "Add images, so that more are held out, or allow this plan's experts to be sent all the "
        "same: `silo waive SITE --role ROLE --reason TEXT --until DAY`."
    )


class ApprovalError(RefusedError):
    """An approval names something other than what waits for it."""

    exit_code = 34
    default_remedy = (
        "Read the draft again, and approve with the digest shown there: `silo review SITE`."
    )


class LedgerError(RefusedError):
    """The privacy ledger is damaged, shortened or edited."""

    exit_code = 35
    default_remedy = "Restore the ledger from backup. No statistic is drawn until it verifies."


class SubmissionRefusedError(RefusedError):
    """The aggregator refused what this silo sent."""

    exit_code = 36
    default_remedy = (
        "Read the refusal in inbox/, correct its cause, and submit again: `silo run SITE`."
    )


class MemoryLimitError(RefusedError):
    """What was asked for would take more memory than it may."""

    exit_code = 37
    default_remedy = "Ask for fewer samples (--num) or smaller batches (--set batch), or raise the limit with --memory."


class DecisionLogError(RefusedError):
    """A site's log of decisions is damaged, shortened, edited or full."""

    exit_code = 39
    default_remedy = (
        "Restore private/log from backup. If there is none, find out who changed it, keep the folder, and move it away "
        "as a whole: a new log begins. No decision can be recorded before that."
    )


class TransportError(ArchipelagoError):
    """Flower or the network failed, or a host of releases."""

    exit_code = 40
    default_remedy = "Nothing is lost. Check the address and the log, then run the command again."


class ArchivedWarningError(ArchipelagoError):
    """Everything verified except that the timestamp has expired, and --archived was given."""

    exit_code = 50
    default_remedy = "Use it knowingly: a newer or withdrawn version may exist."


class MathError(ArchipelagoError):
    """A caller's mistake inside the library."""

    exit_code = 60
    default_remedy = (
        "Check the arguments against the function's documentation; a command that prints this "
        "was given unusual data or a recipe that does not fit them."
    )


class ShapeError(MathError):
    """Tensors that disagree in shape."""

    exit_code = 61


class NumericalError(MathError):
    """A result that is not finite, or an iteration that did not converge."""

    exit_code = 62
