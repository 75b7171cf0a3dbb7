// The built client in Node, against the service at CARE_URL: `make typescript` runs it through tests/clients.

import assert from "node:assert/strict";
import { test } from "node:test";
import { CareClientError, createCareClient } from "../dist/index.js";

const url = process.env.CARE_URL;
const care = createCareClient(url, { apiKey: process.env.CARE_API_KEY });

test("a search finds documents", async () => {
  const body = { query: "高血压吃什么药", top_k: 2, filters: [{ field: "kind", eq: "drug" }] };
  const { data, error, response } = await care.POST("/v1/search", { body });
  assert.equal(error, undefined);
  assert.equal(response.status, 200);
  assert.equal(data.results[0].hits[0].id, "a-1");
  const { data: same } = await care.GET("/v1/search", { params: { query: { q: "高血压吃什么药", top_k: 1 } } });
  assert.equal(same.results[0].hits[0].id, "a-1");
});

test("documents, collection and ranking have their shapes", async () => {
  const { data: document } = await care.GET("/v1/documents/{id}", { params: { path: { id: "a-1" } } });
  assert.equal(document.title, "高血压用药");
  const { data: collection } = await care.GET("/v1/collection");
  assert.deepEqual(collection.fields, ["kind", "year"]);
  const documents = ["血常规", "氨氯地平治疗高血压"];
  const { data: ranked } = await care.POST("/v1/rerank", { body: { query: "高血压吃什么药", documents } });
  assert.equal(ranked.results[0].index, 1);
});

test("an error is a value with a code and the wrong field", async () => {
  const { data, error } = await care.POST("/v1/search", { body: { query: "x", top_k: 0 } });
  assert.equal(data, undefined);
  assert.equal(error.error.field, "top_k");
});

test("the key is sent, and a refusal is tried again", async () => {
  const seen = [];
  const fake = async (request) => {
    seen.push(request.headers.get("authorization"));
    const busy = seen.length < 3;
    return Response.json(busy ? {} : { results: [] }, { status: busy ? 503 : 200, headers: { "retry-after": "0" } });
  };
  const { data } = await createCareClient(url, { apiKey: "k-1", fetch: fake }).POST("/v1/search", { body: { query: "x" } });
  assert.deepEqual(data, { results: [] });
  assert.deepEqual(seen, ["Bearer k-1", "Bearer k-1", "Bearer k-1"]);
  const { response } = await createCareClient(url, { attempts: 1, fetch: async () => new Response("{}", { status: 429 }) })
    .POST("/v1/search", { body: { query: "x" } });
  assert.equal(response.status, 429);
});

test("a key may end with a line break; another that no header can hold is refused and not shown", async () => {
  let sent;
  const fake = async (request) => {
    sent = request.headers.get("authorization");
    return Response.json({ results: [] });
  };
  await createCareClient(url, { apiKey: "k-1\n", fetch: fake }).POST("/v1/search", { body: { query: "x" } });
  assert.equal(sent, "Bearer k-1");
  for (const apiKey of ["secret\n2", "secret-ü", "secret\0"]) {
    assert.throws(() => createCareClient(url, { apiKey }), (error) => {
      assert(error instanceof CareClientError);
      assert.match(error.message, /^the API key holds a character that is not visible ASCII/);
      return !error.message.includes("secret");
    });
  }
});

test("a page in place of an answer is the client's own error", async () => {
  const page = async () => new Response("<html>", { headers: { "content-type": "text/html" } });
  const asked = createCareClient(url, { fetch: page }).GET("/v1/collection");
  await assert.rejects(asked, (error) => {
    assert(error instanceof CareClientError);
    return /\/v1\/collection answered with text\/html, not JSON: another program listens there/.test(error.message);
  });
  const { data } = await care.GET("/metrics", { parseAs: "text" });
  assert.match(data, /care_/);
});

test("a wait of hours is not waited for, and an act of an administrator is done once", async () => {
  let calls = 0;
  const refuse = async () => {
    calls += 1;
    return new Response("{}", { status: 429, headers: { "retry-after": "28800" } });
  };
  const limited = await createCareClient(url, { fetch: refuse }).POST("/v1/search", { body: { query: "x" } });
  assert.deepEqual([limited.response.status, calls], [429, 1]);
  calls = 0;
  const broken = async () => {
    calls += 1;
    throw new TypeError("fetch failed");
  };
  await assert.rejects(createCareClient(url, { fetch: broken }).POST("/admin/rollback"), /fetch failed/);
  assert.equal(calls, 1);
});

test("an answer that is tried again gives its connection back", async () => {
  let calls = 0;
  let cancelled = 0;
  const fake = async () => {
    calls += 1;
    if (calls === 3) return Response.json({ results: [] });
    return new Response(new ReadableStream({ cancel: () => void (cancelled += 1) }), { status: 503 });
  };
  const { data } = await createCareClient(url, { fetch: fake }).POST("/v1/search", { body: { query: "x" } });
  assert.deepEqual([data, cancelled], [{ results: [] }, 2]);
});

test("an abort ends the wait for the next attempt", async (context) => {
  const stop = new AbortController();
  const waits = [];
  // A timer that never fires: only the abort, which comes once the wait has begun, can end it.
  context.mock.method(globalThis, "setTimeout", (_, milliseconds) => {
    waits.push(milliseconds);
    queueMicrotask(() => stop.abort(new Error("enough")));
  });
  const busy = async (request) => {
    request.signal.throwIfAborted();
    return new Response("{}", { status: 503, headers: { "retry-after": "12" } });
  };
  const call = createCareClient(url, { fetch: busy }).POST("/v1/search", { body: { query: "x" }, signal: stop.signal });
  await assert.rejects(call, /enough/);
  assert.deepEqual(waits, [12_000]);
});
