// Requests to the server that this page came from. Addresses are relative to the page's.

import { events } from "./sse.js";

/** What went wrong, in words to show. `status` is 0 where no answer came. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }

  get unreachable() {
    return this.status === 0;
  }
}

export const isAbort = (error) => error instanceof DOMException && error.name === "AbortError";

export class Api {
  /** `keys` has `api` and `admin`, each a text or empty. */
  constructor(keys) {
    this.keys = keys;
  }

  /** The answer to a GET: raises ApiError unless its status is good or one of `also`. */
  async get(path, { key = this.keys.api, signal, also = [] } = {}) {
    return this.#send(path, { headers: bearer(key), signal }, also);
  }

  async json(path, options) {
    return (await this.get(path, options)).json();
  }

  /** The answer to a POST of JSON; `signal` aborts it. */
  async post(path, body, signal) {
    const request = { method: "POST", body: JSON.stringify(body), signal };
    request.headers = { "content-type": "application/json", ...bearer(this.keys.api) };
    return (await this.#send(path, request)).json();
  }

  /** The chunks of a streamed chat completion; `opened` is called when the answer begins. */
  async *stream(body, { signal, id, opened }) {
    const headers = { "content-type": "application/json", "x-request-id": id };
    const request = { method: "POST", body: JSON.stringify(body), signal };
    request.headers = { ...headers, ...bearer(this.keys.api) };
    const response = await this.#send("v1/chat/completions", request);
    opened();
    try {
      for await (const data of events(response.body)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.message, { status: 500, ...chunk.error });
        yield chunk;
      }
    } catch (error) {
      if (error instanceof ApiError || isAbort(error)) throw error;
    }
    throw new ApiError("The connection ended before the answer did.", { code: "cut" });
  }

  async #send(path, request, also = []) {
    let response;
    try {
      response = await fetch(path, { ...request, credentials: "omit", cache: "no-store" });
    } catch (error) {
      if (isAbort(error)) throw error;
      throw new ApiError("The server does not answer.");
    }
    if (response.ok || also.includes(response.status)) return response;
    throw await problem(response);
  }
}

function bearer(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function problem(response) {
  const { status } = response;
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered with status ${status}.`;
  const about = body?.error?.param ? `${body.error.param}: ` : "";
  const text = message.includes(body?.error?.param ?? "") ? message : about + message;
  return new ApiError(text, { status, code: body?.error?.code ?? null, retryAfter });
}
