"""The frameworks we are compared with. Each is a file here with one function, `prepare`, and runs if it is installed.

"Installed" is what can be imported, from this environment or from a folder of unpacked wheels (`--peers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

PEER_FOLDER = Path(".peers")
"""of unpacked wheels, looked for in the current directory where none is named"""

PEER_RECOMPUTE = ("none", "full")
"""what peers can be told of recomputation"""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A way in which a framework trains on one device."""

    name: str
    precision: str
    device_type: str
    """of device: cuda or cpu"""
    module: str
    """of this package, with a function `prepare`"""
    packages: tuple[str, ...]
    """packages that must be importable; the first gives its version"""

    def missing(self, folder: str) -> list[str]:
        """Packages that can be imported neither from the folder nor from this environment."""
        return [name for name in self.packages if not _can_import(name, folder)]


PEERS = (
    Peer(
        name="torchtitan",
        precision="bf16",
        device_type="cuda",
        module="torchtitan",
        packages=("torchtitan", "torchdata"),
    ),
    Peer(
        name="torchtitan",
        precision="fp8",
        device_type="cuda",
        module="torchtitan_float8",
        packages=("torchtitan", "torchdata", "torchao"),
    ),
    Peer(name="transformers", precision="bf16", device_type="cuda", module="transformers", packages=("transformers",)),
    Peer(name="transformers", precision="fp32", device_type="cpu", module="transformers", packages=("transformers",)),
)
PEER_NAMES = tuple(dict.fromkeys(peer.name for peer in PEERS))


def find_peer(name: str, precision: str) -> Peer:
    return next(peer for peer in PEERS if (peer.name, peer.precision) == (name, precision))


def _can_import(name: str, folder: str) -> bool:
    # Asked of the finder, not imported: an import of a framework takes seconds, and here only its place matters.
    return bool(folder and PathFinder.find_spec(name, [folder])) or find_spec(name) is not None
