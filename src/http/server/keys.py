"""Keys: where they come from, how they are kept, and how a request's is told from others.

A configured key may be followed by a space and the name of its owner: keys with one name are one
client. Without a name each key is one of its own, called ``key-`` and its number in the list.

Neither a configured key nor what was given as one is ever kept, compared or shown as text, only as
a hash. A configured key may be written as its hash from the start: ``sha256:`` and 64 hex digits.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from starlette.types import Scope

from src.core.config import HttpSection, SchedulerSection
from src.core.errors import ConfigError

# Where the scope of a request has the hash of the key that let it in, if one was needed.
ADMITTED: Final = "slipstream.admitted"
# Where it has the name of that key's owner, if there are several owners.
TENANT: Final = "slipstream.tenant"

MAX_KEYS: Final = 1024
_MAX_FILE_BYTES: Final = 1 << 20

_SCHEME: Final = b"bearer "
# A header with the longest key. Nobody's is longer, and hashing is not for free.
_MAX_CREDENTIALS: Final = len(_SCHEME) + 4096
_HASHED: Final = re.compile(r"sha256:([0-9a-fA-F]{64})")
# What a client can send in a header and a configuration can hold in a list.
_KEY: Final = re.compile(r"[!-~]{1,4096}")
_OWNER: Final = re.compile(r"(?!key-\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class KeyRing:
    """Some keys, as hashes."""

    def __init__(self, hashes: Iterable[bytes] = ()) -> None:
        self._hashes = tuple(dict.fromkeys(hashes))

    def __len__(self) -> int:
        return len(self._hashes)

    def admits(self, credentials: Iterable[bytes]) -> bool:
        """Whether one of ``credentials`` is one of the keys."""
        return self.admitted(credentials) is not None

    def admitted(self, credentials: Iterable[bytes]) -> bytes | None:
        """Hash of the first of ``credentials`` that is one of the keys; ``None`` if none is.

        Takes the same time whichever key it is, and how far a wrong one is right.
        """
        admitted = None
        for given in credentials:
            digest, is_known = _hash(given), False
            for known in self._hashes:
                is_known |= hmac.compare_digest(digest, known)
            if is_known and admitted is None:
                admitted = digest
        return admitted

    def shares(self, other: KeyRing) -> bool:
        """Whether a key is in both."""
        return not set(self._hashes).isdisjoint(other._hashes)


class Keys(msgspec.Struct, frozen=True):
    """What opens what: ``api`` the endpoints (none: they are open), ``admin`` those of /debug.

    ``owners`` has the owner's name by the hash of each API key.
    """

    api: KeyRing = KeyRing()
    admin: KeyRing = KeyRing()
    owners: Mapping[bytes, str] = {}

    def tenant(self, admitted: bytes) -> str:
        """Name of the owner of an admitted key; empty if all keys are of one owner."""
        return self.owners[admitted] if len(set(self.owners.values())) > 1 else ""


def load_keys(section: HttpSection) -> Keys:
    """The configured keys.

    Raises
    ------
    ConfigError
        A key is empty, malformed, of two owners or both of a client and of the administrator, a
        file cannot be read or holds none, or a key is given in two ways.
    """
    names = [("http.api_keys", secret.reveal()) for secret in section.api_keys]
    names += _lines("http.api_key_file", section.api_key_file)
    if len(names) > MAX_KEYS:
        raise ConfigError(f"there are {len(names)} API keys, at most {MAX_KEYS} are kept")
    owners: dict[bytes, str] = {}
    for number, (source, line) in enumerate(names, 1):
        key, owner = _with_owner(source, line, number)
        if owners.setdefault(key, owner) != owner and " " in line:
            raise ConfigError(f"{source}: a key has two owners, {owners[key]} and {owner}")
    api = KeyRing(owners)
    admin = admin_key(section)
    admins = KeyRing([] if admin is None else [_configured("http.admin_key", admin)])
    keys = Keys(api, admins, owners)
    if keys.api.shares(keys.admin):
        raise ConfigError("the admin key is also an API key; it must be one of its own")
    return keys


def check_owners(section: SchedulerSection, keys: Keys) -> None:
    """Check that settings of the scheduler name owners of keys that there are.

    Raises
    ------
    ConfigError
        A name is nobody's.
    """
    known = set(keys.owners.values())
    for setting, names in (
        ("scheduler.tenant_weights", section.tenant_weights),
        ("scheduler.priority_tenants", section.priority_tenants),
    ):
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"{setting} names {name!r}, but no API key is that owner's; there are: "
                    + (", ".join(sorted(known)[:20]) or "no API keys")
                )


def admin_key(section: HttpSection) -> str | None:
    """The configured admin key; ``None`` without one.

    Raises
    ------
    ConfigError
        Both ways to give it are used, its file cannot be read, or it is empty.
    """
    if section.admin_key is not None and section.admin_key_file is not None:
        raise ConfigError("http.admin_key and http.admin_key_file are both set; set one of them")
    if section.admin_key is not None:
        key, source = section.admin_key.reveal(), "http.admin_key"
    elif section.admin_key_file is not None:
        source = f"http.admin_key_file={section.admin_key_file}"
        key = _read(source, section.admin_key_file)
    else:
        return None
    if not key.strip():
        raise ConfigError(f"{source}: the key is empty")
    return key.strip()


def is_trusted(scope: Scope, keys: Keys | None) -> bool:
    """Whether a request may see what only those with a key may; without API keys all may.

    ``keys`` are ``None`` before they are known.
    """
    if keys is None:
        return False
    return (
        not len(keys.api) or keys.api.admits(credentials(scope)) or keys.admin.admits(bearer(scope))
    )


def bearer(scope: Scope) -> list[bytes]:
    """What follows ``Bearer`` in the request; nothing if there is none, or more than one."""
    value = _only(scope, b"authorization")
    if value[: len(_SCHEME)].lower() != _SCHEME:
        return []
    return [token] if (token := value[len(_SCHEME) :].strip()) else []


def credentials(scope: Scope) -> list[bytes]:
    """All that a request gives as a key: as OpenAI's clients do, and as Anthropic's (x-api-key)."""
    key = _only(scope, b"x-api-key").strip()
    return [*bearer(scope), *([key] if key else [])]


def _only(scope: Scope, name: bytes) -> bytes:
    """The value of a header that is there once and not too long; empty otherwise."""
    given = [value for key, value in scope["headers"] if key == name]
    return given[0] if len(given) == 1 and len(given[0]) <= _MAX_CREDENTIALS else b""


def _lines(setting: str, path: str | None) -> list[tuple[str, str]]:
    """The keys of a file: one a line; empty lines and those that begin with # are none."""
    if path is None:
        return []
    source = f"{setting}={path}"
    lines = (line.strip() for line in _read(source, path).splitlines())
    keys = [(source, line) for line in lines if line and not line.startswith("#")]
    if not keys:
        # Otherwise a file that was emptied by mistake would open the server to all.
        raise ConfigError(f"{source}: there is no key in it")
    return keys


def _read(source: str, path: str) -> str:
    try:
        with Path(path).expanduser().open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise ConfigError(f"{source}: larger than {_MAX_FILE_BYTES} bytes")
        return text.decode("utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {type(error).__name__}") from None


def _with_owner(source: str, line: str, number: int) -> tuple[bytes, str]:
    """The hash of a configured key, and the name of its owner."""
    key, space, owner = line.partition(" ")
    if not space:
        return _configured(source, key), f"key-{number}"
    owner = owner.strip()
    if _OWNER.fullmatch(owner) is None:
        # Not shown: it may be the rest of a key with a space in it.
        raise ConfigError(
            f"{source}: behind a key and a space comes the name of its owner, of 1 to 64 letters, "
            "digits, dots, hyphens and underscores, and none such as key-1"
        )
    return _configured(source, key), owner


def _configured(source: str, key: str) -> bytes:
    hashed = _HASHED.fullmatch(key)
    if hashed is not None:
        return bytes.fromhex(hashed[1])
    if key.startswith("sha256:"):
        raise ConfigError(f"{source}: a hash is sha256: and 64 hex digits")
    if _KEY.fullmatch(key) is None:
        raise ConfigError(f"{source}: a key has 1 to 4096 printable characters and no space")
    return _hash(key.encode())


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
