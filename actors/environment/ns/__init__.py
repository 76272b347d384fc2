"""Driver `ns`: sandboxes from Linux namespaces and an overlay file system, as root or unprivileged.

`NsDriver` is loaded when it is asked for: the zygote imports its own modules from here and has no site-packages.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from odradek.actors.environment.ns.driver import NsDriver as NsDriver


def __getattr__(name: str) -> Any:
    if name == "NsDriver":
        from odradek.actors.environment.ns.driver import NsDriver

        return NsDriver
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
