"""The command `ddm assemble`: one signed release of the islands that are trained."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from ddm.cli.options import OWN_KEYS, DeviceOption, IslandsArgument, PassphraseOption
from ddm.system.console import passphrase, progress, say, table


def assemble(
    folder: IslandsArgument,
    out: Annotated[
        Path, typer.Option(metavar="RELEASE", help="The release folder to make; it must not exist.")
    ],
    partial: Annotated[
        bool,
        typer.Option(
            "--partial",
            help="Publish without the islands that are not trained yet; shares are renormalised.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the router's training.")] = 0,
    device: DeviceOption = "auto",
    passphrase_file: PassphraseOption = None,
) -> None:
    """Train the router, and publish experts and router as the next signed version."""
    from ddm.islands.assemble import AssemblySettings, missing_islands
    from ddm.islands.assemble import assemble as publish
    from ddm.islands.folder import Islands
    from ddm.publishing.router_table import describe_router
    from ddm.system.devices import device_named

    islands = Islands(folder)
    # This reads split.json, so that a wrong folder is named before a passphrase is asked for.
    missing = missing_islands(islands)
    torch_device = device_named(device, setting="--device")
    secret = passphrase(passphrase_file, None, OWN_KEYS)
    with progress("Training the router, drawing for the report") as show_progress:
        settings = AssemblySettings(
            partial=partial,
            seed=seed,
            device=torch_device,
            on_router_step=lambda step, num_steps, loss: show_progress(step, num_steps),
            on_draw=show_progress,
        )
        release = publish(islands, out, secret, settings)

    manifest = release.manifest
    shares = [(expert.expert_id, f"{expert.prior:.3f}") for expert in manifest.experts]
    say(table(shares, ("island", "share")))
    say(describe_router(release.router))
    gain, low, high = release.router.minus_prior
    say(
        f"  on images held out {gain:+.4f} nats against the shares alone, "
        f"95% interval {low:+.4f} to {high:+.4f}"
    )
    if missing:
        say(f"PARTIAL: without {', '.join(manifest.missing_silos)}, which are not trained yet.")
    say(f"Published {manifest.plan_id}, version {manifest.version}: {out}")
    root = quote(str(islands.root))
    say(f"Next: ddm sample {quote(str(out))} --root {root} --num 64 --out samples.png")
