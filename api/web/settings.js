"use strict";
// The settings, and how the server is.

// name, label, lowest, highest, step
const SAMPLING = [["temperature", "Temperature", 0, 2, "any"], ["top_p", "Top p", 0, 1, "any"],
  ["top_k", "Top k", 0, 2 ** 31 - 1, 1], ["min_p", "Min p", 0, 1, "any"],
  ["max_tokens", "Longest answer", 1, 2 ** 31 - 1, 1], ["seed", "Seed", 0, Number.MAX_SAFE_INTEGER, 1]];
const FIELDS = ["system", "thinking", "tools", ...SAMPLING.map(([name]) => name)];
const UNLIMITED = {max_tokens: "no limit", seed: "by chance", top_k: "off", min_p: "off", top_p: "off"};

function makeSettings() {
  $("sampling").prepend(...SAMPLING.map(([name, label, min, max, step]) => el("label", null, label,
    el("input", {id: name, type: "number", inputmode: "decimal", placeholder: "default", min, max, step}))));
  for (const name of FIELDS) {
    const field = $(name);
    field.addEventListener("input", () => {
      if (name === "tools") field.setCustomValidity(isToolList(field.value) ? "" : "This is no JSON list.");
      field.setAttribute("aria-invalid", !field.validity.valid);
      $("mistake").textContent = FIELDS.map($).find(each => !each.validity.valid)?.validationMessage ?? "";
      const value = field.type === "number" ? field.valueAsNumber : field.value.trim();
      set(name, !field.validity.valid || value === "" || Number.isNaN(value) ? undefined : value);
    });
  }
  $("key").addEventListener("input", () => {
    setKey($("key").value.trim());
    $("key-reason").textContent = "";
  });
  fillSettings();
}

function fillSettings() {
  for (const name of FIELDS) if ($(name) !== document.activeElement) $(name).value = settings[name] ?? "";
  $("key").value = apiKey;
  $("key-field").hidden = !apiKey;
}

/** Shows in empty fields what the server chooses there. */
async function showDefaults() {
  const model = modelOf(chat);
  showThinking(model);
  const chosen = (await askOf(model, "props"))?.default_generation_settings?.params ?? {};
  for (const [name] of SAMPLING) {
    const isOff = chosen[name] === (name === "top_p" ? 1 : name === "max_tokens" || name === "seed" ? -1 : 0);
    $(name).placeholder = isOff && UNLIMITED[name] || (chosen[name] ?? "default");
  }
}

/** Whether a model thinks of its own accord: then its prompt ends with the tag that begins thoughts. */
async function showThinking(model) {
  const asked = {model: model?.model, messages: [{role: "user", content: "?"}]};
  const prompt = model?.state === "unloaded" ? null : (await ask("apply-template", null, asked))?.prompt;
  const does = prompt && (/<think>\s*$/.test(prompt) ? "on" : "off");
  $("thinking").options[0].text = does ? `default (${does})` : "default";
}

function isToolList(text) {
  try { return !text.trim() || Array.isArray(JSON.parse(text)); } catch { return false; }
}

function openSettings() {
  if (!$("settings").open) $("settings").showModal();
  showDefaults();
}

const refused = new Map();  // conversation -> {message, key}: the answer that waits for another key than this one

function askForKey(reason, {chat, message, key}) {
  refused.set(chat, {message, key});
  $("key-field").hidden = false;
  $("key-reason").textContent = reason;
  openSettings();
  $("key").focus();
}

$("show-settings").addEventListener("click", openSettings);
$("settings").addEventListener("close", () => {
  for (const [one, {message, key}] of refused) {
    if (!apiKey || apiKey === key) continue;
    refused.delete(one);
    if (chats.get(one.id) === one && one.head === message.id) regenerate(one);
  }
});

// ---- the server's health and its models --------------------------------------------------------------------

let health = null;                      // as /health tells
let isWatching = false, wantsLook = false;
let models = [];                        // those that answer in conversations, each as /health tells of it

/** The model that answers in a conversation: its own, else the one that was chosen last, else the first. */
const modelOf = ({model}) => models.find(one => one.model === model)
  ?? models.find(one => one.model === settings.model) ?? models[0];

/** Says how the server is, until it is well. Called while a look is under way, it looks once more: what the server
 *  says then may be older than the reason for the call. */
async function watchHealth() {
  wantsLook = true;
  if (isWatching) return;
  for (isWatching = true; wantsLook; wantsLook && await sleep(2)) {
    wantsLook = false;
    health = await healthOf().catch(() => ({status: "lost"}));
    isWatching = wantsLook ||= health.status !== "ok";
    if (health.model) models = [health, ...health.side ?? []].filter(one => one.kind === "text");
    showModel();
  }
}

/** Shows which model answers in this conversation, and what goes wrong. Where there are several, one chooses. */
function showModel() {
  if (!health) return;
  const shown = modelOf(chat) ?? health, states = {unloaded: ", loaded when you ask", failed: ", has failed"};
  const troubles = {lost: "is not reachable", loading: "loading the model …", draining: "is shutting down"};
  const trouble = troubles[health.status];
  const line = trouble ?? shown.error ?? shown.model + (states[shown.state] ?? "");
  $("health").textContent = $("health").title = line;
  $("health").classList.toggle("wrong", health.status === "lost" || !trouble && Boolean(shown.error));
  $("model").hidden = models.length < 2 || Boolean(trouble);
  $("health").hidden = !$("model").hidden && !shown.error;
  $("model").replaceChildren(...models.map(({model, state}) =>
    el("option", {value: model, selected: model === shown.model}, model + (states[state] ?? ""))));
  $("show-pipes").hidden = !shown.counts_pipes;
  sees = shown.sees;
  expectPipes();
  if (health.status === "ok") showSuggestions(shown.model);
}

$("model").addEventListener("change", ({target}) => {
  chat.model = target.value;
  set("model", target.value);
  if (chats.has(chat.id)) { unsaved.add(chat.id); save(chat); }
  showModel();
  watchHealth();                        // the model may have been loaded or put away
});
