// What one answer cost, added up chunk by chunk as the server reports it.

export const TERMS = ["draft", "head", "verify", "other"];

export class Figures {
  /** started: milliseconds, `performance.now()` when the request was sent. */
  constructor(started) {
    this.started = started;
    this.hasBegun = false;
    this.firstAt = null; // when the first tokens came, ms
    this.lastAt = null;
    this.firstTokens = 0; // tokens of the first chunk: the prefill's, outside the rate
    this.tokens = 0;
    this.cycles = 0; // decode cycles seen, the prefill excluded
    this.drafts = 0; // cycles that proposed something
    this.proposed = 0;
    this.accepted = 0;
    this.termsMs = Object.fromEntries(TERMS.map((term) => [term, 0]));
    this.tokenIds = [];
    this.reported = null; // the server's own summary of the request, with the last chunk
  }

  /** Takes in the `speculation` part of a chunk that came at `now`. */
  add(part, now) {
    const hasPrefill = !this.hasBegun;
    this.hasBegun ||= part.cycles > 0;
    if (part.tokens.length > 0) {
      if (this.firstAt === null) {
        this.firstAt = now;
        this.firstTokens = part.tokens.length;
      }
      this.lastAt = now;
      this.tokens += part.tokens.length;
      this.tokenIds.push(...part.tokens.map((token) => token.id));
    }
    this.proposed += part.proposed;
    this.accepted += part.accepted;
    this.drafts += part.drafts;
    if (hasPrefill) return; // its terms are those of the whole prompt
    this.cycles += part.cycles;
    for (const term of TERMS) this.termsMs[term] += part.terms_ms[term];
  }

  /** The last chunk: `usage` counts what was held back too, `metrics` is the server's summary if it gives one. */
  close(usage, metrics) {
    if (usage) this.tokens = usage.completion_tokens;
    this.reported = metrics?.speculative_decoding ?? null;
  }

  /** Tokens that a cycle with drafts commits on average; 1 while nothing was drafted. */
  get tau() {
    return this.reported?.mean_acceptance_length ?? 1 + (this.drafts ? this.accepted / this.drafts : 0);
  }

  /** Part of the drafted tokens that the target accepted, or null without any. */
  get acceptanceRate() {
    if (this.proposed === 0) return null;
    return this.reported?.draft_acceptance_rate ?? this.accepted / this.proposed;
  }

  /** Decoding speed, the prefill left out; null before the second chunk. */
  get tokensPerSecond() {
    const seconds = (this.lastAt - this.firstAt) / 1e3;
    return this.firstAt !== null && seconds > 0 ? (this.tokens - this.firstTokens) / seconds : null;
  }

  /** From sending to the first tokens, or null before them. */
  get firstTokenMs() {
    return this.firstAt === null ? null : this.firstAt - this.started;
  }

  /** Milliseconds of a mean cycle, by term. */
  get meanTermsMs() {
    return Object.fromEntries(TERMS.map((term) => [term, this.cycles ? this.termsMs[term] / this.cycles : 0]));
  }
}
