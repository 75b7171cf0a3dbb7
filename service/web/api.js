// Speaks to the service. Every failure becomes one ServiceError; an abandoned request rejects with AbortError. A service
// that takes a key is given the one that the reader typed, which this tab remembers until it is closed.

import { sentence } from "./language.js";

const KEY = "care-key";

export class ServiceError extends Error {
  /** @param {string | null} message the service's own words, null where it was not the service that answered */
  constructor(message, { status = 0, requestId = null } = {}) {
    super(message ?? "");
    this.status = status;
    this.requestId = requestId;
  }
}

export function search(body, signal) {
  const headers = { "Content-Type": "application/json" };
  return ask("/v1/search", { method: "POST", headers, body: JSON.stringify(body), signal });
}

export function getDocument(id) {
  return ask(`/v1/documents/${encodeURIComponent(id)}`);
}

export function getCollection() {
  return ask("/v1/collection");
}

/** Keeps the digits of a whole number that JavaScript cannot hold, as a text, where the browser shows its source. */
function exactly(key, value, { source } = {}) {
  return source && Number.isInteger(value) && !Number.isSafeInteger(value) && /^-?\d+$/.test(source) ? source : value;
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  let response, body;
  try {
    response = await fetch(path, key ? { ...options, headers: { ...options.headers, "api-key": key } } : options);
    body = JSON.parse(await response.text(), exactly);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ServiceError(null, { status: response?.status });
  }
  if (response.status === 401) {
    // Another request may have asked for the key meanwhile.
    const known = sessionStorage.getItem(KEY);
    const given = known === key ? window.prompt(sentence("askKey"))?.trim() : known;
    if (given) {
      sessionStorage.setItem(KEY, given);
      return ask(path, options);
    }
  }
  if (!response.ok) {
    const { message = null, request_id: requestId = response.headers.get("x-request-id") } = body?.error ?? {};
    throw new ServiceError(message, { status: response.status, requestId });
  }
  return body;
}
