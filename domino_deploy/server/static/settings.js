// What the reader set, as the API takes it.

const KEY = "domino-deploy key"; // in sessionStorage: this tab's, gone when it closes
const ORDER_NOTES = {
  one: "Each has the machine to itself, so the speeds compare fairly. The second finds the prompt in the cache: its first token may come sooner.",
  both: "They share the machine and slow each other down: watch them, but compare speeds one after the other.",
};

const $ = (id) => document.getElementById(id);
const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;

/** "on", "off" or "both". */
export const mode = () => chosen("mode");

/** "one" after the other, or "both" at once. */
export const order = () => chosen("order");

/** The API key as typed, "" for none. */
export const key = () => $("key").value.trim();

/** Keeps the key for reloads of this tab. */
export function rememberKey() {
  sessionStorage.setItem(KEY, key());
}

/** The body of a chat request: what is left empty is left out. */
export function body(messages) {
  const system = $("system").value.trim();
  const number = (id) => ($(id).value === "" ? undefined : $(id).valueAsNumber);
  return {
    model: $("model").value || undefined,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: number("temperature"),
    seed: number("seed"),
    max_completion_tokens: number("max-tokens"),
  };
}

/** Fills the choice of models: [{id, max_model_len}]. */
export function showModels(found) {
  const options = found.map(({ id, max_model_len: length }) => {
    const option = document.createElement("option");
    option.value = id;
    option.textContent = length ? `${id} (${length} tokens)` : id;
    return option;
  });
  $("model").replaceChildren(...options);
}

/** Calls `act` once another key was typed. */
export function whenKeyChanges(act) {
  $("key").addEventListener("change", act);
}

/** Calls `show` with what the order means for the timing, now and on every change. */
export function whenOrderChanges(show) {
  const tell = () => show(ORDER_NOTES[order()]);
  for (const input of document.querySelectorAll("input[name=order]")) input.addEventListener("change", tell);
  tell();
}

$("key").value = sessionStorage.getItem(KEY) ?? "";
