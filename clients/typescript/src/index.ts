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
  /**
   * Attempts in all for an answer of 429 or 503 and for a broken connection, within 15 s of waiting. Calls of /admin are
   * made once; all others are idempotent.
   */
  attempts?: number;
  /** Another `fetch`, for tests or proxies. */
  fetch?: (request: Request) => Promise<Response>;
}

/** A key that cannot be sent, or an answer that is not the service's. Error answers are values, not exceptions. */
export class CareClientError extends Error {
  override name = "CareClientError";
}

const FIRST_WAIT_MS = 100;
const TOTAL_WAIT_MS = 15_000;

/** Makes a client: `await client.POST("/v1/search", { body: { query: "…" } })` gives `data` or `error`. */
export function createCareClient(baseUrl: string, options: Options = {}): CareClient {
  const { attempts = 4, fetch: send = fetch } = options;
  const apiKey = options.apiKey?.trim(); // a file of one key ends with a line break
  if (apiKey && !/^[\x20-\x7e]+$/.test(apiKey)) { // the error of fetch would show it
    throw new CareClientError("the API key holds a character that is not visible ASCII; copy it again, on one line");
  }
  const client = createClient<paths>({
    baseUrl,
    headers: apiKey ? { authorization: `Bearer ${apiKey}` } : {},
    fetch: (request: Request) => sendWithRetries(request, attempts, send),
  });
  client.use({
    onResponse: async ({ request, response, options: { parseAs } }) => {
      const type = response.headers.get("content-type") ?? "no content type";
      if (!response.ok || response.status === 204 || parseAs !== "json" || /^application\/json\b/.test(type)) return;
      await response.body?.cancel();
      throw new CareClientError(
        `${request.url} answered with ${type}, not JSON: another program listens there, or the call needs parseAs`,
      );
    },
  });
  return client;
}

async function sendWithRetries(
  request: Request,
  attempts: number,
  send: (request: Request) => Promise<Response>,
): Promise<Response> {
  // A second rollback would go back one version more.
  const most = new URL(request.url).pathname.includes("/admin/") ? 1 : attempts;
  let waited = 0;
  for (let made = 1; ; made++) {
    let response: Response | undefined;
    let failure: unknown;
    try {
      response = await send(request.clone());
      if (response.status !== 429 && response.status !== 503) return response;
    } catch (error) {
      failure = error;
    }
    const asked = 1000 * Number(response?.headers.get("retry-after") ?? 0) || 0;
    const wait = Math.max(asked, FIRST_WAIT_MS * 2 ** (made - 1) * (0.5 + Math.random() / 2));
    waited += wait;
    // A key beyond its daily rate is told to wait for hours.
    if (made >= most || waited > TOTAL_WAIT_MS || request.signal.aborted) {
      if (response) return response;
      throw failure;
    }
    await response?.body?.cancel(); // an answer that is not read would keep its connection
    await pause(wait, request.signal);
  }
}

/** Waits; a signal that aborts ends the wait at once, and the next attempt fails with its reason. */
function pause(milliseconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
