"""The command `ddm serve`: verify a release, then draw samples of it for programs that ask over HTTP."""

import ipaddress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.cli.options import (
    WHAT,
    DeviceOption,
    Dtype,
    DtypeOption,
    MemoryOption,
    ReleaseArgument,
    Verification,
    grouped,
    read_memory,
    warn_if_expired,
)
from ddm.errors import SetupError
from ddm.system.console import say

if TYPE_CHECKING:
    from ddm.encoders.text import TextEncoder
    from ddm.ensemble import Ensemble
    from ddm.loading.release import Release
    from ddm.serving.requests import ServiceLimits

_SERVER = "Server"
_REMEDY = "Lower --batch, --queue or --steps, or raise the limit with --memory."

ServedTextEncoderOption = Annotated[
    Path | None,
    typer.Option(
        "--text-encoder",
        metavar="FOLDER",
        help="The encoder that the plan pins, for requests with a text.",
        rich_help_panel=WHAT,
    ),
]
HostOption = Annotated[
    str,
    typer.Option("--host", help="IP address to listen on, or localhost.", rich_help_panel=_SERVER),
]
PortOption = Annotated[
    int,
    typer.Option(
        "--port",
        min=0,
        max=65535,
        help="Port to listen on; 0 takes a free one.",
        rich_help_panel=_SERVER,
    ),
]
ExposeOption = Annotated[
    bool,
    typer.Option(
        "--expose",
        help="Allow an address that other machines can reach; the service has no password.",
        rich_help_panel=_SERVER,
    ),
]
BatchOption = Annotated[
    int,
    typer.Option(
        "--batch",
        min=1,
        max=4096,
        help="Maximum number of images in a request, and in one call of the sampler.",
        rich_help_panel=_SERVER,
    ),
]
QueueOption = Annotated[
    int,
    typer.Option(
        "--queue",
        min=1,
        max=4096,
        help="Maximum number of requests that wait or are answered at a time.",
        rich_help_panel=_SERVER,
    ),
]
MaxStepsOption = Annotated[
    int,
    typer.Option(
        "--steps",
        min=1,
        max=10_000,
        help="Maximum number of solver steps in a request.",
        rich_help_panel=_SERVER,
    ),
]


@dataclass(frozen=True)
class ServiceOptions:
    """Where the service listens, and what it takes."""

    host: HostOption = "127.0.0.1"
    port: PortOption = 8000
    expose: ExposeOption = False
    batch: BatchOption = 64
    queue: QueueOption = 64
    steps: MaxStepsOption = 100


@dataclass(frozen=True)
class ServingMachine:
    """What this machine gives to the service.

    Raises:
        SetupError: --memory is not a size.
    """

    device: DeviceOption = "auto"
    dtype: DtypeOption = Dtype.FLOAT32
    memory: MemoryOption = None

    def __post_init__(self) -> None:
        read_memory(self.memory)


@grouped
def serve(
    release: ReleaseArgument,
    *,
    text_encoder: ServedTextEncoderOption = None,
    service: ServiceOptions,
    verification: Verification,
    machine: ServingMachine,
) -> None:
    """Serve samples of a release over HTTP; verifies first."""
    from ddm.pages.serving import listening, run_server, server_of

    host = _listening_host(service)
    # A taken port is found now, not after the minutes that verifying may take; it is open once the release is loaded.
    with listening(host, service.port):
        pass
    opened = verification.open(release)

    from ddm.serving.app import connection_limits, make_app
    from ddm.serving.drawing import ReleaseSampler, describe_release
    from ddm.serving.queue import SampleQueue
    from ddm.serving.requests import ServiceLimits

    limits = ServiceLimits(service.batch, service.steps, service.queue)
    say(f"Verified: {len(opened.manifest.experts)} experts. Loading …", error=True)
    ensemble = _load_ensemble(opened, limits, machine, text_encoder)
    sampler = ReleaseSampler(opened, ensemble, _open_text_encoder(opened, text_encoder))
    queue = SampleQueue(sampler.draw, limits)
    app = make_app(sampler, queue, limits, describe_release(opened, ensemble))
    server = server_of(app, connection_limits(limits), on_stop=queue.close)
    if service.expose:
        say(
            "WARNING: whoever reaches this port can have images drawn. The service needs no password and is not "
            "encrypted: put a server with TLS and a login in front of it.",
            error=True,
        )
    try:
        with listening(host, service.port) as (listener, url):
            say(f"Serving {opened.manifest.plan_id}, version {opened.manifest.version}: {url}")
            run_server(server, listener)
    except KeyboardInterrupt:
        # Ctrl-C is how a server ends, so that it is no error.
        pass
    finally:
        queue.end()
    say("Stopped.")
    warn_if_expired(opened)


def _listening_host(service: ServiceOptions) -> str:
    """Return the address to listen on.

    Raises:
        SetupError: it is not an address.
        PolicyError: others can reach it, without --expose.
    """
    from ddm.pages.serving import check_exposure

    host = "127.0.0.1" if service.host == "localhost" else service.host
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise SetupError(
            "--host", expected="an IP address, or localhost", got=ascii(service.host[:100])
        ) from error
    check_exposure(
        address,
        expose=service.expose,
        remedy="Leave --host out, and put a server with TLS and a login in front; or add --expose.",
    )
    return str(address)


def _load_ensemble(
    opened: "Release",
    limits: "ServiceLimits",
    machine: ServingMachine,
    text_encoder: Path | None,
) -> "Ensemble":
    """Load the experts, as many as fit into the memory beside what requests take.

    Raises:
        MemoryLimitError: not even one does; nothing was loaded.
    """
    from ddm.cli.sampling import ComputeSettings, ReleaseSource
    from ddm.footprint import condition_bytes, sampling_bytes
    from ddm.loading.memory import expert_memory_bytes
    from ddm.models.arithmetic import Arithmetic
    from ddm.serving.requests import answer_bytes
    from ddm.system.devices import device_named
    from ddm.system.memory import memory_limit

    arithmetic = Arithmetic(machine.dtype.value, False)
    arithmetic.check(device_named(machine.device, setting="--device"))
    plan = opened.plan
    manifest = opened.manifest
    beside = sampling_bytes(
        plan, len(manifest.experts), num=limits.images, batch=limits.images, steps=limits.steps
    )
    # Each answer stays until its client has taken it.
    beside += limits.requests * answer_bytes(plan.data.shape, limits.images)
    if text_encoder is not None:
        beside += condition_bytes(plan.condition)
    expert_bytes = expert_memory_bytes(
        plan, manifest, memory_limit(read_memory(machine.memory)), beside=beside, remedy=_REMEDY
    )
    computing = ComputeSettings(machine.device, arithmetic, limits.images)
    source = ReleaseSource(plan, manifest, opened.folder, expert_bytes, computing)
    return replace(source.ensemble(), release=opened.manifest_digest)


def _open_text_encoder(opened: "Release", folder: Path | None) -> "TextEncoder | None":
    """Open the encoder of texts, if the operator named one.

    Raises:
        SetupError: these experts take no texts.
    """
    if folder is None:
        return None
    from ddm.cli.conditions import open_text_encoder
    from ddm.protocol.architecture import TextCondition

    condition = opened.plan.condition
    if not isinstance(condition, TextCondition):
        raise SetupError(
            "--text-encoder",
            expected="experts with texts as conditions",
            got=f"experts whose condition is {condition.kind}",
            remedy="Leave --text-encoder out.",
        )
    return open_text_encoder(folder, condition)
