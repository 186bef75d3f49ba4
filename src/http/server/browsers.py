"""What a web page may make a browser send here, and what a browser says of the page.

A browser sends what any page asks it to send, and only afterwards keeps the answer from the page.
So whatever changes or computes something looks at who asks first: browsers write `Origin` and
`Sec-Fetch-Site` themselves, and no page can change them. Other programs send neither.

Against a name that an attacker points at this server's address (DNS rebinding) these do not help:
the page and the server are of one origin then. But the browser sends the attacker's name as `Host`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import Final

from starlette.types import Scope

# They neither change nor compute anything here (RFC 9110, section 9.2.1).
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}
# Nobody's name is longer (RFC 1035, section 2.3.4), and a port has five digits.
_MAX_HOST: Final = 300
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+(?:%[^\[\]]*)?\]|[^\[\]:]*)(?::[0-9]*)?")

ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s*?#@]+")
ALLOWED_HOST: Final = re.compile(r"\*|(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?", re.IGNORECASE)


def is_foreign_page(scope: Scope, origins: Collection[str]) -> bool:
    """Whether a web page that may not do so has a browser change or compute something.

    ``origins`` are those whose pages may; ``*`` is all. Where the browser says that the page is the
    server's own, that is believed: a proxy may have changed the `Host`, or ended TLS.
    """
    if scope["method"] in _SAFE_METHODS or "*" in origins:
        return False
    given = _values(scope, b"origin")
    if len(given) == 1 and given[0].decode("latin-1") in origins:
        return False
    # The origin of sandboxed frames, of files, and of whatever does not want to tell.
    if len(given) > 1 or b"null" in given:
        return True
    sites = _values(scope, b"sec-fetch-site")
    if sites == [b"same-origin"]:
        return False
    # `none`: somebody typed the address. Without TLS, browsers say no site to other machines.
    if sites and sites != [b"none"]:
        return True
    return bool(given) and not _is_own_origin(scope, given[0])


def _is_own_origin(scope: Scope, origin: bytes) -> bool:
    """Whether scheme, host and port of an origin are those that the request was sent to."""
    scheme, _, place = origin.decode("latin-1").lower().partition("://")
    hosts = _values(scope, b"host")
    if scheme != scope.get("scheme", "http") or len(hosts) != 1:
        return False
    default = _DEFAULT_PORTS.get(scheme, "")
    host = hosts[0].decode("latin-1").lower()
    return place.removesuffix(default) == host.removesuffix(default)


def is_known_host(scope: Scope, allowed: Collection[str]) -> bool:
    """Whether a request is for a name that nobody else can have pointed at this server.

    Those are `localhost` and the names below it, all addresses, and ``allowed``: names, `*.` and a
    name for those below it, or ``*`` for all. Only programs other than browsers send no `Host`.
    """
    return "*" in allowed or all(
        _is_known(value.decode("latin-1"), allowed) for value in _values(scope, b"host")
    )


def _is_known(host: str, allowed: Collection[str]) -> bool:
    found = _HOST.fullmatch(host.lower()) if len(host) <= _MAX_HOST else None
    if found is None:
        return False
    name = found[1].removesuffix(".")
    # No resolver is asked for an address, so none can lie about it. HTTP/2 may leave the name out.
    if not name or is_address(name):
        return True
    return any(_is_named(name, each) for each in ("localhost", "*.localhost", *allowed))


def _is_named(name: str, pattern: str) -> bool:
    pattern = pattern.lower()
    return name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern


def is_address(host: str) -> bool:
    """Whether a host is an address, of IPv6 in brackets or without, and no name."""
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]
