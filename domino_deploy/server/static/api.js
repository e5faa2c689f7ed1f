// The server's API, and its refusals in words.

import { eventData } from "./sse.js";

/** What the server refused; `message` is for the reader, `status` the HTTP status (0: no answer at all). */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The models served: [{id, max_model_len}]. */
export async function models(key) {
  const response = await ask("v1/models", { headers: headers(key) });
  return (await response.json()).data;
}

/** The chunks of one streamed answer, as parsed objects. */
export async function* answer(body, key, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true }, speculation_details: true }),
    signal,
  });
  try {
    for await (const data of eventData(response.body)) {
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(`The server gave up: ${chunk.error.message}`, response.status);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof TypeError) throw new ServerError("The connection broke before the answer was complete.", 0);
    throw error;
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is it running?", 0);
  }
  if (!response.ok) throw new ServerError(await refusal(response), response.status);
  return response;
}

async function refusal(response) {
  const body = await response.json().catch(() => null); // a proxy may answer in HTML
  const said = body?.error?.message ?? response.statusText;
  const seconds = Number(response.headers.get("Retry-After"));
  const later = seconds > 0 ? ` Try again in ${seconds} s.` : " Try again shortly.";
  if (response.status === 401) return "The server wants an API key, or another one than given. Enter it in the settings.";
  if (response.status === 429) return `The server is busy and takes no more requests now.${later}`;
  if (response.status === 503) return `The server is not ready: ${said}${later}`;
  return `The server refused this (${response.status}): ${said}`;
}
