"""Trials: a command on a copy of a federation, disturbed at one call that changes the disk, and then given again."""

import re
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddm.protocol.base import sha256_file
from ddm.trust.keys import PublicKey, SigningKey
from tests.support.faulty_disk import CommandExit, CommandServer, Fault
from tests.support.federation import PASSPHRASE
from tests.support.stages import CommandCase, make_stages

PLAN_ID = re.compile(r"tiny-[0-9a-f]{8}")
OLD_KEY = re.compile(r"(?<=model-signing-)[0-9a-f]{16}")
PARTIAL = re.compile(r"(?<=\.p/)\d+$")
# what nobody reads, and the next try replaces
UNREAD = re.compile(r"(^|/)(\.[^/]*\.(part|new)|ceremony\.part)(/|$)")
DOCUMENTED = {8, 9}  # codes of a full disk
SCREEN = 24  # lines


@dataclass(frozen=True)
class Undisturbed:
    """A run to compare with.

    Attributes:
        num_kills: its calls that change the disk.
        num_full: those among them that need room.
        once: its files, with their digests.
        twice: the names of files where the command was given twice.
    """

    num_kills: int
    num_full: int
    once: Mapping[str, str]
    twice: Set[str]


class TrialBench:
    """Prepared stages, and a folder for one trial at a time.

    Args:
        folder: where all of it is.
        commands: runs the commands.
        until: the last stage that is needed.
        thorough: whether to run all checks after a trial, in place of the first, which is quick.
    """

    def __init__(
        self,
        folder: Path,
        commands: CommandServer,
        *,
        until: str = "published",
        thorough: bool = True,
    ) -> None:
        self.folder = folder
        self.commands = commands
        self.thorough = thorough
        self.stages = make_stages(folder / "stages", until)
        self._known: dict[str, Undisturbed] = {}

    @contextmanager
    def copy(self, case: CommandCase) -> Iterator[Path]:
        """Yield a copy of the case's stage."""
        at = self.folder / "trial"
        shutil.copytree(self.stages[case.stage], at, symlinks=True)
        try:
            yield at
        finally:
            shutil.rmtree(at)

    def run(self, words: list[str], fault: Fault | None = None) -> CommandExit:
        """Run a command; whatever happens, nobody sees a stack trace."""
        result = self.commands.run(*words, fault=fault)
        assert "Traceback" not in result.output, result.output
        assert result.code != 1, result.output
        return result

    def undisturbed(self, case: CommandCase) -> Undisturbed:
        """Run a case without a fault, once."""
        if case.name not in self._known:
            with self.copy(case) as at:
                words = case.command_line(case.words, at)
                result = self.run(words, Fault([at]))
                assert result.code == 0, result.output
                once = read_tree(at)
                self._repeat(case, words, at)
                twice = read_tree(at).keys()
            with self.copy(case) as at:
                full = self.run(case.command_line(case.words, at), Fault([at], full=at / "never"))
            self._known[case.name] = Undisturbed(result.num_calls, full.num_calls, once, twice)
        return self._known[case.name]

    def kill(self, case: CommandCase, at_call: int) -> None:
        """Kill the command at a call, give it again, and compare with an undisturbed run."""
        expected = self.undisturbed(case)
        with self.copy(case) as at:
            words = case.command_line(case.words, at)
            killed = self.run(words, Fault([at], at_call))
            assert killed.code == -9, (
                f"ended with {killed.code} before call {at_call}: {killed.output}"
            )
            self._repeat(case, words, at)
            self._compare(case, at, expected)
            self._check(case, at)

    def fill(self, case: CommandCase, at_call: int) -> int:
        """Let the disk be full from a call on, make room, give the command again; return the first exit code."""
        expected = self.undisturbed(case)
        room = self.folder / "full"
        room.touch()
        with self.copy(case) as at:
            before = read_tree(at)
            words = case.command_line(case.words, at)
            refused = self.run(words, Fault([at], at_call, room))
            room.unlink()
            assert refused.num_calls >= at_call, f"{refused.num_calls} calls, less than {at_call}"
            if refused.code:
                assert refused.code in DOCUMENTED, f"code {refused.code}: {refused.output}"
                # What the command had shown before, such as the table of a plan, is not counted.
                error = refused.output[refused.output.rindex("error:") :]
                assert len(error.splitlines()) <= SCREEN, refused.output
                assert "No space left" in refused.output, refused.output
                assert (
                    "Make room" in refused.output
                    or "ree space" in refused.output
                    or "ree disk space" in refused.output
                ), refused.output
                assert str(at) in refused.output, f"does not name what is full: {refused.output}"
            lost = (before.keys() & expected.once.keys()) - read_tree(at).keys()
            assert not lost or not refused.code, f"gone: {lost}"
            if refused.code:
                self._repeat(case, words, at)
            self._compare(case, at, expected)
            self._check(case, at)
        return refused.code

    def _repeat(self, case: CommandCase, words: list[str], at: Path) -> None:
        result = self.run(words)
        if result.code in case.instead:
            result = self.run(case.command_line(case.instead[result.code], at))
        assert result.code == 0, f"given again: {result.code}: {result.output}"

    def _check(self, case: CommandCase, at: Path) -> None:
        checks = case.checks
        if not self.thorough:
            checks = checks[:1]
        for words in checks:
            result = self.run(case.command_line(words, at))
            assert result.code == 0, f"{words}: {result.code}: {result.output}"

    def _compare(self, case: CommandCase, at: Path, expected: Undisturbed) -> None:
        files = read_tree(at)
        assert files.keys() in (expected.once.keys(), expected.twice), (
            files.keys() ^ expected.once.keys()
        )
        for name in case.same:
            assert files[name] == expected.once[name], name
        for public in (at / "fed" / "keys").glob("*.pub"):
            key = SigningKey.load(public.with_suffix(".key"), PASSPHRASE)
            assert key.public == PublicKey.load(public), public.name


def read_tree(at: Path) -> dict[str, str]:
    """Return the digest of every file that somebody may read, by name.

    A plan's id and a key's fingerprint are random, and left out; so is the number of entries in a part of a tile of the
    log, of which there is one for each length that the log had when it was made public.
    """
    names = {
        path.relative_to(at).as_posix(): path for path in sorted(at.rglob("*")) if path.is_file()
    }
    read = {name: path for name, path in names.items() if not UNREAD.search(name)}
    return {
        OLD_KEY.sub("{key}", PARTIAL.sub("n", PLAN_ID.sub("{plan}", name))): sha256_file(path)
        for name, path in read.items()
    }
