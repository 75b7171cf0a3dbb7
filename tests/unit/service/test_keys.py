"""API keys: the file, the command, the valid keys and their reload."""

from __future__ import annotations

import json
import os
import re
import stat
from hashlib import sha256
from pathlib import Path

import pytest

import cli
import service.keys
from indexer.store.filters import Equal
from service.errors import BadKeys
from service.keys import KeyRing, KeysFile, write_audit
from service.limits import Rate, Scope
from tests.support.keys import create, revoke

SECRET = re.compile(r"care_[0-9a-f]{12}_[A-Za-z0-9_-]{43}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "etc" / "keys.json"


def test_a_new_key_is_valid_and_only_its_hash_is_stored(path: Path) -> None:
    key = create(
        path, "clinic-1", "--scope", "search", "--scope", "write", "--filter", "tenant=1", "--rate", "50/s",
        "--model-calls", "9/d",
    )  # fmt: skip
    assert SECRET.fullmatch(key)
    kept = path.read_text()
    assert key not in kept
    assert key[18:] not in kept
    assert json.loads(kept)["keys"][0]["hash"] == sha256(key.encode()).hexdigest()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = KeyRing(path, None).find(key.encode())
    assert found is not None
    assert (found.name, found.scopes) == ("clinic-1", {Scope.SEARCH, Scope.WRITE})
    assert (found.filters, found.rate, found.model_calls) == ((Equal("tenant", "1"),), Rate(50, 1), Rate(9, 86_400))


def test_no_other_text_is_the_key(path: Path) -> None:
    key = create(path, "a", "--scope", "search")
    other = create(path, "b", "--scope", "admin")
    ring = KeyRing(path, "token of old")
    wrong = ("", "care_", key[:-1], f"{key} ", key.upper(), key[:18] + other[18:], "care_000000000000_x", "é")
    assert [ring.find(each.encode()) for each in wrong] == [None] * len(wrong)
    # Nor after the right one was presented, which is compared in another way from then on.
    assert [found and found.name for found in (ring.find(key.encode()), ring.find(key.encode()))] == ["a", "a"]
    assert [ring.find(each.encode()) for each in wrong] == [None] * len(wrong)
    token = ring.find(b"token of old")
    assert token is not None
    assert token.scopes == frozenset(Scope)


def test_secrets_are_compared_in_constant_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = create(path, "a", "--scope", "search")
    compared: list[tuple[bytes, bytes]] = []
    real = service.keys.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(service.keys, "compare_digest", compare)
    ring = KeyRing(path, "token")
    wrong = f"{key[:-1]}{'A' if key[-1] != 'A' else 'B'}"
    assert ring.find(wrong.encode()) is None
    assert [one for one, _ in compared] == [sha256(wrong.encode()).digest()] * 2
    assert {other for _, other in compared} == {sha256(text.encode()).digest() for text in (key, "token")}


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = create(path, "first", "--scope", "search")
    ring = KeyRing(path, None)
    second = create(path, "second", "--scope", "search")
    assert ring.find(second.encode()) is None
    ring.reload()
    assert ring.find(second.encode()) is not None
    good = path.read_text()
    path.write_text(good[:-9])
    ring.reload()
    assert "the keys stay as they were" in caplog.text
    path.unlink()
    ring.reload()
    assert ring.find(first.encode()) is not None
    path.write_text(good)
    revoke(path, "first")
    ring.reload()
    assert (ring.find(first.encode()), ring.find(second.encode()) is None) == (None, False)


def test_list_shows_everything_but_secrets(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = create(path, "reader", "--scope", "search", "--filter", "tenant=a", "--filter", "year=2024", "--rate", "9/m")
    assert cli.main(["keys", "--file", str(path), "list"]) == 0
    shown = capsys.readouterr().out
    assert key[18:] not in shown
    assert KeysFile.read(path).keys[0].hash not in shown
    for part in (key[5:17], "reader", "search", '{"field":"tenant","eq":"a"}', "rate 9/m"):
        assert part in shown


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_key_made_by_root_does_not_change_the_owner_of_the_file(path: Path) -> None:
    create(path, "first", "--scope", "search")
    os.chown(path, 12345, 12346)
    for before, after in ((0o640, 0o640), (0o600, 0o600), (0o664, 0o660)):
        path.chmod(before)
        create(path, f"mode-{before:o}", "--scope", "search")
        facts = path.stat()
        assert (facts.st_uid, facts.st_gid, stat.S_IMODE(facts.st_mode)) == (12345, 12346, after)


def test_a_key_is_revoked_by_its_id_too(path: Path) -> None:
    key = create(path, "reader", "--scope", "search")
    revoke(path, key[5:17])
    assert KeysFile.read(path).keys == ()


def test_an_id_that_is_also_a_name_is_not_revoked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = create(path, "reader", "--scope", "search")
    create(path, key[5:17], "--scope", "search")
    assert cli.main(["keys", "--file", str(path), "revoke", key[5:17]]) == 1
    assert "is the name of one key and the id of another" in capsys.readouterr().err
    revoke(path, "reader")
    assert [record.name for record in KeysFile.read(path).keys] == [key[5:17]]


def test_a_key_is_revoked_through_a_link_too(path: Path, tmp_path: Path) -> None:
    create(path, "reader", "--scope", "search")
    link = tmp_path / "link.json"
    link.symlink_to(path)
    revoke(link, "reader")
    assert link.is_symlink()
    assert KeysFile.read(path).keys == ()


def test_the_command_leaves_a_line_in_the_audit_log(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARE_AUDIT_LOG", str(tmp_path / "audit.jsonl"))
    key = create(path, "reader", "--scope", "search")
    revoke(path, "reader")
    written = (tmp_path / "audit.jsonl").read_text()
    assert [json.loads(line)["act"] for line in written.splitlines()] == ["keys create", "keys revoke"]
    assert key not in written


def test_a_key_is_printed_even_if_its_line_in_the_audit_log_cannot_be_written(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARE_AUDIT_LOG", str(tmp_path / "none" / "audit.jsonl"))
    assert cli.main(["keys", "--file", str(path), "create", "reader", "--scope", "search"]) == 1
    printed = capsys.readouterr()
    assert KeyRing(path, None).find(printed.out.strip().encode()) is not None
    assert "audit.jsonl: No such file" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "a b", "--scope", "search"], "name: String should match pattern"),
        (["create", "known", "--scope", "search"], "care keys: known: two keys have one name"),
        (["create", "a", "--scope", "search", "--filter", "tenant"], "write it as FIELD=VALUE"),
        (["create", "a", "--scope", "search", "--rate", "fast"], "write it as 50/s"),
        (["create", "a", "--scope", "search", "--rate", "0/s"], "write it as 50/s"),
        (["create", "a", "--scope", "admin", "--filter", "t=1"], "care keys: a key with a filter cannot have"),
        (["revoke", "nobody"], "there is no key nobody"),
    ],
)
def test_impossible_commands_are_refused_with_the_reason(
    path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    create(path, "known", "--scope", "search")
    before = path.read_text()
    assert cli.main(["keys", "--file", str(path), *arguments]) == 1
    assert message in capsys.readouterr().err
    assert path.read_text() == before


def test_an_unknown_scope_is_refused_with_the_list_of_scopes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["keys", "--file", str(path), "create", "a", "--scope", "all"])
    assert "choose from 'search', 'write', 'admin'" in capsys.readouterr().err


def test_without_a_file_the_command_names_the_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CARE_KEYS_FILE", raising=False)
    assert cli.main(["keys", "list"]) == 1
    assert "set CARE_KEYS_FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"keys": [{"id": "x"}]}',
        '{"keys": [], "more": 1}',
        '{"keys": [{"id":"00","name":"a","hash":"x"}]}',
    ],
)
def test_an_invalid_keys_file_is_refused_at_startup(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(BadKeys, match=re.escape(str(path))):
        KeyRing(path, None)


def test_a_keys_file_that_blocks_or_fills_memory_is_refused(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    large.touch()
    os.truncate(large, 16 * 2**20 + 1)
    for path in (pipe, large, Path("/dev/zero"), tmp_path):
        with pytest.raises(
            BadKeys, match=f"{path} is not a regular file of at most 16 MiB; name the one that care keys"
        ):
            KeyRing(path, None)
    os.truncate(large, 16 * 2**20)
    with pytest.raises(BadKeys, match="is not a file of keys"):
        KeyRing(large, None)


def test_a_file_may_hold_any_filter(path: Path) -> None:
    create(path, "a", "--scope", "search", "--filter", "tenant=1")
    known = json.loads(path.read_text())
    known["keys"][0]["filters"] = [
        {"any": [{"field": "tenant", "in": ["1", "2"]}, {"not": {"field": "private", "eq": True}}]}
    ]
    path.write_text(json.dumps(known))
    create(path, "b", "--scope", "search")  # the command writes the filter back unchanged
    assert json.loads(path.read_text())["keys"][0]["filters"] == known["keys"][0]["filters"]


def test_a_line_for_which_the_disk_has_no_room_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, write = tmp_path / "audit.jsonl", os.write
    write_audit(log, {"act": "one"})
    whole = log.read_bytes()
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
    with pytest.raises(OSError, match="No space left"):
        write_audit(log, {"act": "two"})
    monkeypatch.undo()
    assert log.read_bytes() == whole
    write_audit(log, {"act": "three"})
    assert [json.loads(line)["act"] for line in log.read_text().splitlines()] == ["one", "three"]
