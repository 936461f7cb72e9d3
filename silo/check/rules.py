"""What is wrong with a site, or soon will be: rules over facts, without I/O."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ddm.errors import ArchipelagoError
from ddm.system.console import human_bytes
from ddm.system.findings import Finding, Findings, apply
from silo.check.launcher import LauncherFacts, launcher_findings
from silo.config import Isolation, Policy, SiloSettings
from silo.courier.clock import describe
from silo.courier.reach import remedy_for

LEAST_MEMORY_BYTES = 2 << 30  # of a worker that trains a small expert, its libraries included


@dataclass(frozen=True)
class PathMode:
    """A path and its permission bits.

    Attributes:
        path: as it is shown.
        mode: its bits.
        forbidden: those that it must not have.
    """

    path: str
    mode: int
    forbidden: int


@dataclass(frozen=True)
class SiteFacts:
    """Everything that the rules examine.

    Attributes:
        errors: what could not be read or did not verify, by check.
        settings: silo.toml.
        policy: policy.toml.
        packages: what Python and the installed packages are not as they should be.
        num_gpus: that torch sees; None where torch cannot be loaded.
        has_gpu: whether the machine has one of NVIDIA's.
        num_cores: that this process may use.
        launcher: what starts a job's processes; None where this machine trains by itself.
        memory_bytes: available.
        disk_bytes: free where the worker writes.
        ahead_s: by how much this clock is ahead of the aggregator's; None where that is not known.
        connection: why no TLS connection to the aggregator came about; None if one did.
        proxy: through which the connection goes, without user and password.
        modes: of what is private.
        key_encrypted: whether the signing key opens with a passphrase only; None without a key.
        root_digest: sha256 of the pinned root; None without one.
        isolation: between worker and courier.
        spent: epsilon and delta of the ledger; None where it cannot be read.
        running: whether worker and courier are at work.
        problem: why the work stopped last, from its state.
        has_text_reader: whether tesseract is installed.
    """

    errors: Mapping[str, tuple[ArchipelagoError, ...]] = field(default_factory=dict)
    settings: SiloSettings | None = None
    policy: Policy | None = None
    packages: tuple[Finding, ...] = ()
    num_gpus: int | None = 0
    has_gpu: bool = False
    num_cores: int = 1
    launcher: LauncherFacts | None = None
    memory_bytes: int = LEAST_MEMORY_BYTES
    disk_bytes: int = 0
    ahead_s: float | None = None
    connection: str | None = None
    proxy: str | None = None
    modes: tuple[PathMode, ...] = ()
    key_encrypted: bool | None = None
    root_digest: str | None = None
    isolation: Isolation = "none"
    spent: tuple[float, float] | None = None
    running: bool = False
    problem: str | None = None
    has_text_reader: bool = True


def examine(facts: SiteFacts) -> Findings:
    """Apply every rule.

    Returns:
        The findings of each check; empty where all is well.
    """
    return apply(_RULES, facts, facts.errors)


def _no_more(facts: SiteFacts) -> Iterator[Finding]:
    """Report nothing: the check consists of reading."""
    return iter(())


def _packages(facts: SiteFacts) -> Iterator[Finding]:
    return iter(facts.packages)


def _device(facts: SiteFacts) -> Iterator[Finding]:
    settings = facts.settings
    if facts.num_gpus is None:
        yield Finding(
            "torch",
            "a torch that loads",
            "one that does not",
            "Reinstall Archipelago (make setup).",
        )
    elif settings and settings.training.device == "cuda" and not facts.num_gpus:
        remedy = "Set training.device in silo.toml to auto or cpu, or install a torch built for this GPU."
        yield Finding("training.device", "a GPU that torch sees", "none", remedy)
    elif facts.has_gpu and not facts.num_gpus and settings and settings.training.device == "auto":
        remedy = "Install a torch built with CUDA, or set training.device to cpu in silo.toml to say that it is meant."
        yield Finding(
            "GPU",
            "one that torch sees",
            "one that it does not see; training takes the CPU",
            remedy,
            "warn",
        )
    if settings and settings.threads > facts.num_cores:
        expected = f"at most {facts.num_cores}, the cores that this process may use"
        remedy = "Lower threads in silo.toml: more of them than cores slow each other down."
        yield Finding("threads", expected, str(settings.threads), remedy, "warn")


def _launcher(facts: SiteFacts) -> Iterator[Finding]:
    return launcher_findings(facts.launcher)


def _memory(facts: SiteFacts) -> Iterator[Finding]:
    if not facts.running and facts.memory_bytes < LEAST_MEMORY_BYTES:
        expected = f"{human_bytes(LEAST_MEMORY_BYTES)} available for the smallest plans"
        yield Finding(
            "memory", expected, human_bytes(facts.memory_bytes), "Stop other programs.", "warn"
        )


def _disk(facts: SiteFacts) -> Iterator[Finding]:
    if facts.settings and facts.disk_bytes < facts.settings.max_bundle_bytes:
        expected = (
            f"{human_bytes(facts.settings.max_bundle_bytes)} free, for one plan of max_bundle_bytes"
        )
        remedy = "Free disk space, or lower max_bundle_bytes in silo.toml."
        yield Finding("disk", expected, f"{human_bytes(facts.disk_bytes)} free", remedy, "warn")


def _clock(facts: SiteFacts) -> Iterator[Finding]:
    wrong = describe(facts.ahead_s)
    if wrong:
        remedy = "Set the clock (timedatectl set-ntp true) before anything is signed."
        yield Finding("clock", "that of the aggregator, give or take 4 minutes", wrong, remedy)


def _connection(facts: SiteFacts) -> Iterator[Finding]:
    if facts.settings is None or facts.connection is None:
        return
    through = f" through the proxy {facts.proxy}" if facts.proxy else ""
    remedy = (
        f"{remedy_for(facts.connection, facts.proxy)} A worker that has no network on purpose: check as the courier's "
        "user."
    )
    expected = f"a TLS connection{through}, with a certificate by courier/ca.pem"
    yield Finding(facts.settings.address, expected, facts.connection, remedy, "warn")


def _permissions(facts: SiteFacts) -> Iterator[Finding]:
    for each in facts.modes:
        if excess := each.mode & each.forbidden:
            got = f"mode {each.mode:03o}"
            remedy = f"chmod {'go' if excess & 0o070 else 'o'}= {each.path}"
            expected = (
                "closed to everyone but its owner" if each.forbidden & 0o070 else "closed to others"
            )
            yield Finding(each.path, expected, got, remedy)


def _keys(facts: SiteFacts) -> Iterator[Finding]:
    if facts.key_encrypted is False:
        remedy = "Replace it: silo rotate SITE --out card.json, with a passphrase."
        yield Finding(
            "private/silo.key",
            "a key that a passphrase encrypts",
            "a key that opens without one",
            remedy,
        )
    settings = facts.settings
    if settings and facts.root_digest and facts.root_digest != settings.root_digest:
        remedy = "Restore private/trust/ from backup, and ask how the file was changed."
        expected = f"fingerprint {settings.root_digest}, as in silo.toml"
        yield Finding("private/trust/1.root.json", expected, facts.root_digest, remedy)


def _isolation(facts: SiteFacts) -> Iterator[Finding]:
    if facts.isolation == "none":
        remedy = "Give the courier a user of its own: docs/how-to/two-users.md."
        got = "one user for both: nothing keeps the courier from the data"
        yield Finding("worker and courier", "two users", got, remedy, "warn")


def _ledger(facts: SiteFacts) -> Iterator[Finding]:
    if facts.spent is None or facts.policy is None:
        return
    privacy, (epsilon, _) = facts.policy.privacy, facts.spent
    if (left := privacy.budget_epsilon - epsilon) < privacy.max_epsilon:
        expected = f"epsilon {privacy.max_epsilon:g} left, what one plan may cost"
        got = f"{max(left, 0):.3g} of {privacy.budget_epsilon:g}"
        remedy = (
            "Only cheaper plans can be answered. Raising "
            "privacy.budget_epsilon weakens what patients were promised."
        )
        yield Finding("privacy budget", expected, got, remedy, "warn")


def _text_reader(facts: SiteFacts) -> Iterator[Finding]:
    if not facts.has_text_reader:
        got = "tesseract is not installed: burned-in text is looked for by shapes alone"
        yield Finding(
            "burned-in text", "a second opinion", got, "apt-get install tesseract-ocr", "warn"
        )


def _work(facts: SiteFacts) -> Iterator[Finding]:
    if facts.problem and not facts.running:
        yield Finding(
            "last run", "no problem", facts.problem, "Mend that, then: silo run SITE.", "warn"
        )


_RULES: Mapping[str, Callable[[SiteFacts], Iterator[Finding]]] = {
    "configuration": _no_more,
    "packages": _packages,
    "device": _device,
    "launcher": _launcher,
    "memory": _memory,
    "disk": _disk,
    "clock": _clock,
    "connection": _connection,
    "permissions": _permissions,
    "keys": _keys,
    "isolation": _isolation,
    "ledger": _ledger,
    "decisions": _no_more,
    "data": _no_more,
    "burned-in text": _text_reader,
    "work": _work,
}
