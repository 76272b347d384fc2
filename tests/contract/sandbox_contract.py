"""The contract of a sandbox driver. Every driver runs all of it; a subclass adds its own regressions.

A subclass is a test class with a `driver` fixture (a started driver over `sandbox_images`). Nothing here knows how a
driver works; nothing asserts a time, except that what must return at once is given far less than what it must not wait
for.
"""

from contract.sandbox_bounds import BoundsContract
from contract.sandbox_commands import CommandsContract
from contract.sandbox_files import FilesContract
from contract.sandbox_world import demo_spec, sandbox_images, sh

__all__ = ["SandboxContract", "demo_spec", "sandbox_images", "sh"]


class SandboxContract(CommandsContract, FilesContract, BoundsContract):
    """Tests by the sentences of `protocol.py` and DESIGN section 6."""
