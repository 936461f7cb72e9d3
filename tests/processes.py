"""Whether processes have really ended: a zombie that its parent has not collected yet has."""

from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process still runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
