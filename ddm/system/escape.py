"""Show text that others may have sent: control characters become escapes, so that no terminal obeys them."""

import re

# Also what turns the direction of writing, breaks a line or has no width, and halves of characters.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff]"
)
_BREAK = re.compile(r"[\t\n]")


def escape_control(text: str, *, one_line: bool = False) -> str:
    """Return the text with control characters as escapes; with `one_line`, tabs and line breaks as well."""
    text = _CONTROL.sub(_escape, text)
    if one_line:
        text = _BREAK.sub(_escape, text)
    return text


def _escape(match: re.Match[str]) -> str:
    # Without the quotes that `ascii` puts around it.
    return ascii(match.group())[1:-1]
