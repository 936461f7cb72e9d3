"""The command `aggregator run`: carry the plan to the silos and their submissions back."""

from aggregator.commands.options import FederationArgument, PassphraseOption, federation_passphrase
from aggregator.config import Federation
from ddm.io.own_folder import require_own_path
from ddm.system.console import say


def run(fed: FederationArgument, passphrase_file: PassphraseOption = None) -> None:
    """Deliver the plan, receive submissions, send receipts; ends when every silo has its receipt."""
    from ddm.publishing.keys import load_key

    federation = Federation(fed).require_owner()
    # Programs are started by files in it.
    require_own_path(federation.path)
    # Raises where no plan is in force, before a passphrase is asked for.
    federation.current_plan()
    secret = federation_passphrase(federation, passphrase_file)
    # A wrong passphrase shows now, not when the first submission arrives.
    load_key(federation, "receipts", secret)

    from aggregator.runtime.running import run_federation

    plan = run_federation(federation, secret)
    say(
        f"Every silo has its receipt: {', '.join(plan.silos)}. Next: aggregator release {fed} --out RELEASE"
    )
