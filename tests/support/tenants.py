"""Random requests of several tenants to one service: none may show, count or change a document of another.

  python -m tests.support.tenants --requests 100000 --seed 1

Every text, id, value and field name of a document contains its owner's mark, and its numbers are in a range of its own,
so a leak shows in the bytes of an answer. Requests come eight at a time, equal ones of different tenants
among them, with all caches on. Between them documents are posted, replaced and deleted, by tenants and by a key that
sees everything. A plain dictionary holds what each tenant must see, so missing documents are noticed, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import FastAPI

from indexer.build import BuildOptions, build
from indexer.store.collection import Collection
from models.encoder.onnx import OnnxEncoder
from models.package import BUNDLED_ENCODER
from service.http.app import create_app
from service.settings import Settings
from tests.support.keys import bearer, create

AT_ONCE = 8
WRITES = 0.02  # share of the requests
DOCUMENTS = 12  # of each mark in the snapshot
PATIENCE_MS = 120_000
RANGE = 1000  # of the numbers of one mark
KINDS = ("drug", "disease", "test")
POSTED = "x"  # the name of every document that is posted
WORDS = ("高血压", "糖尿病", "头痛", "发热", "骨折", "asthma", "fever", "dose", "门诊", "检查")
MARK = re.compile(r"zq[a-z0-9]+qz")
# Filters of each tenant's key, of all kinds. The last two admit nothing: a field that no document has, and a value
# of another kind than its field has.
TENANTS: dict[str, list[dict[str, Any]]] = {
    "a1": [{"field": "tenant", "eq": "a1"}],
    "a2": [{"field": "tenant", "in": ["a2", "none"]}],
    "a3": [{"any": [{"field": "tenant", "eq": "a3"}, {"field": "tags", "eq": "for-a3"}]}],
    "a4": [{"field": "account", "gte": 4 * RANGE, "lt": 5 * RANGE}],
    "a5": [{"field": "tenant", "eq": "a5"}, {"not": {"field": "private", "eq": True}}],
    "none": [{"field": "nowhere", "eq": "a1"}],
    "odd": [{"field": "account", "eq": "a1"}],
}
# The owner of a document determines its mark; a5's private documents have a mark that not even a5 may see.
OWNERS = ("a1", "a2", "a3", "a4", "a5", "a5private")
WRITERS = OWNERS[:-1]


def mark(owner: str) -> str:
    return f"zq{owner}qz"


def make(owner: str, name: str, draw: random.Random) -> dict[str, Any]:
    """A document of this owner: a body for POST, or a row of a corpus."""
    own, number = mark(owner), OWNERS.index(owner) + 1
    metadata: dict[str, Any] = {
        "tenant": owner.removesuffix("private"),
        "account": number * RANGE + draw.randrange(RANGE),
        "kind": draw.choice(KINDS),
        "note": f"{own} {draw.choice(WORDS)}",
        "tags": [own, f"for-{owner}"],
        f"only_{own}": draw.choice(KINDS),
    }
    if owner == "a3" and draw.random() < 0.5:
        metadata |= {"tenant": f"{own}-else", "tags": [f"for-{owner}"]}  # by its tags alone
    if owner == "a5private":
        metadata["private"] = True
    if name == POSTED:
        metadata[f"new_{own}"] = draw.choice(KINDS)  # a field that the snapshot does not have
    words = " ".join(f"{own} {word}" for word in draw.choices(WORDS, k=6))
    return {
        "id": f"{own}-{name}",
        "title": f"{own} {draw.choice(WORDS)}",
        "text": f"{words}。" * 3,
        "metadata": metadata,
    }


@dataclass
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:  # noqa: ANN401 (whatever the body holds)
        return json.loads(self.body)


class Leak(AssertionError):
    """An answer contains something of another tenant, or lacks something of the tenant's own."""


@dataclass
class Fuzz:
    """One run; `documents` are all visible ones, by owner and id."""

    app: FastAPI
    keys: Mapping[str, str]
    draw: random.Random
    documents: dict[str, dict[str, dict[str, Any]]]
    counts: Counter[str] = field(default_factory=Counter)

    async def send(self, caller: str, method: str, path: str, body: object = None, *, lines: bool = False) -> Answer:
        raw, _, query = path.partition("?")
        headers = {**bearer(self.keys[caller]), "host": "localhost"} | (
            {"accept": "application/x-ndjson"} if lines else {}
        )
        sent = b"" if body is None else json.dumps(body).encode()
        scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": raw, "raw_path": raw.encode(),
            "query_string": query.encode(), "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "scheme": "http", "root_path": "",
        }  # fmt: skip
        received: list[Any] = []
        unread = [{"type": "http.request", "body": sent, "more_body": False}]

        async def receive() -> Any:  # noqa: ANN401 (a message)
            return unread.pop() if unread else await asyncio.Event().wait()

        async def take(message: Any) -> None:  # noqa: ANN401 (a message)
            received.append(message)

        await self.app(scope, receive, take)
        answer = Answer(received[0]["status"], b"".join(message.get("body", b"") for message in received[1:]))
        self.counts[f"{caller} {answer.status}"] += 1
        if answer.status >= 500:
            raise Leak(f"{method} {path} {body} of {caller} was answered {answer.status}: {answer.body!r}")
        return answer

    def check(self, caller: str, answer: Answer, asked: object) -> None:
        """Raises Leak if an answer contains a mark of another tenant that was not in the request."""
        if caller == "all":
            return
        known = {mark(caller)} | set(MARK.findall(json.dumps(asked)))
        if strange := set(MARK.findall(answer.body.decode())) - known:
            raise Leak(f"{caller} saw {strange} after {asked}: {answer.body.decode()[:2000]}")

    def own(self, caller: str) -> dict[str, dict[str, Any]]:
        return self.documents.get(caller, {})

    # Requests, and checks of their answers.

    def some_filter(self) -> dict[str, Any]:
        """Draws a filter on fields and values of any tenant."""
        owner = self.draw.choice(OWNERS)
        number = (OWNERS.index(owner) + 1) * RANGE
        simple: list[dict[str, Any]] = [
            {"field": "tenant", "eq": owner},
            {"field": "kind", "in": self.draw.sample(KINDS, 2)},
            {"field": "account", "gte": number, "lt": number + RANGE},
            {"field": "account", "eq": "no number"},
            {"field": f"only_{mark(owner)}", "eq": "drug"},
            {"field": f"new_{mark(owner)}", "eq": "drug"},
            {"field": "note", "gte": "a"},
            {"field": "tags", "eq": mark(owner)},
            {"field": "private", "eq": True},
            {"field": "absent", "eq": 1},
        ]
        chosen = self.draw.choice(simple)
        wrap = self.draw.random()
        if wrap < 0.2:
            return {"not": chosen}
        return {"any": [chosen, self.draw.choice(simple)]} if wrap < 0.4 else chosen

    def search_body(self) -> dict[str, Any]:
        draw = self.draw
        query = " ".join(draw.choices((*WORDS, *(mark(owner) for owner in OWNERS)), k=draw.randint(1, 2)))
        body: dict[str, Any] = {"query": query, "mode": draw.choice(("dense", "lexical", "hybrid"))}
        options = {
            "top_k": draw.choice((1, 10, 100)),
            "filters": [self.some_filter() for _ in range(draw.randint(1, 2))],
            "facets": draw.sample(
                ("tenant", "kind", "account", "tags", "note", f"only_{mark(draw.choice(OWNERS))}"), 2
            ),
            "explain": True,
            "passages": 3,
            "fields": ["title", "text", "metadata", "snippet", "headline"],
            "cache": False,
            "min_score": 0.1,
            "fusion": "reciprocal",
        }
        body |= {name: options[name] for name in options if draw.random() < 0.3}
        if draw.random() < 0.1:
            body["offset"] = 0 if body.get("top_k") == 100 else 5
        return body

    async def search(self, caller: str, body: dict[str, Any]) -> None:
        how = self.draw.random()
        named = [body.get("filters"), body.get("facets")]
        if how < 0.15:
            answer = await self.send(
                caller, "POST", "/v1/search", body | {"query": [body["query"], "头痛"]}, lines=True
            )
            results = [line for line in map(json.loads, answer.body.splitlines()) if "hits" in line]
        elif how < 0.3:
            given = {"q": body["query"], "mode": body["mode"], "top_k": 100, "facets": "kind,tenant"}
            named = []
            answer = await self.send(caller, "GET", f"/v1/search?{urlencode(given)}")
            results = answer.json().get("results", [])
        else:
            answer = await self.send(caller, "POST", "/v1/search", body)
            results = answer.json().get("results", [])
        self.check(caller, answer, named)
        if caller == "all":
            return
        own = self.own(caller)
        for result in results:
            ids = [hit["id"] for hit in result["hits"]]
            if not set(ids) <= own.keys():
                raise Leak(f"{caller} found {set(ids) - own.keys()} by {body}")
            for name, values in result.get("facets", {}).items():
                if any(count > len(own) for count in values.values()):
                    raise Leak(f"{caller} counted {name}: {values} of {len(own)} documents by {body}")
        plain = not {"filters", "min_score", "offset"} & body.keys() and body["mode"] == "dense"
        if plain and body.get("top_k") == 100 and how >= 0.3 and answer.status == 200:
            found = {hit["id"] for hit in results[0]["hits"]}
            if found != own.keys():
                raise Leak(f"{caller} misses {own.keys() - found} by {body}")

    async def get_document(self, caller: str) -> None:
        owner = self.draw.choice(OWNERS)
        name = self.draw.choice([*self.documents[owner], f"{mark(owner)}-absent"])
        answer = await self.send(caller, "GET", f"/v1/documents/{quote(name)}")
        self.check(caller, answer, [])
        if caller != "all" and (answer.status == 200) != (name in self.own(caller)):
            raise Leak(f"{caller} got {answer.status} for {name}")

    async def collection(self, caller: str) -> None:
        answer = await self.send(caller, "GET", "/v1/collection")
        self.check(caller, answer, [])
        if caller == "all":
            return
        facts, own = answer.json(), self.own(caller)
        if facts["documents"] != len(own) or facts["fresh"]["documents"] > len(own):
            raise Leak(f"{caller} counts {facts['documents']}, {facts['fresh']} of {len(own)}")
        kinds = Counter(document["metadata"]["kind"] for document in own.values())
        if facts["facets"].get("kind", {}) != dict(kinds):
            raise Leak(f"{caller} counts {facts['facets']}, not {kinds}")
        fields = {name for document in own.values() for name in document["metadata"]}
        if set(facts["fields"]) - fields and caller not in WRITERS:
            raise Leak(f"{caller} sees fields {facts['fields']}")
        for limits in facts["numbers"].values():
            first = (OWNERS.index(caller) + 1) * RANGE if caller in OWNERS else -1
            if not first <= limits["min"] <= limits["max"] < first + RANGE:
                raise Leak(f"{caller} sees numbers {facts['numbers']}")

    async def other(self, caller: str) -> None:
        for path, body in (
            ("/v1/rerank", {"query": "头痛", "documents": ["a", "b"]}),
            ("/v1/embeddings", {"input": "头痛"}),
        ):
            self.check(caller, await self.send(caller, "POST", path, body), [])
        for path in ("/metrics", "/admin/versions"):
            if (await self.send(caller, "GET", path)).status != 403:
                raise Leak(f"{caller} may read {path}")

    async def read(self, caller: str, body: dict[str, Any]) -> None:
        chance = self.draw.random()
        if chance < 0.75:
            await self.search(caller, body)
        elif chance < 0.9:
            await self.get_document(caller)
        elif chance < 0.98:
            await self.collection(caller)
        else:
            await self.other(caller)

    async def write(self) -> None:
        """Changes a document: by a tenant, its own or that of another, or by the key that sees everything."""
        draw = self.draw
        caller, owner = draw.choice((*WRITERS, "all", "none")), draw.choice(OWNERS)
        names = [*self.documents[owner], f"{mark(owner)}-{draw.randrange(20)}"]
        name = draw.choice(names)
        allowed = caller == "all" or name in self.own(caller)
        if draw.random() < 0.4:
            answer = await self.send(caller, "DELETE", f"/v1/documents/{quote(name)}")
            self.check(caller, answer, [])
            held = name in self.documents[owner]
            if answer.json()["changed"] != int(allowed and held):
                raise Leak(f"{caller} changed {answer.json()} by deleting {name}")
            if allowed:
                self.documents[owner].pop(name, None)
            return
        author = draw.choice((owner, draw.choice(OWNERS), caller if caller in OWNERS else owner))
        document = make(author, POSTED, draw) | {"id": name}
        answer = await self.send(caller, "POST", "/v1/documents", {"documents": [document]})
        self.check(caller, answer, [document])
        fits, held = caller in ("all", author), name in self.documents[owner]
        expected = 422 if not fits else 409 if held and not allowed else 200
        if answer.status != expected:
            raise Leak(f"{caller} got {answer.status}, not {expected}, for {document}: {answer.body.decode()}")
        if answer.status == 200:
            self.documents[owner].pop(name, None)
            # An id keeps its first owner's mark; documents of another author would rightly show it.
            if mark(author) in name:
                self.documents[author][name] = document
            else:
                await self.send("all", "DELETE", f"/v1/documents/{quote(name)}")

    async def run(self, requests: int) -> None:
        readers = [*TENANTS, "all"]
        while sum(self.counts.values()) < requests:
            if self.draw.random() < WRITES * AT_ONCE:
                await self.write()
                continue
            shared = self.search_body()
            same = self.draw.random() < 0.5
            callers = [self.draw.choice(readers) for _ in range(AT_ONCE)]
            await asyncio.gather(*(self.read(each, shared if same else self.search_body()) for each in callers))


def make_keys(path: Path) -> dict[str, str]:
    """Makes a key for each tenant and one that sees everything, with filters written as an operator would."""
    keys = {name: create(path, name, "--scope", "search", "--scope", "write") for name in (*TENANTS, "all")}
    file = json.loads(path.read_text())
    for record in file["keys"]:
        if record["name"] in TENANTS:
            record["filters"] = TENANTS[record["name"]]
    path.write_text(json.dumps(file))
    return keys


async def fuzz(
    folder: Path, requests: int, seed: int, redis_url: str | None = None, kept: Path | None = None
) -> Counter[str]:
    """Runs the requests; raises Leak. Returns the number of answers by key and status.

    `kept` is a folder for the built collection of each seed, since encoding takes longer than many requests.
    """
    draw = random.Random(seed)
    documents = {
        owner: {each["id"]: each for each in (make(owner, str(number), draw) for number in range(DOCUMENTS))}
        for owner in OWNERS
    }
    corpus = folder / "corpus.jsonl"
    rows = [{"_id": name} | document for own in documents.values() for name, document in own.items()]
    corpus.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    built = Collection((kept or folder) / f"built-{seed}")
    if not (built.root / "CURRENT").exists():
        encoder = OnnxEncoder.load(BUNDLED_ENCODER, threads=1)
        built.publish(build([corpus], encoder, built, BuildOptions(passage_tokens=64, overlap=8)).version)
    collection = Collection(shutil.copytree(built.root, folder / "collection"))
    keys = make_keys(folder / "keys.json")
    limits = {"timeout_ms": PATIENCE_MS, "max_wait_ms": PATIENCE_MS, "probe_timeout_ms": PATIENCE_MS}
    settings = Settings(
        collection=collection.root, keys_file=folder / "keys.json", threads=1, reload_seconds=0, lru_mb=16,
        fresh_limit=10_000_000, redis_url=redis_url, **limits,
    )  # fmt: skip
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        run = Fuzz(app, keys, draw, documents)
        await run.run(requests)
    return run.counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="care-tenants-") as folder:
        counts = asyncio.run(fuzz(Path(folder), given.requests, given.seed))
    by_status: Counter[str] = Counter()
    for name, count in counts.items():
        by_status[name.split()[1]] += count
    print(f"{sum(counts.values())} requests in {time.monotonic() - began:.0f} s, no leak; by status {dict(by_status)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
