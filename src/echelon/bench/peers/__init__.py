"""The frameworks that we compare with. Each is a module here with a `prepare` function, and runs if it is installed.

A package is installed if it can be imported, from this environment or from a folder of unpacked wheels (`--peers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

PEER_FOLDER = Path(".peers")
"""of unpacked wheels, in the current directory: the default of `--peers`"""

PEER_RECOMPUTE = ("none", "full")
"""the recompute options of peers"""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One framework, in one precision, on one type of device."""

    name: str
    """also of its module in this package"""
    precision: str
    device_type: str
    """cuda or cpu"""
    packages: tuple[str, ...]
    """packages that it requires; the first one's version is reported"""
    prepare: str = "prepare"
    """the function of the module that builds a step"""
    families: tuple[str, ...] = ("llama",)
    """of models that it has"""

    def missing(self, folder: str) -> list[str]:
        """Required packages that neither the folder nor this environment has."""
        return [name for name in self.packages if not _can_import(name, folder)]


PEERS = (
    Peer(name="compiled", precision="bf16", device_type="cuda", packages=("torch",), families=("gpt", "llama")),
    Peer(name="compiled", precision="fp32", device_type="cpu", packages=("torch",), families=("gpt", "llama")),
    Peer(name="torchtitan", precision="bf16", device_type="cuda", packages=("torchtitan", "torchdata")),
    Peer(
        name="torchtitan",
        precision="fp8",
        device_type="cuda",
        prepare="prepare_float8",
        packages=("torchtitan", "torchdata", "torchao"),
    ),
    Peer(name="transformers", precision="bf16", device_type="cuda", packages=("transformers",)),
    Peer(name="transformers", precision="fp32", device_type="cpu", packages=("transformers",)),
)
PEER_NAMES = tuple(dict.fromkeys(peer.name for peer in PEERS))


def find_peer(name: str, precision: str) -> Peer:
    return next(peer for peer in PEERS if (peer.name, peer.precision) == (name, precision))


def _can_import(name: str, folder: str) -> bool:
    # Find, do not import: importing a framework takes seconds.
    return bool(folder and PathFinder.find_spec(name, [folder])) or find_spec(name) is not None
