"""Flower's log, in which received texts are one line each and no terminal obeys them."""

import logging

from flwr.supercore.logger import FLOWER_LOGGER, update_console_handler

from ddm.system.escape import escape_control


def keep_lines_plain() -> None:
    """Let Flower log each message as one line without colours, control characters as escapes.

    The attack: who sends a message chooses texts that Flower logs. They would forge lines, which our programs read, and
    steer the terminal of who reads the log.
    """
    update_console_handler(colored=False)
    for handler in FLOWER_LOGGER.handlers:
        handler.addFilter(_escape_message)


def _escape_message(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if record.exc_info:
        # An exception's text may quote what was received.
        text += "\n" + logging.Formatter().formatException(record.exc_info)
    record.msg = escape_control(text, one_line=True)
    # They are in the message now.
    record.args = ()
    record.exc_info = None
    record.exc_text = None
    return True
