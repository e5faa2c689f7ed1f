// The page: settings, the conversation, and what happens on Send.

import { answer, models } from "./api.js";
import { AnswerView, comparisonElement, made, questionElement } from "./answer.js";
import { Figures } from "./figures.js";
import { body, key, mode, order, rememberKey, showModels, whenKeyChanges, whenOrderChanges } from "./settings.js";

const $ = (id) => document.getElementById(id);
const WAYS = { on: "with speculation", off: "without speculation" };
const NEAR_END = 40; // pixels: who scrolls further up than this reads, and is left there

let history = []; // of {role, content}; what the model said is the first column's
let running = null; // the AbortController of the answer that is coming
let isFollowing = true; // whether the page scrolls along with the text

async function send(text) {
  $("welcome").hidden = true;
  const messages = [...history, { role: "user", content: text }];
  const turn = made("section", "turn");
  turn.append(questionElement(text));
  const columns = turn.appendChild(made("div", "columns"));
  $("conversation").append(turn);

  running = new AbortController();
  showRunning(true);
  const ways = mode() === "both" ? ["on", "off"] : [mode()];
  const again = () => {
    if (running) return; // a later question's answer is coming, or the second one side by side
    turn.remove();
    send(text);
  };
  const runs = ways.map((way) => ({ way, view: new AnswerView(WAYS[way], way === "off") }));
  columns.append(...runs.map(({ view }) => view.element));
  columns.classList.toggle("two", runs.length === 2);
  isFollowing = true;
  followEnd();
  const run = ({ way, view }) => receive(view, { ...body(messages), speculative: way === "on" }, running.signal, again);
  const answers = order() === "both" ? await Promise.all(runs.map(run)) : await inTurn(runs, run);

  if (answers.length === 2 && answers.every(Boolean)) turn.append(comparisonElement(answers[0].figures, answers[1].figures));
  // A question without an answer is not part of what the next one builds on.
  if (answers[0]) history = [...messages, { role: "assistant", content: answers[0].text }];
  running = null;
  showRunning(false);
  $("status").textContent = answers[0] ? `Answer complete, ${answers[0].figures.tokens} tokens.` : "No answer.";
  followEnd();
}

async function inTurn(runs, run) {
  const answers = [];
  for (const one of runs) answers.push(await run(one));
  return answers;
}

/** Streams one answer into its view; its text and figures, or null if there was none. */
async function receive(view, request, signal, again) {
  const figures = new Figures(performance.now());
  let text = "";
  let note = "";
  try {
    signal.throwIfAborted(); // stopped before its turn came
    view.begin();
    for await (const chunk of answer(request, key(), signal)) {
      const [choice] = chunk.choices;
      const said = choice?.delta?.content ?? "";
      text += said;
      if (chunk.speculation) figures.add(chunk.speculation, performance.now());
      view.append(chunk.speculation, said);
      if (choice?.finish_reason === "length") note = "cut at the longest length";
      if (chunk.usage) figures.close(chunk.usage, chunk.metrics);
      view.show(figures);
      followEnd();
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      view.fail(error.message, again);
      if (error.status === 401) askForKey();
      return null;
    }
    note = "stopped";
  }
  view.end(note);
  return text || figures.tokens ? { text, figures } : null;
}

function showRunning(isRunning) {
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  $("new").disabled = isRunning;
}

function followEnd() {
  if (isFollowing) $("scroll").scrollTop = $("scroll").scrollHeight;
}

function submit() {
  const text = $("message").value.trim();
  if (!text || running) return;
  $("message").value = "";
  fitMessage();
  send(text);
}

function fitMessage() {
  const message = $("message");
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight}px`;
}

function showSettings(isShown) {
  $("settings").hidden = !isShown;
  $("settings-toggle").setAttribute("aria-expanded", String(isShown));
}

function askForKey() {
  showSettings(true);
  $("key").focus();
}

async function connect() {
  try {
    showModels(await models(key()));
    $("server").textContent = "";
  } catch (error) {
    $("server").textContent = error.message;
    if (error.status === 401) askForKey();
  }
}

$("scroll").addEventListener("scroll", () => {
  const { scrollHeight, scrollTop, clientHeight } = $("scroll");
  isFollowing = scrollHeight - scrollTop - clientHeight < NEAR_END;
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
$("message").addEventListener("input", fitMessage);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("message").focus();
});
$("new").addEventListener("click", () => {
  history = [];
  $("conversation").replaceChildren();
  $("welcome").hidden = false;
  $("message").focus();
});
$("settings-toggle").addEventListener("click", () => showSettings($("settings").hidden));
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => !running && send(example.textContent));
}
whenOrderChanges((note) => ($("order-note").textContent = note));
whenKeyChanges(() => {
  rememberKey();
  connect();
});
showSettings(window.matchMedia("(min-width: 70rem)").matches);
connect();
