"""New passphrases: random ones in files, and which ones protect a key whose encrypted file somebody copied."""

import os
import secrets
import stat
from pathlib import Path

from ddm.errors import PassphraseError

_NUM_RANDOM_BYTES = 24
_NOT_OWNER = 0o077
_FOLDER_MODE = 0o755
MIN_CHARACTERS = 12
_MIN_COUNTED = 10
ADVICE = f"at least {MIN_CHARACTERS} characters, for example four random words"


def require_strong(passphrase: bytes, subject: str) -> None:
    """Check that a new passphrase is long and varied enough.

    A character counts unless it repeats or follows the one before it, as in ``aaa`` and ``123``, or follows a character
    that it followed before, as in ``abcabc``. Words of a dictionary are not looked up.

    Raises:
        PassphraseError: it is not.
    """
    text = passphrase.decode("utf-8", "replace")
    if len(text) < MIN_CHARACTERS:
        got = "a shorter one"
    elif _num_counted(text) < _MIN_COUNTED:
        got = "one that repeats itself or counts on, such as aaa, 123 or abcabc"
    else:
        return
    raise PassphraseError(
        subject,
        expected=f"a new passphrase of {ADVICE}",
        got=got,
        remedy="Choose four random words, or make a passphrase with: openssl rand -base64 18",
    )


def _num_counted(text: str) -> int:
    pairs = set()
    for before, after in zip(text, text[1:], strict=False):
        if abs(ord(after) - ord(before)) > 1:
            pairs.add((before, after))
    return 1 + len(pairs)


def write_private_passphrase(path: Path) -> None:
    """Make a file with a random passphrase, which its owner alone can read, and the folders that are missing above it.

    Raises:
        FileExistsError: there is something at the path.
    """
    missing_folders = [folder for folder in path.absolute().parents if not folder.exists()]
    for folder in reversed(missing_folders):
        folder.mkdir(exist_ok=True)
        # The file may be given to the user of a service, who must pass through, whatever the umask is.
        folder.chmod(_FOLDER_MODE)
    # Its mode is set when it is made: nobody can open it in between.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secrets.token_urlsafe(_NUM_RANDOM_BYTES)}\n")


def check_private_passphrase(path: Path) -> None:
    """Refuse a file that `write_private_passphrase` of this user did not make.

    The attack: another user of the machine, in a folder such as /tmp, puts a file or a link there beforehand, and knows
    the passphrase of the keys that are about to be made.

    Raises:
        PassphraseError: somebody else owns it, others may read or write it, or it is a link.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        got = "a link or a special file"
    elif status.st_uid != os.geteuid():
        got = "a file of another user"
    elif status.st_mode & _NOT_OWNER:
        got = f"a file with the mode {stat.S_IMODE(status.st_mode):o}, which others can open"
    else:
        return
    raise PassphraseError(
        str(path),
        expected="no file yet, or one of your own that nobody else can open (mode 600)",
        got=got,
        remedy="Name a file that is not there yet; or, if the passphrase in this one is yours alone, give it with "
        "--passphrase-file.",
    )
