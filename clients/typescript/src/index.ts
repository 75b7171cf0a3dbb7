/** A client of CARE Search for browsers, Node, Deno and Bun; every path and type comes from the OpenAPI document. */

import createClient, { type Client } from "openapi-fetch";
import type { components, paths } from "./schema.js";

export type { components, paths };
export type SearchRequest = components["schemas"]["SearchRequest"];
export type SearchAnswer = components["schemas"]["SearchAnswer"];
export type ErrorAnswer = components["schemas"]["ErrorAnswer"];
export type CareClient = Client<paths>;

export interface Options {
  /** Sent as `Authorization: Bearer`. */
  apiKey?: string;
  /** Attempts in all for an answer of 429 or 503 and for a broken connection: every call is idempotent. */
  attempts?: number;
  /** Another `fetch`, for tests or proxies. */
  fetch?: (request: Request) => Promise<Response>;
}

const FIRST_WAIT_MS = 100;

/** Makes a client: `await client.POST("/v1/search", { body: { query: "…" } })` gives `data` or `error`. */
export function createCareClient(baseUrl: string, options: Options = {}): CareClient {
  const { apiKey, attempts = 4, fetch: send = fetch } = options;
  return createClient<paths>({
    baseUrl,
    headers: apiKey ? { authorization: `Bearer ${apiKey}` } : {},
    fetch: (request: Request) => sendWithRetries(request, attempts, send),
  });
}

async function sendWithRetries(
  request: Request,
  attempts: number,
  send: (request: Request) => Promise<Response>,
): Promise<Response> {
  for (let made = 1; ; made++) {
    let asked = 0;
    try {
      const response = await send(request.clone());
      if ((response.status !== 429 && response.status !== 503) || made >= attempts) return response;
      asked = 1000 * Number(response.headers.get("retry-after") ?? 0) || 0;
    } catch (error) {
      if (made >= attempts || request.signal.aborted) throw error;
    }
    const backoff = FIRST_WAIT_MS * 2 ** (made - 1) * (0.5 + Math.random() / 2);
    await new Promise((resolve) => setTimeout(resolve, Math.max(asked, backoff)));
  }
}
