"""The program `silo`: its operator's commands init, scan, enroll, rotate, run, status, review, approve, withdraw."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ddm.errors import SetupError
from ddm.io.files import write_atomic
from ddm.io.modes import keep_private, open_to_everyone
from ddm.system.console import human_bytes, new_program, passphrase, run_app, say
from silo.config import ImagesSettings, Site

app = new_program("Train an expert on private images, which never leave; see, limit and refuse everything that does.")

SiteArgument = Annotated[Path, typer.Argument(metavar="SITE", file_okay=False, help="The site's folder.")]
PassphraseOption = Annotated[
    Path | None, typer.Option("--passphrase-file", metavar="FILE", help="Its first line opens the silo's key.")
]


ColumnOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=COLUMN", help="A table's column for path, label, patient, split or caption."),
]


class Part(StrEnum):
    """One half of a site, to run as a service of its own user."""

    WORKER = "worker"
    COURIER = "courier"


@app.command()
def init(
    site: SiteArgument,
    silo_id: Annotated[str, typer.Option("--id", help="This silo's name: a letter a-z, then a-z and 0-9.")],
    data: Annotated[
        Path, typer.Option(help="Private images: a folder of any depth, a table of paths, or a file of many images.")
    ],
    invitation: Annotated[Path, typer.Option(help="invitation.json from the aggregator.")],
    root_fingerprint: Annotated[str, typer.Option(help="sha256 of the root, received through a second channel.")],
    column: ColumnOption = None,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Make a site: its folders, keys, configuration and pinned root."""
    from silo.images.command import files_progress, read_columns, show
    from silo.setup import first_look, init_site, read_invitation

    invited, images = read_invitation(invitation, root_fingerprint), ImagesSettings(columns=read_columns(column or []))
    place, silo_id = Site(site), _checked_id(silo_id)
    with files_progress(data, images) as advance:
        look = first_look(place, data, images, advance)
    if look.summary:
        show(look.summary, place)
        why = "; ".join(str(problem) for problem in look.problems)
        say("\nOnly plans with a table [transform] take them" + (f": {why}.\n" if why else ".\n"))
    secret = passphrase(passphrase_file, None, "New passphrase for the silo's key", confirm=True)
    key = init_site(place, silo_id, data, invited, secret, passphrase_file, images, looked=True)
    say(f"Site {silo_id} in {site}, for federation {invited.federation} at {invited.address}.")
    say(f"  signing key   {key.public.fingerprint}")
    say(f"  root          {invited.root_digest}")
    say(f"  isolation     {place.isolation}" + _isolation_advice(place))
    say(f"Look through {site / 'policy.toml'}, then: silo enroll {site} --out card.json")


@app.command()
def scan(
    site: Annotated[Path | None, typer.Argument(metavar="[SITE]", file_okay=False, help="The site's folder.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Images: a folder of any depth, a CSV or Parquet table of paths, or one file. No site needed."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts: counts alone.")] = False,
    column: ColumnOption = None,
    private: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Where to remember results; default: in the site, or ~/.local/state."),
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, max=256, help="That decode; default: one a core.")] = None,
    memory: Annotated[
        int | None, typer.Option(min=512, max=1 << 20, help="Most address space of a decoder, MiB; default: 4096.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, max=86400, help="Most that a file may take, and one more for each of its MB; default: 60."),
    ] = None,
    preview: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", dir_okay=False, help="Draw accepted images before and after --plan."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="A recipe or a plan with a table [transform].")
    ] = None,
) -> None:
    """Look through images before anything is trained: what is there, what cannot be used, what a person must see."""
    from silo.images.command import scan_images

    scan_images(
        site,
        data,
        column or [],
        private,
        processes=processes,
        memory=memory,
        seconds=seconds,
        as_json=as_json,
        preview=preview,
        plan=plan,
    )


@app.command()
def enroll(
    site: SiteArgument,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where to write the card.")],
    images: Annotated[
        int | None,
        typer.Option(min=2, help="Most images that this site may bring; default: its data, to the next power of two."),
    ] = None,
    patients: Annotated[
        int | None, typer.Option(min=2, help="Most patients; by default counted where policy.toml protects patients.")
    ] = None,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Write the enrolment card for the aggregator: public keys, and the most data that this site may bring."""
    from silo.images.command import files_progress
    from silo.setup import make_card, with_rotations
    from silo.worker.rotation import published_rotations

    place = Site(site).require()
    key, settings = _open_key(place, passphrase_file), place.settings()
    with files_progress(Path(settings.data), settings.images) as advance:
        card = make_card(place, key, images=images, patients=patients, advance=advance)
    write_atomic(out, with_rotations(card, published_rotations(place)))
    open_to_everyone(out)
    say(f"Card in {out}, for at most {place.agreed()}; every silo and every reader of a release sees this number.")
    say(f"Tell the aggregator number and fingerprint through a second channel: {key.public.fingerprint}")


@app.command()
def rotate(
    site: SiteArgument,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where to write the new card.")],
    passphrase_file: PassphraseOption = None,
) -> None:
    """Replace the signing key between two plans; the old key announces the new one to aggregator and readers."""
    from ddm.trust.keys import SigningKey
    from silo.setup import make_card, with_rotations
    from silo.worker.rotation import published_rotations, rotate_key

    place = Site(site).require()
    secret = _passphrase(place, passphrase_file)
    key = rotate_key(place, SigningKey.load(place.key_path, secret), secret)
    write_atomic(out, with_rotations(make_card(place, key), published_rotations(place)))
    open_to_everyone(out)
    say(f"Rotated. The new signing key: {key.public.fingerprint}")
    say(f"Give {out} to the aggregator, for `aggregator enroll`. It is in force from the next plan on.")


@app.command()
def run(
    site: SiteArgument,
    only: Annotated[Part | None, typer.Option(help="Run one half, as a service of its own user.")] = None,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Take the plan, train, draw the statistics, wait for approval, send; ends with the receipt of the submission."""
    place = Site(site).require()
    if only is Part.COURIER:
        from silo.courier.service import run_courier

        run_courier(place)
        return

    from silo import running

    key = _open_key(place, passphrase_file)
    state = running.run_worker(place, key) if only is Part.WORKER else running.run_both(place, key)
    say(f"[{place.settings().silo_id}] done: submission {state.sequence} of plan {state.plan_id} is {state.state}.")


@app.command()
def status(
    site: SiteArgument,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Show how far the work is."""
    from silo.worker.state import load_state

    place = Site(site).require()
    state = load_state(place.private / "state.json")
    if as_json:
        say(json.dumps(state.model_dump(mode="json", exclude={"format"})))
        return
    say(f"{place.settings().silo_id}: {state.state}" + (f", plan {state.plan_id}" if state.plan_id else ""))
    if state.state == "training":
        say(f"  step {state.step} of {state.num_steps}")
    if state.submission_digest:
        say(f"  submission {state.sequence}, digest {state.submission_digest}")
    if state.problem:
        say(f"  problem (code {state.problem.code}): {state.problem.message}")


@app.command()
def review(
    site: Annotated[Path | None, typer.Argument(metavar="[SITE]", file_okay=False, help="The site's folder.")] = None,
    images: Annotated[
        bool, typer.Option("--images", help="Instead: a page on which a person clears flagged images.")
    ] = False,
    data: Annotated[Path | None, typer.Option(help="With --images: as in `silo scan`; no site needed.")] = None,
    private: Annotated[Path | None, typer.Option(file_okay=False, help="With --images: as in `silo scan`.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="With --images: print what waits, without a page.")] = False,
    clear: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="With --images: clear a file, or all below a folder.")
    ] = None,
    leave_out: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="With --images: leave a file out, or all below a folder.")
    ] = None,
) -> None:
    """Show what would leave the site, byte for byte; with --images, which images a person must see before training."""
    if images:
        from silo.images.review_command import review_images

        review_images(site, data, private, clear=clear or [], leave_out=leave_out or [], listed=listed)
        return
    if data or private or listed or clear or leave_out:
        raise SetupError("review", expected="--images with these options", got="no --images")
    if site is None:
        raise SetupError("review", expected="the site's folder", got="no SITE", remedy="silo review SITE")

    from silo.worker.review import review_text
    from silo.worker.state import load_state

    place = Site(site).require()
    state = load_state(place.private / "state.json")
    if state.state != "awaiting_approval":
        raise SetupError(
            "review",
            expected="a submission that waits for approval",
            got=f"state {state.state}",
            remedy="Keep `silo run` running; `silo status` shows how far it is.",
        )
    say(review_text(place))


@app.command()
def approve(
    site: SiteArgument,
    digest: Annotated[str, typer.Option(help="The digest that `silo review` printed.")],
) -> None:
    """Approve exactly the reviewed submission, which then leaves."""
    from silo.worker.approval import approve as record_approval
    from silo.worker.approval import load_draft

    place = Site(site).require()
    record_approval(place, digest.strip().lower())
    size = sum(expert.file.bytes for expert in load_draft(place).experts)
    say(f"Approved. The worker signs and sends {digest[:16]}… ({human_bytes(size)} of weights).")


@app.command()
def withdraw(site: SiteArgument) -> None:
    """Give up the present plan before anything was sent; the site then waits for the next one."""
    from silo.worker.approval import withdraw as give_up

    state = give_up(Site(site).require())
    say(f"Gave up plan {state.plan_id}. What its statistics cost, if any were drawn, stays in the ledger.")


def _open_key(site: Site, passphrase_file: Path | None):  # type: ignore[no-untyped-def]
    from ddm.trust.keys import SigningKey

    return SigningKey.load(site.key_path, _passphrase(site, passphrase_file))


def _passphrase(site: Site, passphrase_file: Path | None) -> bytes:
    return passphrase(passphrase_file, site.settings().passphrase_file, "Passphrase of the silo's key")


def _checked_id(silo_id: str) -> str:
    import re

    from ddm.protocol.base import SILO_ID_PATTERN

    if not re.fullmatch(SILO_ID_PATTERN, silo_id):
        raise SetupError("--id", expected="a letter a-z, then up to 31 of a-z and 0-9", got=repr(silo_id[:40]))
    return silo_id


def _isolation_advice(site: Site) -> str:
    advice = (
        " (only two users, one for the worker and one for the courier, enforce the boundary: docs/how-to/two-users.md)"
    )
    return advice if site.isolation == "none" else ""


def main() -> None:
    """Entry point of the `silo` command."""
    keep_private()
    run_app(app)


if __name__ == "__main__":
    main()
