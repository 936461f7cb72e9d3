"""Which files make `aggregator run` a service: its unit, and the script that makes its user."""

from aggregator.config import Federation
from ddm.services.places import hidden_by_systemd, installed, needs_person, require_passphrase_file
from ddm.services.rendering import render


def as_user(federation: Federation, user: str) -> dict[str, str]:
    """Return the files of a service of its own user.

    Raises:
        SetupError: no passphrase file is named, or a path cannot be quoted.
    """
    settings, folder = federation.settings(), federation.path.resolve()
    secret = require_passphrase_file(
        settings.passphrase_file, str(federation.path / "federation.toml")
    ).resolve()
    program, roots = installed("aggregator")
    unit = render(
        "aggregator",
        "aggregator.service.jinja",
        federation=settings.name,
        user=user,
        command=[program, "run", folder],
        readable=hidden_by_systemd((secret, *roots)),
        folder=folder,
        at_home=hidden_by_systemd((folder,)),
        low_port=settings.port < 1024,
        needs_person=needs_person(),
    )
    script = render(
        "aggregator",
        "prepare-user.sh.jinja",
        user=user,
        folder=folder,
        passphrase_file=secret,
        program=program,
    )
    return {f"archipelago-{settings.name}-aggregator.service": unit, "prepare.sh": script}
