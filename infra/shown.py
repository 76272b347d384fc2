"""Text from outside (a model, a file, a name, a record) as a terminal or a page shows it. Pure.

Every way to a screen goes through `clean`: a command's answer, its progress, its error, the story of a session, a page.
A name is shown by `actors.tools.text.show_name`, which keeps it on one line too.
"""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def clean(text: str) -> str:
    """Control and direction characters written out; tabs and line feeds stay. CRLF counts as one line end."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text.replace("\r\n", "\n"))
