"""Commands around one plan, from `silo run` to `silo withdraw`."""

import json
import re
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.errors import SetupError
from ddm.protocol.base import require_text
from ddm.system.console import ask, confirm, human_bytes, say
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
        Part | None, typer.Option(help="Run only this half of the site, for a service of its own.")
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Wait for a waiver even without a terminal, instead of ending."
        ),
    ] = False,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Take a plan, train, draw the statistics, wait for approval, send; ends when the receipt arrives."""
    opened_site = Site(site).require()
    # The courier runs as a user who can read neither key nor passphrase.
    if only is Part.COURIER:
        from silo.courier.service import run_courier

        run_courier(opened_site)
        return

    opened_site.require_own_path()
    from silo import running

    # The key signs the submission at the end; a wrong passphrase must show before days of training.
    key = open_key(opened_site, passphrase_file)
    # In two processes neither half starts the other: each is a service of its own user.
    if only is Part.WORKER:
        state = running.run_worker(opened_site, key, wait=wait)
    else:
        state = running.run_both(opened_site, key, wait=wait)
    silo_id = opened_site.settings().silo_id
    say(f"[{silo_id}] done: submission {state.sequence} of plan {state.plan_id} is {state.state}.")
    say(f"To wait for the next plan: silo run {site}")


def status(
    site: SiteArgument,
    as_json: JsonOption = False,
) -> None:
    """Show the state of the work, its progress, speed and learning curves, and the next command."""
    from silo.worker.status import read_status

    opened_site = Site(site).require()
    site_status = read_status(opened_site)
    plan_ahead = site_status.plan_ahead
    if plan_ahead is not None:
        # Takes seconds, since it loads torch: so only where a person may want to know before days of training.
        from silo.worker.estimating import estimate_plan

        site_status = replace(site_status, estimate=estimate_plan(opened_site, *plan_ahead))
    if as_json:
        say(json.dumps(site_status.as_json()))
    else:
        say(site_status.text(draws_bars=sys.stdout.isatty()))


def pause(site: SiteArgument) -> None:
    """Stop the work at its next step and free memory and GPU; it stays stopped until `silo resume`."""
    from silo.worker.pause import pause as request_pause
    from silo.worker.status import read_status

    opened_site = Site(site).require_owner()
    request = request_pause(opened_site)
    say(f"Paused since {request.since}.")
    # The request is a file that the worker looks for, so that a worker which starts later obeys it as well.
    if read_status(opened_site).circumstances.running:
        say("The worker stops at its next step: see `silo status`.")
    say("The courier stays connected; the aggregator sees the state alone.")
    say(f"To go on where it stopped: silo resume {site}")


def resume(site: SiteArgument) -> None:
    """Let a paused site continue where it stopped."""
    from silo.worker.pause import resume as remove_pause
    from silo.worker.status import read_status

    opened_site = Site(site).require_owner()
    if not remove_pause(opened_site):
        say("This site is not paused.")
    elif read_status(opened_site).circumstances.running:
        say("Resumed: the worker goes on.")
    else:
        say(f"Resumed. No worker is running: silo run {site}")


def review(
    site: MaybeSiteArgument = None,
    page: Annotated[
        bool | None,
        typer.Option(
            "--page/--text",
            help="Show a web page on this machine, or text (default: a page if at a terminal).",
        ),
    ] = None,
    images: Annotated[
        bool, typer.Option("--images", help="Review flagged images instead of a submission.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="With --images: as in `silo scan`; no site is needed.")
    ] = None,
    private: Annotated[
        Path | None, typer.Option(file_okay=False, help="With --images: as in `silo scan`.")
    ] = None,
    listed: Annotated[
        bool,
        typer.Option("--list", help="With --images: list the images that wait for a decision."),
    ] = False,
    clear: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH", help="With --images: clear a file, or all files below a folder."
        ),
    ] = None,
    leave_out: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH|NUMBER",
            help="With --images: leave out a file, all files below a folder, or a picture of the last preview.",
        ),
    ] = None,
) -> None:
    """Show all data that would be sent, byte for byte, and approve it; with --images, review flagged images."""
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
    # These options would change nothing in the review of a submission.
    if data or private or listed or clear or leave_out:
        remedy = (
            "For images, repeat it with --images: `silo review SITE --images`. For a submission, "
            "name the site alone: `silo review SITE`."
        )
        raise SetupError(
            "review", expected="--images with these options", got="no --images", remedy=remedy
        )
    if site is None:
        raise SetupError(
            "review",
            expected="the site's folder",
            got="no SITE",
            remedy="Name the site: `silo review SITE`.",
        )

    from silo.review.command import review_submission

    review_submission(Site(site).require_owner(), page=page)


def approve(
    site: SiteArgument,
    digest: Annotated[str, typer.Option(help="The digest that `silo review` printed.")],
    despite_fail: Annotated[
        bool,
        typer.Option(
            "--despite-fail",
            help="Approve although the leak audit failed; needs --role and --reason.",
        ),
    ] = False,
    role: Annotated[
        str | None,
        typer.Option(help="With --despite-fail: role of the person responsible; it is published."),
    ] = None,
    reason: Annotated[
        str | None, typer.Option(help="With --despite-fail: the reason; it is published.")
    ] = None,
) -> None:
    """Approve exactly the reviewed submission, which is then sent."""
    from silo.worker.approval import approve as record_approval
    from silo.worker.approval import load_draft

    opened_site = Site(site).require_owner()
    responsible = _responsible(despite_fail, role, reason)
    # People copy the digest from a page, or hear it on the telephone.
    record_approval(opened_site, digest.strip().lower(), responsible)
    num_bytes = sum(expert.file.bytes for expert in load_draft(opened_site).experts)
    say(
        f"Approved. The worker signs and sends {digest[:16]}… ({human_bytes(num_bytes)} of weights)."
    )


def _responsible(despite_fail: bool, role: str | None, reason: str | None) -> "Responsible | None":
    from ddm.protocol.submission import Responsible

    options = {
        "--despite-fail": despite_fail,
        "--role": role is not None,
        "--reason": reason is not None,
    }
    # All three or none: an approval despite a failed audit names who is responsible, and why.
    present = [name for name, is_present in options.items() if is_present]
    if not present:
        return None
    if len(present) < len(options):
        raise SetupError(
            "approve",
            expected="--despite-fail, --role and --reason together",
            got=f"{' and '.join(present)} alone",
        )
    return Responsible(role=require_text(role, "--role"), reason=require_text(reason, "--reason"))


def accept(
    site: SiteArgument,
    digest: Annotated[
        str,
        typer.Option(help="Digest of the plan, as `silo status` and `aggregator plan` print it."),
    ],
) -> None:
    """Accept exactly this plan, whose networks will process private images; the worker then begins."""
    from silo.plan.consent import record_acceptance

    # By digest and not by name, so that the operator accepts the very bytes that were read out.
    plan_digest = _checked_digest("--digest", digest)
    waiting = record_acceptance(Site(site).require_owner(), plan_digest)
    accepted = "in advance"
    if waiting:
        accepted = f"plan {waiting.plan_id}, with {waiting.in_words}"
    say(f"Accepted {plan_digest[:16]}…: {accepted}.")


def waive(
    sites: Annotated[
        list[Path],
        typer.Argument(metavar="SITE...", file_okay=False, help="Folders of one or more sites."),
    ],
    role: Annotated[
        str | None, typer.Option(help="Role of the person responsible; it is published.")
    ] = None,
    reason: Annotated[str | None, typer.Option(help="The reason; it is published.")] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="DAY", help="Last day on which the experts may leave, such as 2027-03-31."
        ),
    ] = None,
    plan_digest: Annotated[
        str | None,
        typer.Option(
            help="Digest of the plan, as `aggregator plan` prints it (default: that of the plan in progress)."
        ),
    ] = None,
) -> None:
    """Allow experts to be sent whose leak audit is inconclusive, for one plan and until a day."""
    from ddm.protocol.submission import Waiver
    from silo.plan.waiver import parse_end, write_waiver
    from silo.worker.status import read_status

    opened_sites = [Site(site).require_owner() for site in sites]
    # A waiver is for one plan: it must not carry over to experts that nobody had in mind (docs/adr/0051).
    waived_digests = [_plan_to_waive(site, plan_digest) for site in opened_sites]
    for site, waived_digest in zip(opened_sites, waived_digests, strict=True):
        say(
            f"Plan {waived_digest[:16]}… of {site.settings().silo_id}: its experts may leave although the leak audit"
        )
        say("  is inconclusive, so that they may have memorised single images.")
    if role is None:
        role = ask("Role of the person responsible (published)", option="--role")
    if reason is None:
        reason = ask("Reason (published)", option="--reason")
    if until is None:
        until = ask(
            "Last day of the waiver, such as 2027-03-31", option="--until", parse=_checked_day
        )
    expires_at = parse_end(_checked_day(until))
    for site, waived_digest in zip(opened_sites, waived_digests, strict=True):
        waiver = Waiver(
            role=require_text(role, "--role"),
            reason=require_text(reason, "--reason"),
            plan_digest=waived_digest,
            # The only verdict that can be waived; an audit that failed needs `silo approve --despite-fail`.
            verdict="inconclusive",
            expires_at=expires_at,
        )
        write_waiver(site, waiver)
        circumstances = read_status(site).circumstances
        if circumstances.blocked:
            say(f"{site.settings().silo_id}: the worker was waiting for this waiver, and goes on.")
        elif circumstances.running:
            say(f"{site.settings().silo_id}: the worker reads the waiver when the audit needs it.")
        else:
            say(
                f"{site.settings().silo_id}: the worker reads the waiver when it starts: silo run {site.path}"
            )
    say(f"Waived until {expires_at:%Y-%m-%d %H:%M %Z}, in policy.toml.")


def _checked_day(text: str) -> str:
    """Return the end of a waiver, as it was typed, if it is still to come.

    Raises:
        SetupError: it is not an end of a waiver, or it is over.
    """
    from ddm.protocol.base import now_utc
    from silo.plan.waiver import parse_end

    if parse_end(text) <= now_utc():
        raise SetupError("--until", expected="a day in the future", got=text)
    return text


def _plan_to_waive(site: Site, plan_digest: str | None) -> str:
    """Return the digest of the plan that an operator names, else that of the plan in progress."""
    from silo.worker.life import IDLE
    from silo.worker.state import load_state, state_path

    if plan_digest is not None:
        return _checked_digest("--plan-digest", plan_digest)
    state = load_state(state_path(site.private))
    if state.state in IDLE or state.plan_digest is None:
        raise SetupError(
            "waive",
            expected="a plan in progress, or --plan-digest",
            got=f"state {state.state}",
            remedy=(
                "Let the site take the plan first: `silo run SITE`. Or give --plan-digest, as the "
                "aggregator's operator reads it out."
            ),
        )
    return state.plan_digest


def _checked_digest(name: str, text: str) -> str:
    digest = text.strip().lower()
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise SetupError(name, expected="64 hexadecimal digits", got=ascii(text[:80]))
    return digest


def retrain(
    site: SiteArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Train again for the plan in progress, on the present images; shows the cost first."""
    from silo.worker.retraining import assess_retraining
    from silo.worker.retraining import retrain as start_over

    opened_site = Site(site).require_owner()
    # New noise for other images costs epsilon once more, so that the price is shown first.
    state, price, changed = assess_retraining(opened_site)
    images = "are those that were scanned for this plan"
    if changed:
        images = "are others than those scanned for this plan"
    say(f"Plan {state.plan_id}: the images {images}. Training again costs {price}.")
    # Where the budget does not suffice, `retrain` below refuses, and there is nothing to confirm.
    if price.affordable and not yes:
        # A plan commonly costs most of a site's budget, so that a person decides (docs/adr/0044).
        confirm("Throw away what was trained, and train again?")
    start_over(opened_site)
    say(f"Ready. The worker begins with the images: silo run {site}")


def withdraw(
    site: SiteArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Leave the present plan, in any state, or take back an accepted submission; then wait for the next plan."""
    from silo.worker.state import load_state
    from silo.worker.withdrawal import (
        check_withdrawable,
        describe_consequences,
        withdraw_from_plan,
    )

    opened_site = Site(site).require_owner()
    # The leave is signed, so that nobody else can say it in this silo's name.
    key = open_key(opened_site, passphrase_file)
    state = load_state(opened_site.private / "state.json")
    check_withdrawable(state)
    say(f"Plan {state.plan_id}, state {state.state}. {describe_consequences(state)}")
    # A second call only finishes what an earlier one decided.
    if state.state != "withdrawn" and not yes:
        confirm("Give the plan up?")
    withdraw_from_plan(opened_site, key)
    say(f"Gave up plan {state.plan_id}.")
    say(
        f"The aggregator learns of it while the site is connected: silo run {site}, which then waits for the next plan."
    )
