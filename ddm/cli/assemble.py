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
            "--partial", help="Without the islands that are not trained; shares renormalised."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the router's training.")] = 0,
    device: DeviceOption = "auto",
    passphrase_file: PassphraseOption = None,
) -> None:
    """Train the router, and publish experts and router as the next signed version."""
    from ddm.islands.assemble import assemble as publish
    from ddm.islands.assemble import missing_islands
    from ddm.islands.folder import Islands
    from ddm.protocol.calibration import calibration_rows
    from ddm.system.devices import device_named

    islands = Islands(folder)
    # reads split.json, so that a wrong folder is named before a passphrase is asked
    missing = missing_islands(islands)
    where = device_named(device, setting="--device")
    secret = passphrase(passphrase_file, None, OWN_KEYS)
    with progress("Training the router, drawing for the report") as tell:
        done = publish(
            islands,
            out,
            secret,
            partial=partial,
            seed=seed,
            device=where,
            on_progress=lambda step, num, loss: tell(step, num),
            on_draw=tell,
        )
    manifest, router = done.manifest, done.router
    say(
        table(
            [(each.expert_id, f"{each.prior:.3f}") for each in manifest.experts],
            ("island", "share"),
        )
    )
    say(f"Router: {router.kind}, because {router.reason}.")
    value, low, high = router.minus_prior
    say(
        f"  on images held out {value:+.4f} nats against the shares alone, 95% interval {low:+.4f} to {high:+.4f}"
    )
    heads = (
        "calibration error, 95%",
        f"published, at temperature {manifest.router.temperature:.3g}",
        "at temperature 1",
    )
    say(table(calibration_rows(router.calibration.errors), heads))
    if missing:
        say(f"PARTIAL: without {', '.join(manifest.missing_silos)}, which are not trained yet.")
    say(f"Published {manifest.plan_id}, version {manifest.version}: {out}")
    say(
        f"Next: ddm sample {quote(str(out))} --root {quote(str(islands.root))} --num 64 --out samples.png"
    )
