"""The `format`s of strings, as regular expressions.

Those of JSON schema that can be told by their letters, and those of pydantic's types. The expressions allow what
pydantic, `datetime` and `ipaddress` read: no second 60, no 29th of February in other years, no network with host
bits. Some formats cannot be told by an expression. They are taken, and allow any text.
"""

from __future__ import annotations

from functools import cache

UNENFORCED = frozenset(
    {
        *("binary", "password", "regex", "json-string"),
        *("path", "file-path", "directory-path", "socket-path"),
    }
)
"""Formats that are taken and not enforced."""

_FOUR_YEARS = "0[48]|[2468][048]|[13579][26]"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = f"(?:[0-9]{{2}}(?:{_FOUR_YEARS})|(?:{_FOUR_YEARS})00)"
_LONG, _SHORT = "(?:0[13578]|1[02])", "(?:0[469]|11)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:{_LONG}|{_SHORT})-(?:0[1-9]|[12][0-9]|30)|{_LONG}-31|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_ZONE = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?{_ZONE}"
_DURATION_DATE = "(?:[0-9]{1,4}Y(?:[0-9]{1,4}M(?:[0-9]{1,4}D)?)?|[0-9]{1,4}M(?:[0-9]{1,4}D)?|[0-9]{1,4}D)"
_DURATION_TIME = "T(?:[0-9]{1,6}H(?:[0-9]{1,6}M(?:[0-9]{1,6}S)?)?|[0-9]{1,6}M(?:[0-9]{1,6}S)?|[0-9]{1,6}S)"
_DURATION = f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]{{1,4}}W)"
_DOT = r"\."
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_HEX4 = "[0-9a-fA-F]{1,4}"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,8}}"
_ATOM = "[a-zA-Z0-9!#$%&'*+=?^_`{|}~-]+"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+"
_ESCAPED = "%[0-9a-fA-F]{2}"
_PATH_LETTER = rf"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|{_ESCAPED})"
_QUERY_LETTER = rf"(?:[a-zA-Z0-9._~!$&'()*+,;=:@/?-]|{_ESCAPED})"
_USER = rf"(?:(?:[a-zA-Z0-9._~!$&'()*+,;=:-]|{_ESCAPED})*@)?"
_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"


def _ipv6() -> str:
    """All eight groups, or up to seven around one "::"."""
    forms = [f"(?:{_HEX4}:){{7}}{_HEX4}"]
    for before in range(8):
        head = f"(?:{_HEX4}:){{{before}}}" if before else ":"
        tail = f"(?::{_HEX4}){{1,{7 - before}}}" if before < 7 else ""
        forms.append(f"{head}(?:{tail}|:)" if tail else f"{head}:")
    return f"(?:{'|'.join(forms)})"


def _uuid(version: str = "[0-9a-fA-F]", variant: str = "[0-9a-fA-F]") -> str:
    digit = "[0-9a-fA-F]"
    return f"{digit}{{8}}-{digit}{{4}}-{version}{digit}{{3}}-{variant}{digit}{{3}}-{digit}{{12}}"


def _ipv4_network() -> str:
    """An address whose bits after the prefix are zero."""
    forms = []
    for length in range(33):
        whole, bits = divmod(length, 8)
        octets = [_OCTET] * whole
        if bits:
            octets.append(f"(?:{'|'.join(str(octet) for octet in range(0, 256, 1 << (8 - bits)))})")
        octets += ["0"] * (4 - len(octets))
        forms.append(_DOT.join(octets) + f"/{length}")
    return f"(?:{'|'.join(forms)})"


def _ipv6_network() -> str:
    """Prefixes of whole groups only: their addresses end with "::"."""
    groups = [f"{_HEX4}(?::{_HEX4}){{{n - 1}}}::/{16 * n}" for n in range(1, 8)]
    return f"(?:::/0|{'|'.join(groups)}|{_ipv6()}/128)"


def _uri(hosts: str) -> str:
    rest = rf"(?:/{_PATH_LETTER}*)*(?:\?{_QUERY_LETTER}*)?(?:#{_QUERY_LETTER}*)?"
    return rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?://{_USER}{hosts}{rest}|/?{_PATH_LETTER}+{rest})"


_HOST = rf"(?:\[{_ipv6()}\]|{_HOSTNAME})(?::[1-9][0-9]{{0,3}})?"


@cache
def expressions() -> dict[str, str]:
    """The expression of each enforced format; it matches a whole string."""
    ipv6 = _ipv6()
    made = {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}[tT]{_TIME}",
        "duration": _DURATION,
        "email": _EMAIL,
        "name-email": f"(?:[a-zA-Z][a-zA-Z ]* <{_EMAIL}>|{_EMAIL})",
        "hostname": _HOSTNAME,
        "ipv4": _IPV4,
        "ipv6": ipv6,
        "ipvanyaddress": f"(?:{_IPV4}|{ipv6})",
        "ipv4interface": f"{_IPV4}(?:/(?:[12]?[0-9]|3[0-2]))?",
        "ipv6interface": f"{ipv6}(?:/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8]))?",
        "ipv4network": _ipv4_network(),
        "ipv6network": _ipv6_network(),
        "uri": _uri(_HOST),
        "multi-host-uri": _uri(f"{_HOST}(?:,{_HOST})*"),
        "uuid": _uuid(),
        "byte": _BASE64,
        "base64": _BASE64,
        "base64url": "(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?",
        "fraction": "[+-]?[0-9]+(?:/[1-9][0-9]*)?",
    }
    made["ipvanyinterface"] = f"(?:{made['ipv4interface']}|{made['ipv6interface']})"
    made["ipvanynetwork"] = f"(?:{made['ipv4network']}|{made['ipv6network']})"
    return made | {f"uuid{version}": _uuid(str(version), "[89abAB]") for version in range(1, 9)}
