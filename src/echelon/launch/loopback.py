"""Ranks of one machine talk over its loopback interface."""

from __future__ import annotations

import os
import socket

ADDRESS = "127.0.0.1"


def use_loopback() -> None:
    """Tell gloo in this process to use the loopback interface, unless the user has named one.

    Left alone, gloo asks what this machine's host name means, which fails or takes seconds on a laptop that changes
    networks.
    """
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
