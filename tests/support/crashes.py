"""A crash in the middle of a command, for tests that cannot kill the process in which they run."""


class Crash(BaseException):
    """Raised where a test would have the process killed; no handler of `Exception` catches it."""
