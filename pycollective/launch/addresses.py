"""The addresses under which this host can be reached."""

from __future__ import annotations

import importlib
import socket
from ipaddress import ip_address
from typing import Any

LOOPBACK = "127.0.0.1"


def addresses_of_this_host() -> list[str]:
    """The addresses of this host's interfaces that are up, IPv4 first, without loopback and link-local ones."""
    psutil: Any = importlib.import_module("psutil")  # a job on one host needs no addresses
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family in families and "%" not in entry.address  # "%": link-local
    }
    usable = [text for text in found if not ip_address(text).is_loopback and not ip_address(text).is_link_local]
    return sorted(usable, key=lambda text: (ip_address(text).version, int(ip_address(text))))
