"""`silo review`: what would leave, on a page of this machine, or as text."""

import sys

from ddm.errors import SetupError
from ddm.system.console import say
from ddm.system.guard import end_with_parent
from silo.config import Site
from silo.review.facts import read_review_facts
from silo.review.text import review_text
from silo.worker.state import load_state, state_path


def review_submission(site: Site, *, page: bool | None) -> None:
    """Show the draft that waits for approval.

    Args:
        site: this silo's.
        page: whether to serve the page; None serves it where a person sits at a terminal.

    Raises:
        SetupError: nothing waits for approval.
        ApprovalError: a file is not the one that the draft lists.
        KeyboardInterrupt: Ctrl-C while the page is served.
    """
    state = load_state(state_path(site.private))
    if state.state != "awaiting_approval":
        raise SetupError(
            "review",
            expected="a submission that waits for approval",
            got=f"state {state.state}",
            remedy="Keep `silo run SITE` running; `silo status SITE` shows how far it is.",
        )
    # Reading compares every file with the draft's digest: what a person is shown is what would leave.
    facts = read_review_facts(site)
    if page is None:
        page = sys.stdout.isatty()
    if not page:
        say(review_text(site, facts))
        return
    # Anybody who has the page's address may approve: no page of `silo run` stays open without it.
    end_with_parent()
    # Here, since they load torch and starlette, which the text does not need.
    from silo.review.samples import ExpertSheets
    from silo.review.server import serve_approval

    sheets = ExpertSheets(site, facts)

    def announce(url: str) -> None:
        # The page answers by now, and shows each sample as soon as it is drawn.
        sheets.start()
        say(f"Open in a browser on this machine: {url}")
        say(
            "Anybody who has this address may read and approve. Ctrl-C ends the page; --text prints it here instead."
        )

    try:
        serve_approval(site, facts, sheets, announce)
    finally:
        sheets.end()
    # Approved on the page, or by a command meanwhile: the worker may have gone on.
    state = load_state(state_path(site.private))
    silo_id = site.settings().silo_id
    say(f"The page has ended. {silo_id}: {state.state}; what comes next: silo status {site.path}")
