"""Commands around one plan, from `silo run` to `silo withdraw`."""

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.errors import SetupError
from ddm.system.console import confirm, human_bytes, say
from silo.commands.options import (
    JsonOption,
    MaybeSiteArgument,
    PassphraseOption,
    SiteArgument,
    open_key,
)
from silo.config import Site

if TYPE_CHECKING:
    from ddm.protocol.submission import Responsible


class Part(StrEnum):
    """One half of a site, to run as a service of its own user."""

    WORKER = "worker"
    COURIER = "courier"


def run(
    site: SiteArgument,
    only: Annotated[
        Part | None, typer.Option(help="Run one half, as a service of its own user.")
    ] = None,
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
    say(
        f"[{place.settings().silo_id}] done: submission {state.sequence} of plan {state.plan_id} is {state.state}."
    )


def status(
    site: SiteArgument,
    as_json: JsonOption = False,
) -> None:
    """Show what is done, how far the work is, how fast it goes, and what to type next."""
    from silo.worker.status import read_status

    found = read_status(Site(site).require())
    say(json.dumps(found.as_json()) if as_json else found.text())


def pause(site: SiteArgument) -> None:
    """Stop the work at its next step, memory and GPU free; it stays stopped, also after a restart, until resumed."""
    from silo.worker.pause import pause as ask
    from silo.worker.status import read_status

    place = Site(site).require()
    request = ask(place)
    stops = (
        " The worker stops at its next step: see `silo status`."
        if read_status(place).running
        else ""
    )
    say(
        f"Paused since {request.since}.{stops} The courier stays connected; the aggregator sees the state alone."
    )
    say(f"To go on where it stopped: silo resume {site}")


def resume(site: SiteArgument) -> None:
    """Let a paused site go on where it stopped."""
    from silo.worker.pause import resume as let_go_on
    from silo.worker.status import read_status

    place = Site(site).require()
    if not let_go_on(place):
        say("This site is not paused.")
    elif read_status(place).running:
        say("Resumed: the worker goes on.")
    else:
        say(f"Resumed. No worker is at work: silo run {site}")


def review(
    site: MaybeSiteArgument = None,
    page: Annotated[
        bool | None,
        typer.Option(
            "--page/--text", help="On a page of this machine, or as text; at a terminal a page."
        ),
    ] = None,
    images: Annotated[
        bool, typer.Option("--images", help="Review flagged images instead of a submission.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="With --images: as in `silo scan`; no site needed.")
    ] = None,
    private: Annotated[
        Path | None, typer.Option(file_okay=False, help="With --images: as in `silo scan`.")
    ] = None,
    listed: Annotated[
        bool,
        typer.Option("--list", help="With --images: print the images that wait, without a page."),
    ] = False,
    clear: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="With --images: clear a file, or all below a folder."),
    ] = None,
    leave_out: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH|NUMBER",
            help="With --images: leave out a file, all below a folder, or a picture of the last preview sheet.",
        ),
    ] = None,
) -> None:
    """Show what would leave, byte for byte, and approve it; with --images, what a person must see before training."""
    if images:
        from silo.images.review_command import review_images

        if page is not None:
            raise SetupError(
                "review", expected="--images alone", got="--images with --page or --text"
            )
        review_images(
            site, data, private, clear=clear or [], leave_out=leave_out or [], listed=listed
        )
        return
    if data or private or listed or clear or leave_out:
        remedy = (
            "silo review --images with the same options; or silo review SITE for what would leave."
        )
        raise SetupError(
            "review", expected="--images with these options", got="no --images", remedy=remedy
        )
    if site is None:
        raise SetupError(
            "review", expected="the site's folder", got="no SITE", remedy="silo review SITE"
        )

    from silo.review.command import review_submission

    review_submission(Site(site).require(), page=page)


def approve(
    site: SiteArgument,
    digest: Annotated[str, typer.Option(help="The digest that `silo review` printed.")],
    despite_fail: Annotated[
        bool,
        typer.Option(
            "--despite-fail", help="Although the leak audit failed; needs --role and --reason."
        ),
    ] = False,
    role: Annotated[
        str | None, typer.Option(help="With --despite-fail: who answers for it. Published.")
    ] = None,
    reason: Annotated[
        str | None, typer.Option(help="With --despite-fail: and why. Published.")
    ] = None,
) -> None:
    """Approve exactly the reviewed submission, which then leaves."""
    from silo.worker.approval import approve as record_approval
    from silo.worker.approval import load_draft

    place = Site(site).require()
    record_approval(place, digest.strip().lower(), _responsible(despite_fail, role, reason))
    size = sum(expert.file.bytes for expert in load_draft(place).experts)
    say(f"Approved. The worker signs and sends {digest[:16]}… ({human_bytes(size)} of weights).")


def _responsible(despite_fail: bool, role: str | None, reason: str | None) -> "Responsible | None":
    from ddm.protocol.submission import Responsible

    if despite_fail != (role is not None) or despite_fail != (reason is not None):
        given = [
            name for name, value in (("--role", role), ("--reason", reason)) if value is not None
        ]
        got = " and ".join(["--despite-fail"] * despite_fail + given)
        raise SetupError(
            "approve", expected="--despite-fail, --role and --reason together", got=f"{got} alone"
        )
    return (
        Responsible(role=_said("--role", role), reason=_said("--reason", reason))
        if despite_fail
        else None
    )


def _said(name: str, text: str | None) -> str:
    """Check what will be published."""
    if not text or not text.strip() or len(text) > 400:
        raise SetupError(name, expected="1 to 400 characters", got=f"{len(text or '')}")
    return text.strip()


def accept(
    site: SiteArgument,
    digest: Annotated[
        str,
        typer.Option(
            help="The plan's, as `silo status` shows it and `aggregator plan` printed it."
        ),
    ],
) -> None:
    """Accept exactly this plan, which brings networks that will see private images; the worker then begins."""
    from silo.plan.consent import accept as record_acceptance

    found = _checked_digest("--digest", digest)
    waiting = record_acceptance(Site(site).require(), found)
    what = (
        f"plan {waiting.plan_id}, with {', '.join(waiting.brings) or 'no network'}"
        if waiting
        else "in advance"
    )
    say(f"Accepted {found[:16]}…: {what}.")


def waive(
    site: SiteArgument,
    role: Annotated[str, typer.Option(help="Who answers for it, by role. Published.")],
    reason: Annotated[str, typer.Option(help="And why. Published.")],
    until: Annotated[
        str,
        typer.Option(
            metavar="DAY", help="Last day on which the experts may leave, such as 2027-03-31."
        ),
    ],
    plan_digest: Annotated[
        str | None,
        typer.Option(
            help="The plan's, as `aggregator plan` printed it; default: of the plan in work."
        ),
    ] = None,
) -> None:
    """Let experts leave whose leak audit cannot tell, for one plan and until a day; what failed is never waived."""
    from ddm.protocol.base import now_utc
    from ddm.protocol.submission import Waiver
    from silo.plan.waiver import end_of, write_waiver

    place = Site(site).require()
    chosen, expires_at = _plan_to_waive(place, plan_digest), end_of(until)
    if expires_at <= now_utc():
        raise SetupError("--until", expected="a day to come", got=until)
    write_waiver(
        place,
        Waiver(
            role=_said("--role", role),
            reason=_said("--reason", reason),
            plan_digest=chosen,
            verdict="inconclusive",
            expires_at=expires_at,
        ),
    )
    say(
        f"Waived an inconclusive audit for plan {chosen[:16]}… until {expires_at:%Y-%m-%d %H:%M %Z}, in policy.toml."
    )
    say(f"The worker reads it when it starts: silo run {site}")


def _plan_to_waive(place: Site, plan_digest: str | None) -> str:
    from silo.worker.life import IDLE
    from silo.worker.state import load_state, state_path

    if plan_digest is None:
        state = load_state(state_path(place.private))
        if state.state in IDLE or state.plan_digest is None:
            remedy = "Run `silo run SITE` first, or give --plan-digest, as the aggregator's operator reads it out."
            expected = "a plan in work, or --plan-digest"
            raise SetupError("waive", expected=expected, got=f"state {state.state}", remedy=remedy)
        return state.plan_digest
    return _checked_digest("--plan-digest", plan_digest)


def _checked_digest(name: str, text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", found := text.strip().lower()):
        raise SetupError(name, expected="64 hexadecimal digits", got=ascii(text[:80]))
    return found


def retrain(
    site: SiteArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Train again for the plan in work, on the images as they are now; shows first what that costs."""
    from silo.worker.retraining import assess_retraining
    from silo.worker.retraining import retrain as start_over

    place = Site(site).require()
    state, price, changed = assess_retraining(place)
    images = (
        "are others than those scanned for this plan"
        if changed
        else "are those that were scanned for this plan"
    )
    say(f"Plan {state.plan_id}: the images {images}. Training again costs {price}.")
    if price.affordable and not yes:
        confirm("Throw away what was trained, and train again?")
    start_over(place)
    say(f"Ready. The worker begins with the images: silo run {site}")


def withdraw(site: SiteArgument, passphrase_file: PassphraseOption = None) -> None:
    """Give the present plan up, in any state, or take back what was accepted; the site then waits for the next one."""
    from silo.worker.state import load_state
    from silo.worker.withdrawal import describe_consequences
    from silo.worker.withdrawal import withdraw_from_plan as give_up

    place = Site(site).require()
    key, before = open_key(place, passphrase_file), load_state(place.private / "state.json")
    state = give_up(place, key)
    say(f"Gave up plan {state.plan_id}. {describe_consequences(before)}")
    say(
        f"The aggregator is told while the site is connected: silo run {site}, which then waits for the next plan."
    )
