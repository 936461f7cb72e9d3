"""Rootless podman as an ordinary user of this machine, made for a test and gone after it."""

import os
import pwd
import resource
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

AVAILABLE = os.geteuid() == 0 and all(
    map(
        shutil.which, ("podman", "runuser", "useradd", "slirp4netns", "fuse-overlayfs", "newuidmap")
    )
)
BASE = "docker.io/library/python:3.11-slim-bookworm"
HOST = "10.0.2.2"  # how slirp4netns calls the machine


@dataclass(frozen=True)
class Podman:
    """Podman of one ordinary user.

    Attributes:
        user: its name.
        home: its home folder, with its containers.
        runtime: its XDG_RUNTIME_DIR.
    """

    user: str
    home: Path
    runtime: Path

    @property
    def prefix(self) -> list[str]:
        """A clean environment of that user."""
        known = {
            "HOME": self.home,
            "XDG_RUNTIME_DIR": self.runtime,
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        }
        return ["runuser", "-u", self.user, "--", "env", "-i", "-C", str(self.home),
                *(f"{name}={value}" for name, value in known.items())]  # fmt: skip

    def call(
        self, *words: object, stdin: bytes | None = None, check: bool = True
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run podman to its end."""
        command = [*self.prefix, "podman", *map(str, words)]
        result = subprocess.run(command, input=stdin, capture_output=True, check=False)
        assert not check or result.returncode == 0, (result.stdout + result.stderr).decode(
            errors="replace"
        )[-4000:]
        return result

    def configure(self) -> None:
        """Write what this machine needs: no more than its own limits, and the machine reachable from a container."""
        folder = self.home / ".config" / "containers"
        folder.mkdir(parents=True)
        limits = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
        hard = {name: min(resource.getrlimit(limit)[1], 20_000) for name, limit in limits.items()}
        ulimits = ", ".join(f'"{name}={value}:{value}"' for name, value in hard.items())
        engine = ['network_cmd_options = ["allow_host_loopback=true"]']
        if Path("/sys/fs/cgroup/unified").exists():
            # crun refuses machines that have both versions of control groups.
            engine += ['runtime = "runc"', 'cgroup_manager = "cgroupfs"']
        (folder / "containers.conf").write_text(
            f"[containers]\ndefault_ulimits = [{ulimits}]\n[engine]\n" + "\n".join(engine) + "\n"
        )
        (folder / "storage.conf").write_text(
            '[storage]\ndriver = "overlay"\n[storage.options.overlay]\nmount_program = "/usr/bin/fuse-overlayfs"\n'
        )

    def with_digest(self, image: str) -> str:
        """Name an image by its digest."""
        form = "{{index .RepoDigests 0}}"
        return self.call("image", "inspect", "--format", form, image).stdout.decode().strip()

    def base_image(self, scratch: Path) -> str:
        """Return an image with Python: from the registry, else made of Debian's packages; skips without either."""
        if self.call("pull", "--quiet", BASE, check=False).returncode == 0:
            return BASE
        if not shutil.which("debootstrap"):
            pytest.skip("no registry answers, and debootstrap is not installed")
        include = "--include=python3,python3-venv,ca-certificates"
        command = [
            "debootstrap",
            "--variant=minbase",
            include,
            "bookworm",
            scratch,
            "http://deb.debian.org/debian",
        ]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no registry answers, and no archive of Debian")
        archive = scratch.with_suffix(".tar")
        with tarfile.open(archive, "w") as tar:
            tar.add(scratch, ".", filter=_without_devices)
        archive.chmod(0o644)
        self.call("import", "--quiet", archive, "localhost/base:latest")
        shutil.rmtree(scratch)
        archive.unlink()
        return "localhost/base:latest"

    def execute(self, container: str, command: Sequence[str], stdin: bytes = b"") -> bytes:
        """Run a program inside a container that runs."""
        return self.call("exec", "-i", container, *command, stdin=stdin).stdout


def _without_devices(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out device files, which an ordinary user's podman may not make."""
    if member.ischr() or member.isblk():
        return None
    return member


@contextmanager
def podman_user(name: str) -> Iterator[Podman]:
    """An ordinary user with containers of its own."""
    subprocess.run(["useradd", "--create-home", name], check=True, capture_output=True)
    entry = pwd.getpwnam(name)
    runtime = Path(f"/run/user/{entry.pw_uid}")
    podman = Podman(name, Path(entry.pw_dir), runtime)
    try:
        # of an earlier user with this number, whose test was killed
        shutil.rmtree(runtime, ignore_errors=True)
        runtime.mkdir(parents=True, mode=0o700)
        podman.configure()
        for path in (runtime, *podman.home.rglob("*")):
            shutil.chown(path, name, name)
        yield podman
    finally:
        podman.call("rm", "--all", "--force", "--time=5", check=False)
        podman.call("rmi", "--all", "--force", check=False)
        podman.call("unshare", "rm", "-rf", podman.home / ".local", check=False)
        # ends the process that holds the user's namespace
        podman.call("system", "migrate", check=False)
        shutil.rmtree(runtime, ignore_errors=True)
        subprocess.run(["userdel", "--remove", name], check=False, capture_output=True)
