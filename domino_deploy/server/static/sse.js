// Server-sent events as they come over fetch: EventSource can neither POST nor send a key.

/** The data of each event of a body (ReadableStream of bytes), up to `[DONE]`; comments are skipped. */
export async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = dataOf(block);
        if (data === "[DONE]") return;
        if (data) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // a connection that broke already has nothing to cancel
  }
}

function dataOf(block) {
  const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}
