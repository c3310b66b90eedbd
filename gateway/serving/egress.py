"""Which addresses a gateway may connect to when somebody else has named the host.

A name is looked up once, every address that it has is checked, and the connection goes to one of them: so a name
that later leads elsewhere (DNS rebinding) leads nowhere."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNICAST = ipaddress.ip_network("2000::/3")
"""All that is given out of IPv6. What is not has old ways to write an IPv4 address, or a site's own."""


def public(address: str) -> bool:
    """Whether the address is one of the public internet: not private, loopback, link-local or multicast."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        translated = ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF) if found in _NAT64 else None
        as_v4 = found.ipv4_mapped or found.sixtofour or translated
        if as_v4 is None and found not in _UNICAST:
            return False
        found = as_v4 or found
    return found.is_global and not found.is_multicast


def networks_of(setting: str) -> Sequence[IPv4Network | IPv6Network]:
    """Raises ValueError."""
    return [ipaddress.ip_network(one.strip()) for one in setting.split(",") if one.strip()]


def inner(address: str, networks: Sequence[IPv4Network | IPv6Network]) -> bool:
    """Whether the address is in one of these networks."""
    found = ipaddress.ip_address(address)
    return any(found in network for network in networks)
