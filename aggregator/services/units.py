"""Which files make `aggregator run` a service: its unit, and the script that makes its user."""

from aggregator.config import Federation
from ddm.services.units import Access, installed_program, render, require_passphrase_file


def service_files(federation: Federation, user: str) -> dict[str, str]:
    """Return the files of a service of its own user, by their names.

    Raises:
        SetupError: no passphrase file is named, or a path cannot be quoted.
    """
    settings = federation.settings()
    folder = federation.path.resolve()
    configuration = str(federation.path / "federation.toml")
    passphrase_file = require_passphrase_file(settings.passphrase_file, configuration)
    program = installed_program("aggregator")
    unit = render(
        "aggregator",
        "aggregator.service.jinja",
        federation=settings.name,
        user=user,
        command=[program.path, "run", folder],
        access=Access(reads=(passphrase_file, *program.folders), writes=(folder,)),
        # Ports below 1024 are root's, unless a service has the capability.
        has_low_port=settings.port < 1024,
    )
    script = render(
        "aggregator",
        "prepare-user.sh.jinja",
        user=user,
        folder=folder,
        passphrase_file=passphrase_file,
        program=program.path,
    )
    return {f"archipelago-{settings.name}-aggregator.service": unit, "prepare.sh": script}
