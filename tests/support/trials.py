"""Trials: a command on a copy of a federation, disturbed at one call that changes the disk, and then given again."""

import re
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddm.protocol.base import sha256_file
from ddm.trust.keys import PublicKey, SigningKey
from tests.support.faulty_disk import Commands, Ended, Fault
from tests.support.federation import PASSPHRASE
from tests.support.stages import Case, make_stages

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


class Bench:
    """Prepared stages, and a folder for one trial at a time.

    Args:
        folder: where all of it is.
        commands: runs the commands.
        until: the last stage that is needed.
        thorough: whether to run all checks after a trial, in place of the first, which is quick.
    """

    def __init__(
        self, folder: Path, commands: Commands, *, until: str = "published", thorough: bool = True
    ) -> None:
        self.folder = folder
        self.commands = commands
        self.thorough = thorough
        self.stages = make_stages(folder / "stages", until)
        self._known: dict[str, Undisturbed] = {}

    @contextmanager
    def copy(self, case: Case) -> Iterator[Path]:
        """Yield a copy of the case's stage."""
        at = self.folder / "trial"
        shutil.copytree(self.stages[case.stage], at, symlinks=True)
        try:
            yield at
        finally:
            shutil.rmtree(at)

    def run(self, words: list[str], fault: Fault | None = None) -> Ended:
        """Run a command; whatever happens, nobody sees a stack trace."""
        done = self.commands.run(*words, fault=fault)
        assert "Traceback" not in done.said, done.said
        assert done.code != 1, done.said
        return done

    def undisturbed(self, case: Case) -> Undisturbed:
        """Run a case without a fault, once."""
        if case.name not in self._known:
            with self.copy(case) as at:
                words = case.typed(case.words, at)
                done = self.run(words, Fault([at]))
                assert done.code == 0, done.said
                once = read_tree(at)
                self._again(case, words, at)
                twice = read_tree(at).keys()
            with self.copy(case) as at:
                full = self.run(case.typed(case.words, at), Fault([at], full=at / "never"))
            self._known[case.name] = Undisturbed(done.num_calls, full.num_calls, once, twice)
        return self._known[case.name]

    def kill(self, case: Case, at_call: int) -> None:
        """Kill the command at a call, give it again, and compare with an undisturbed run."""
        expected = self.undisturbed(case)
        with self.copy(case) as at:
            words = case.typed(case.words, at)
            killed = self.run(words, Fault([at], at_call))
            assert killed.code == -9, (
                f"ended with {killed.code} before call {at_call}: {killed.said}"
            )
            self._again(case, words, at)
            self._compare(case, at, expected)
            self._check(case, at)

    def fill(self, case: Case, at_call: int) -> int:
        """Let the disk be full from a call on, make room, give the command again; return the first exit code."""
        expected = self.undisturbed(case)
        room = self.folder / "full"
        room.touch()
        with self.copy(case) as at:
            before = read_tree(at)
            words = case.typed(case.words, at)
            refused = self.run(words, Fault([at], at_call, room))
            room.unlink()
            assert refused.num_calls >= at_call, f"{refused.num_calls} calls, less than {at_call}"
            if refused.code:
                assert refused.code in DOCUMENTED, f"code {refused.code}: {refused.said}"
                assert len(refused.said.splitlines()) <= SCREEN
                assert "No space left" in refused.said, refused.said
                assert "Make room" in refused.said or "ree disk space" in refused.said, refused.said
                assert str(at) in refused.said, f"does not name what is full: {refused.said}"
            lost = (before.keys() & expected.once.keys()) - read_tree(at).keys()
            assert not lost or not refused.code, f"gone: {lost}"
            if refused.code:
                self._again(case, words, at)
            self._compare(case, at, expected)
            self._check(case, at)
        return refused.code

    def _again(self, case: Case, words: list[str], at: Path) -> None:
        done = self.run(words)
        if done.code in case.instead:
            done = self.run(case.typed(case.instead[done.code], at))
        assert done.code == 0, f"given again: {done.code}: {done.said}"

    def _check(self, case: Case, at: Path) -> None:
        for words in case.checks if self.thorough else case.checks[:1]:
            done = self.run(case.typed(words, at))
            assert done.code == 0, f"{words}: {done.code}: {done.said}"

    def _compare(self, case: Case, at: Path, expected: Undisturbed) -> None:
        found = read_tree(at)
        assert found.keys() in (expected.once.keys(), expected.twice), (
            found.keys() ^ expected.once.keys()
        )
        for name in case.same:
            assert found[name] == expected.once[name], name
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
