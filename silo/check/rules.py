"""What is wrong with a site, or soon will be: rules over facts, without I/O."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ddm.errors import ArchipelagoError
from ddm.system.console import human_bytes
from ddm.system.findings import Finding, Findings, apply
from silo.check.launcher import LauncherFacts, launcher_findings
from silo.check.torch_build import TorchBuild
from silo.config import Isolation, Policy, SiloSettings
from silo.courier.clock import describe
from silo.courier.reach import remedy_for

# Of a worker that trains a small expert, its libraries included.
MIN_MEMORY_BYTES = 2 << 30
_GROUP = 0o070


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
        packages: faults in the versions of Python and of the installed packages.
        torch: the one of this environment; None where it cannot be loaded.
        has_gpu: whether the machine has one of NVIDIA's.
        num_cores: the number of cores that this process may use.
        launcher: what starts a job's processes; None where this machine trains by itself.
        memory_bytes: the available memory.
        disk_bytes: the free space where the worker writes.
        ahead_s: by how much this clock is ahead of the aggregator's; None where that is not known.
        connection: why no TLS connection to the aggregator came about; None if one did.
        proxy: through which the connection goes, without user and password.
        modes: the modes of what is private.
        key_encrypted: whether the signing key opens with a passphrase only; None without a key.
        root_digest: sha256 of the pinned root; None without one.
        isolation: between worker and courier.
        epsilon_left: see `silo.privacy.ledger.Ledger.left`; None where the ledger cannot be read.
        running: whether worker and courier are at work.
        problem: why the work stopped last, from its state.
        has_text_reader: whether tesseract is installed.
    """

    errors: Mapping[str, tuple[ArchipelagoError, ...]] = field(default_factory=dict)
    settings: SiloSettings | None = None
    policy: Policy | None = None
    packages: tuple[Finding, ...] = ()
    torch: TorchBuild | None = None
    has_gpu: bool = False
    num_cores: int = 1
    launcher: LauncherFacts | None = None
    memory_bytes: int = MIN_MEMORY_BYTES
    disk_bytes: int = 0
    ahead_s: float | None = None
    connection: str | None = None
    proxy: str | None = None
    modes: tuple[PathMode, ...] = ()
    key_encrypted: bool | None = None
    root_digest: str | None = None
    isolation: Isolation = "none"
    epsilon_left: float | None = None
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
    # Without a site the machine is looked at as a new site would use it.
    device = settings.training.device if settings else "auto"
    torch = facts.torch
    if torch is None:
        yield Finding(
            "torch",
            expected="a torch that can be imported",
            got="an import that fails",
            remedy="Reinstall Archipelago (make setup).",
        )
    elif device == "cuda" and not torch.num_gpus:
        yield Finding(
            "training.device",
            expected="a GPU for training",
            got=f"no GPU that {_words_of(torch)} finds",
            remedy=f"Set training.device in silo.toml to auto or cpu. Or, for a GPU: {_remedy_for_gpu(torch)}",
        )
    # Training on the CPU would continue for weeks before anybody asked why.
    elif device == "auto" and facts.has_gpu and not torch.num_gpus:
        yield Finding(
            "GPU",
            expected="a GPU that torch can use",
            got=f"an NVIDIA GPU that {_words_of(torch)} cannot use; training runs on the CPU",
            remedy=f"{_remedy_for_gpu(torch)} Or, to train on the CPU, set training.device to cpu in silo.toml.",
            level="warn",
        )
    elif device != "cpu" and torch.unsupported_gpus:
        yield Finding(
            "GPU",
            expected="a GPU that torch was compiled for",
            got=f"{', '.join(torch.unsupported_gpus)}, which {_words_of(torch)} was not compiled for",
            remedy="Install a torch for this GPU, or set training.device to cpu in silo.toml.",
        )
    threads = settings.training.threads if settings else None
    if threads is not None and threads > facts.num_cores:
        yield Finding(
            "training.threads",
            expected=f"at most {facts.num_cores}, the cores that this process may use",
            got=str(threads),
            remedy="Lower training.threads in silo.toml, or leave it out: more threads than cores slow each other "
            "down.",
            level="warn",
        )


def _words_of(torch: TorchBuild) -> str:
    if torch.cuda is None:
        return f"torch {torch.version}, a build for CPUs,"
    return f"torch {torch.version}, built with CUDA {torch.cuda},"


def _remedy_for_gpu(torch: TorchBuild) -> str:
    if torch.cuda is None:
        return "Install the build with CUDA: make setup TORCH=cuda."
    return f"Install a driver for CUDA {torch.cuda} (nvidia-smi shows the present one)."


def _launcher(facts: SiteFacts) -> Iterator[Finding]:
    return launcher_findings(facts.launcher)


def _memory(facts: SiteFacts) -> Iterator[Finding]:
    # A worker that runs has taken its memory already.
    if not facts.running and facts.memory_bytes < MIN_MEMORY_BYTES:
        yield Finding(
            "memory",
            expected=f"{human_bytes(MIN_MEMORY_BYTES)} available for the smallest plans",
            got=human_bytes(facts.memory_bytes),
            remedy="Stop other programs.",
            level="warn",
        )


def _disk(facts: SiteFacts) -> Iterator[Finding]:
    if facts.settings is None:
        return
    # The worker copies a plan's bundle out of the inbox before it verifies the files in it.
    needed_bytes = facts.settings.max_bundle_bytes
    if facts.disk_bytes < needed_bytes:
        yield Finding(
            "disk",
            expected=f"{human_bytes(needed_bytes)} free, for one plan of max_bundle_bytes",
            got=f"{human_bytes(facts.disk_bytes)} free",
            remedy="Free disk space, or lower max_bundle_bytes in silo.toml.",
            level="warn",
        )


def _clock(facts: SiteFacts) -> Iterator[Finding]:
    wrong_time = describe(facts.ahead_s)
    # Flower refuses a node whose signed time is more than five minutes off; at four there is still time to act.
    if wrong_time:
        yield Finding(
            "clock",
            expected="the time of the aggregator, to within 4 minutes",
            got=wrong_time,
            remedy="Set the clock (timedatectl set-ntp true) before anything is signed.",
        )


def _connection(facts: SiteFacts) -> Iterator[Finding]:
    # A warning, since the worker's user may have no network on purpose, and the courier of the same site has one.
    if facts.settings is None or facts.connection is None:
        return
    through = ""
    if facts.proxy:
        through = f" through the proxy {facts.proxy}"
    remedy = remedy_for(facts.connection, facts.proxy)
    yield Finding(
        facts.settings.address,
        expected=f"a TLS connection{through}, with a certificate by courier/ca.pem",
        got=facts.connection,
        remedy=f"{remedy} A worker that has no network on purpose: check as the courier's user.",
        level="warn",
    )


def _permissions(facts: SiteFacts) -> Iterator[Finding]:
    for path_mode in facts.modes:
        excess = path_mode.mode & path_mode.forbidden
        if not excess:
            continue
        expected = "closed to others"
        if path_mode.forbidden & _GROUP:
            expected = "closed to everyone but its owner"
        classes = "o"
        if excess & _GROUP:
            classes = "go"
        yield Finding(
            path_mode.path,
            expected=expected,
            got=f"mode {path_mode.mode:03o}",
            remedy=f"chmod {classes}= {path_mode.path}",
        )


def _keys(facts: SiteFacts) -> Iterator[Finding]:
    # None, without a key, is an error of reading that is reported already.
    if facts.key_encrypted is False:
        yield Finding(
            "private/silo.key",
            expected="a key that a passphrase encrypts",
            got="a key that opens without one",
            remedy="Replace it with one that has a passphrase: `silo rotate SITE --out card.json`.",
        )
    settings = facts.settings
    # Everything is verified from this root: anybody who can replace the file decides which plans this site accepts.
    if settings and facts.root_digest and facts.root_digest != settings.root_digest:
        yield Finding(
            "private/trust/1.root.json",
            expected=f"fingerprint {settings.root_digest}, as in silo.toml",
            got=facts.root_digest,
            remedy="Restore private/trust/ from backup, and ask how the file was changed.",
        )


def _isolation(facts: SiteFacts) -> Iterator[Finding]:
    if facts.isolation == "none":
        yield Finding(
            "worker and courier",
            expected="two users",
            got="one user for both: nothing keeps the courier from the data",
            remedy="Give the courier a user of its own: docs/how-to/install.md.",
            level="warn",
        )


def _ledger(facts: SiteFacts) -> Iterator[Finding]:
    if facts.epsilon_left is None or facts.policy is None:
        return
    privacy = facts.policy.privacy
    # Compared with the most that one plan may cost: with less left, a plan within the policy may still be refused.
    if facts.epsilon_left < privacy.max_epsilon:
        yield Finding(
            "privacy budget",
            expected=f"epsilon {privacy.max_epsilon:g} left, which one plan may cost",
            got=f"{facts.epsilon_left:.3g} of {privacy.budget_epsilon:g}",
            remedy="Only cheaper plans can be answered. Raising privacy.budget_epsilon weakens what patients were "
            "promised.",
            level="warn",
        )


def _text_reader(facts: SiteFacts) -> Iterator[Finding]:
    if not facts.has_text_reader:
        yield Finding(
            "burned-in text",
            expected="tesseract as a second way to find it",
            got="tesseract is not installed, so that burned-in text is searched for by its shapes alone",
            remedy="Install it: `apt-get install tesseract-ocr`.",
            level="warn",
        )


def _work(facts: SiteFacts) -> Iterator[Finding]:
    if facts.problem and not facts.running:
        yield Finding(
            "last run",
            expected="no problem",
            got=facts.problem,
            remedy="Fix that, then: `silo run SITE`.",
            level="warn",
        )


def examine_machine(facts: SiteFacts) -> Findings:
    """Apply the rules about the machine alone, before there is a site."""
    rules = {check: _RULES[check] for check in _MACHINE_CHECKS}
    return apply(rules, facts, facts.errors)


# What needs no site.
_MACHINE_CHECKS = ("packages", "device", "memory", "burned-in text")
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
