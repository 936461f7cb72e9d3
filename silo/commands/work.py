"""Commands around one plan: `silo run`, `status`, `review`, `approve`, `withdraw`."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ddm.errors import SetupError
from ddm.system.console import human_bytes, say
from silo.commands.options import JsonOption, MaybeSiteArgument, PassphraseOption, SiteArgument, open_key
from silo.config import Site


class Part(StrEnum):
    """One half of a site, to run as a service of its own user."""

    WORKER = "worker"
    COURIER = "courier"


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

    key = open_key(place, passphrase_file)
    state = running.run_worker(place, key) if only is Part.WORKER else running.run_both(place, key)
    say(f"[{place.settings().silo_id}] done: submission {state.sequence} of plan {state.plan_id} is {state.state}.")


def status(
    site: SiteArgument,
    as_json: JsonOption = False,
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


def review(
    site: MaybeSiteArgument = None,
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
        remedy = "silo review --images with the same options; or silo review SITE for what would leave."
        raise SetupError("review", expected="--images with these options", got="no --images", remedy=remedy)
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


def withdraw(site: SiteArgument) -> None:
    """Give up the present plan before anything was sent; the site then waits for the next one."""
    from silo.worker.approval import withdraw as give_up

    state = give_up(Site(site).require())
    say(f"Gave up plan {state.plan_id}. What its statistics cost, if any were drawn, stays in the ledger.")
