"""Create, list and revoke API keys. Also reads the keys file for a running service.

A key is shown once, when it is made. The service reads the file again when it changes, and at SIGHUP.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import getpass
import logging
import os
import secrets
import stat
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import blake2b, sha256
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from indexer.store.files import in_turn, replace_file
from service.errors import BadKeys, BadSettings, invalid_request
from service.limits import Key, Rate, Scope
from service.search.request import Clauses, FilterClause

if TYPE_CHECKING:
    from service.settings import Settings

logger = logging.getLogger(__name__)

FILE_VARIABLE, AUDIT_VARIABLE = "CARE_KEYS_FILE", "CARE_AUDIT_LOG"
# care_ID_SECRET: the id is public and finds the entry, the secret has 256 random bits.
PREFIX = "care_"
ID_CHARACTERS = 12
SECRET_BYTES = 32
ID = slice(len(PREFIX), len(PREFIX) + ID_CHARACTERS)
PRIVATE, GROUP = 0o600, 0o060
MOST_BYTES = 16 * 2**20  # tens of thousands of keys
APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT


def _is_rate(text: str) -> str:
    return str(Rate.parse(text))


RateText = Annotated[str, AfterValidator(_is_rate)]


class KeyRecord(BaseModel):
    """A key in the file.

    Its hash is plain SHA-256: the secret has 256 random bits, so it cannot be found by trying, and a slow hash with a
    salt, made for passwords that people choose, would protect nothing and cost every request milliseconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, StringConstraints(pattern=rf"^[0-9a-f]{{{ID_CHARACTERS}}}$")]
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    hash: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)]
    filters: Clauses = ()
    rate: RateText | None = None
    model_calls: RateText | None = None
    created: str = ""

    @model_validator(mode="after")
    def _administrators_see_all(self) -> Self:
        if self.filters and Scope.ADMIN in self.scopes:
            raise ValueError("a key with a filter cannot have scope admin, which acts on the whole collection")
        return self

    def key(self) -> Key:
        filters = tuple(clause.to_filter() for clause in self.filters)
        tenant = blake2b(repr(filters).encode(), digest_size=16).digest() if filters else b""
        rates = [None if text is None else Rate.parse(text) for text in (self.rate, self.model_calls)]
        return Key(self.id, self.name, frozenset(self.scopes), filters, tenant, *rates)


class KeysFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[KeyRecord, ...] = ()

    @model_validator(mode="after")
    def _are_different(self) -> Self:
        for what, values in (("id", [key.id for key in self.keys]), ("name", [key.name for key in self.keys])):
            if len(set(values)) < len(values):
                raise ValueError(f"two keys have one {what}")
        return self

    @classmethod
    def read(cls, path: Path) -> KeysFile:
        """Raises BadKeys."""
        try:
            facts = path.stat()
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > MOST_BYTES:  # a pipe would block, a disk fill memory
                most = f"not a regular file of at most {MOST_BYTES // 2**20} MiB"
                raise BadKeys(f"{path} is {most}; name the one that care keys create makes")
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise BadKeys(f"{path} cannot be read ({error.strerror}); care keys create makes the file") from error
        except ValidationError as error:
            raise BadKeys(f"{path} is not a file of keys: {_reason(error, cls)}") from None


class KeyRing:
    """The keys in force: those of the file, and the admin token, a key of every scope."""

    def __init__(self, path: Path | None, admin_token: str | None) -> None:
        """Raises BadKeys if the file cannot be used."""
        self.has_file = path is not None
        self._path = path
        self._token = None if admin_token is None else sha256(admin_token.encode()).digest()
        self._seen = self._signature()
        self._keys = {} if path is None else _index(KeysFile.read(path))
        # Keys of the file that were presented and found, by their public id: OpenSSL's SHA-256 takes 13 µs a request.
        self.found: dict[bytes, tuple[bytes, Key]] = {}

    @classmethod
    def from_settings(cls, settings: Settings) -> KeyRing:
        token = settings.admin_token
        return cls(settings.keys_file, None if token is None else token.get_secret_value())

    @property
    def is_empty(self) -> bool:
        return self._token is None and not self._keys

    def find(self, presented: bytes) -> Key | None:
        """Returns the key that was presented; takes a time that does not depend on where two secrets differ."""
        name = presented[ID]
        digest = sha256(presented).digest()
        known = self._keys.get(name)
        if known is not None and compare_digest(digest, known[0]):
            self.found[name] = presented, known[1]
            return known[1]
        return ADMIN_TOKEN if self._token is not None and compare_digest(digest, self._token) else None

    def reload(self) -> None:
        """Reads the file again; one that cannot be used is logged, and the keys before it stay in force."""
        if self._path is None:
            return
        self._seen = self._signature()
        try:
            self._keys = _index(KeysFile.read(self._path))
            self.found.clear()
        except BadKeys as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("%d keys are in force", len(self._keys))

    async def follow(self, seconds: float) -> None:
        """Reads the file whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            if self._signature() != self._seen:
                self.reload()

    def _signature(self) -> tuple[int, ...]:
        try:
            facts = os.stat(self._path) if self._path is not None else None
        except OSError:
            return ()
        return () if facts is None else (facts.st_mtime_ns, facts.st_size, facts.st_ino)


ADMIN_TOKEN = Key("admin-token", "admin token", frozenset(Scope))


def _index(file: KeysFile) -> dict[bytes, tuple[bytes, Key]]:
    return {record.id.encode(): (bytes.fromhex(record.hash), record.key()) for record in file.keys}


def require_audit_log(path: Path | None) -> None:
    """Raises BadSettings if the audit log cannot be written: acts would go unrecorded."""
    try:
        if path is not None:
            os.close(os.open(path, APPENDING, PRIVATE))
    except OSError as error:
        raise BadSettings(f"{AUDIT_VARIABLE}: {path} cannot be written ({error.strerror}); name another file") from None


def write_audit(path: Path, line: Mapping[str, Any]) -> None:
    """Appends one JSON line with the time; lines of several processes do not mix."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    descriptor = os.open(path, APPENDING, PRIVATE)
    try:
        record = orjson.dumps({"time": now, **line}) + b"\n"
        if (written := os.write(descriptor, record)) < len(record):
            # The disk is full. Half a line would spoil the next one, too.
            end = os.lseek(descriptor, 0, os.SEEK_CUR)
            if os.fstat(descriptor).st_size == end:
                os.ftruncate(descriptor, end - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def add_arguments(parser: ArgumentParser) -> None:
    given = os.environ.get(FILE_VARIABLE)
    parser.add_argument("--file", type=Path, default=given or None, help=f"file of the keys ({FILE_VARIABLE})")
    acts = parser.add_subparsers(dest="act", required=True, metavar="create | list | revoke")
    create = acts.add_parser("create", help="make a key and print it, the only time")
    create.add_argument("name", help="who uses it: letters, digits, dots, dashes; shown in the audit log")
    create.add_argument(
        "--scope", action="append", choices=[scope.value for scope in Scope], required=True, help="may repeat"
    )
    create.add_argument(
        "--filter", action="append", default=[], metavar="FIELD=VALUE", help="the only documents it sees; may repeat"
    )
    create.add_argument("--rate", help="most requests, as 50/s, 600/m, 1000/h or 5000/d")
    create.add_argument("--model-calls", metavar="RATE", help="most calls of a language model by HyDE, as 1000/d")
    acts.add_parser("list", help="show the keys, without their secrets")
    revoke = acts.add_parser("revoke", help="take a key out of force")
    revoke.add_argument("name", help="its name or its id")


def run(arguments: Namespace) -> None:
    path: Path | None = arguments.file
    if path is None:
        raise BadKeys(f"no file of keys is named; set {FILE_VARIABLE} or give --file before {arguments.act}")
    if arguments.act == "list":
        for record in KeysFile.read(path).keys:
            print(_line(record))
        return
    path = path.resolve()  # a link stays: a service may read the file by another name
    path.parent.mkdir(parents=True, exist_ok=True)
    with in_turn(path.with_name(f"{path.name}.lock")):
        before = KeysFile.read(path).keys if path.exists() else ()
        if arguments.act == "create":
            name, secret = arguments.name, create_secret()
            after = (*before, make_record(arguments, secret))
        else:
            after = tuple(record for record in before if arguments.name not in (record.name, record.id))
            names = [record.name for record in before if record not in after]
            if not names:
                raise BadKeys(f"there is no key {arguments.name}; care keys list shows them")
            if len(names) > 1:
                raise BadKeys(
                    f"{arguments.name} is the name of one key and the id of another; give the other of the two"
                )
            (name,) = names
        try:
            written = KeysFile(keys=after).model_dump_json(indent=1, by_alias=True, exclude_defaults=True)
        except ValidationError as error:
            raise BadKeys(f"{name}: {_reason(error, KeysFile)}; care keys list shows the keys") from None
        _write(path, written.encode() + b"\n")
    # First: the secret of a key that is in force must not be lost if the audit log cannot be written.
    print(secret if arguments.act == "create" else f"{name} is revoked; running services notice within seconds")
    if audit := os.environ.get(AUDIT_VARIABLE):
        write_audit(Path(audit), {"key": None, "user": getpass.getuser(), "act": f"keys {arguments.act}", "name": name})


def _write(path: Path, content: bytes) -> None:
    """Replaces the file for its owner alone; one that is there keeps its owner, its group and the group's rights.

    A key that root makes would otherwise take the file from the service, which runs as another user.
    """
    umask = os.umask(~PRIVATE & 0o777)
    try:
        before = path.stat() if path.exists() else None

        def keep(new: Path) -> None:
            if before is not None:
                new.chmod(before.st_mode & GROUP | PRIVATE)
                with contextlib.suppress(PermissionError):  # only root can give a file away
                    os.chown(new, before.st_uid, before.st_gid)

        replace_file(path, content, keep)
    finally:
        os.umask(umask)


def create_secret() -> str:
    return f"{PREFIX}{secrets.token_hex(ID_CHARACTERS // 2)}_{secrets.token_urlsafe(SECRET_BYTES)}"


def make_record(arguments: Namespace, secret: str) -> KeyRecord:
    """Returns the entry of a new key; raises BadKeys."""
    try:
        return KeyRecord(
            id=secret[ID],
            name=arguments.name,
            hash=sha256(secret.encode()).hexdigest(),
            scopes=tuple(dict.fromkeys(map(Scope, arguments.scope))),
            filters=tuple(_clause(text) for text in arguments.filter),
            rate=arguments.rate,
            model_calls=arguments.model_calls,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
    except ValidationError as error:
        raise BadKeys(_reason(error, KeyRecord)) from None


def _reason(error: ValidationError, model: type[BaseModel]) -> str:
    """Returns the first error of a file or a key, neither of which has a body."""
    return str(invalid_request(error, model)).removeprefix("body: ")


def _clause(text: str) -> FilterClause:
    field, equals, value = text.partition("=")
    if not field or not equals:
        raise BadKeys(f"{text!r} is not a filter; write it as FIELD=VALUE, for example tenant=clinic-1")
    return FilterClause.model_validate({"field": field, "eq": value})


def _line(record: KeyRecord) -> str:
    filters = orjson.dumps([clause.model_dump(by_alias=True, exclude_none=True) for clause in record.filters]).decode()
    parts = [record.id, record.name, ",".join(record.scopes)]
    parts += [filters] if record.filters else []
    parts += [f"rate {record.rate}"] if record.rate else []
    parts += [f"model calls {record.model_calls}"] if record.model_calls else []
    return "  ".join([*parts, record.created])
