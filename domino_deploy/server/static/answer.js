// One answer on the page.  Whatever a model wrote reaches the document as text nodes only.

import { TERMS } from "./figures.js";

const SHOWN = [
  ["tau", "τ, tokens per cycle", "Tokens that a cycle with drafts commits on average: 1 is plain decoding"],
  ["acceptance", "accepted", "Part of the drafted tokens that the target accepted"],
  ["speed", "tok/s", "Tokens per second once the first one is there"],
  ["first", "first token", "From sending to the first token"],
  ["tokens", "tokens", "Length of the answer"],
];

export class AnswerView {
  /** title: how it is made; isPlain: without drafts, where marks would say nothing. */
  constructor(title, isPlain) {
    this.element = made("article", isPlain ? "answer plain" : "answer");
    this.element.setAttribute("aria-label", `Answer, ${title}`);
    this.title = add(this.element, "h2", "title", title);
    this.text = add(this.element, "div", "text");
    this.figures = add(this.element, "dl", "figures");
    this.values = {};
    for (const [name, label, explanation] of SHOWN) {
      const pair = add(this.figures, "div", "figure");
      pair.title = explanation;
      add(pair, "dt", "", label);
      this.values[name] = add(pair, "dd", "", "–");
      this.values[name].dataset.figure = name;
    }
    this.#addBar();
    this.cycle = 0;
  }

  #addBar() {
    this.cycleBox = add(this.element, "div", "cycle");
    this.bar = add(this.cycleBox, "div", "bar");
    this.bar.setAttribute("aria-hidden", "true"); // the list beside it says the same
    const list = add(this.cycleBox, "ul", "terms");
    this.cycleMs = add(list, "li", "total", "cycle –");
    this.terms = {};
    for (const term of TERMS) {
      const part = add(this.bar, "span", term);
      const item = add(list, "li", term, term);
      const value = add(item, "span", "value", "–");
      value.dataset.term = term;
      this.terms[term] = { part, value };
    }
  }

  /** Its turn has come. */
  begin() {
    this.element.setAttribute("aria-busy", "true");
  }

  /** Appends the tokens of a chunk's `speculation` part, or text that came without one. */
  append(part, plainText) {
    for (const token of part?.tokens ?? []) {
      if (token.text === "") continue; // an end-of-sequence token, or a part of a character
      const kind = token.drafted ? "drafted" : "own";
      const shown = add(this.text, "span", `token ${kind}`, token.text);
      const from = this.cycle === 0 ? "Prompt pass" : `Cycle ${this.cycle}`;
      shown.title = `${from}: ${token.drafted ? "drafted and accepted" : "the target's own"} (token ${token.id})`;
    }
    if (!part && plainText) add(this.text, "span", "", plainText);
    this.cycle += part?.cycles ?? 0;
  }

  /** Shows where the figures stand. */
  show(figures) {
    const { values } = this;
    values.tau.textContent = figures.tau.toFixed(2);
    values.acceptance.textContent = figures.acceptanceRate === null ? "–" : `${Math.round(100 * figures.acceptanceRate)} %`;
    values.speed.textContent = figures.tokensPerSecond === null ? "–" : figures.tokensPerSecond.toFixed(1);
    values.first.textContent = figures.firstTokenMs === null ? "–" : duration(figures.firstTokenMs);
    values.tokens.textContent = String(figures.tokens);
    const means = figures.meanTermsMs;
    const total = TERMS.reduce((sum, term) => sum + means[term], 0);
    this.cycleMs.textContent = total > 0 ? `cycle ${total.toFixed(1)} ms` : "cycle –";
    for (const term of TERMS) {
      this.terms[term].part.style.flexGrow = String(means[term]);
      this.terms[term].value.textContent = total > 0 ? means[term].toFixed(1) : "–";
    }
  }

  /** Ends the answer; `note` says how if it did not end by itself. */
  end(note) {
    this.element.setAttribute("aria-busy", "false");
    if (note) add(this.title, "span", "badge", note);
  }

  /** Ends the answer with an error, and a button that calls `again`. */
  fail(message, again) {
    this.end();
    const box = made("div", "error");
    box.setAttribute("role", "alert");
    add(box, "p", "", message);
    const button = add(box, "button", "quiet", "Try again");
    button.type = "button";
    button.addEventListener("click", again);
    this.text.after(box);
  }
}

/** A question on the page. */
export function questionElement(text) {
  const element = made("article", "question", text);
  element.setAttribute("aria-label", "You");
  return element;
}

/** How two finished answers compare: the ratio of their speeds, and whether they are the same. */
export function comparisonElement(speculative, plain) {
  const element = made("p", "comparison");
  const ratio = speculative.tokensPerSecond / plain.tokensPerSecond;
  if (Number.isFinite(ratio) && ratio > 0) {
    const value = add(element, "strong", "", `${ratio.toFixed(2)}×`);
    value.dataset.figure = "ratio";
    element.append(" the speed with speculation; ");
  }
  const isSame = speculative.tokenIds.join() === plain.tokenIds.join();
  const same = add(element, "span", "same", isSame ? "the same tokens both ways" : "different tokens: sampled without a seed, stopped, or a near tie");
  same.dataset.figure = "same";
  return element;
}

function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

/** A new element with its class and its text. */
export function made(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

function add(parent, ...what) {
  return parent.appendChild(made(...what));
}
