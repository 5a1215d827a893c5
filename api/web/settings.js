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
  const chosen = (await ask("props"))?.default_generation_settings?.params ?? {};
  for (const [name] of SAMPLING) {
    if (!(name in chosen)) continue;
    const isOff = chosen[name] === (name === "top_p" ? 1 : name === "max_tokens" || name === "seed" ? -1 : 0);
    $(name).placeholder = isOff && UNLIMITED[name] || chosen[name];
  }
}

function isToolList(text) {
  try { return !text.trim() || Array.isArray(JSON.parse(text)); } catch { return false; }
}

function openSettings() {
  $("settings").showModal();
  showDefaults();
}

let refused = null;         // {message, key}: the answer that waits for another key than this one

function askForKey(reason) {
  refused = {message: running.message, key: apiKey};
  $("key-field").hidden = false;
  $("key-reason").textContent = reason;
  openSettings();
  $("key").focus();
}

$("show-settings").addEventListener("click", openSettings);
$("settings").addEventListener("close", () => {
  const isNew = refused && apiKey && apiKey !== refused.key, isShown = chat.head === refused?.message.id;
  refused = null;
  if (isNew && isShown) regenerate();
});

// ---- the server's health -----------------------------------------------------------------------------------

let watching = false, countsExperts = false, isPutAway = false;      // isPutAway: the model is loaded when asked

/** Says how the server is, until it is well. */
async function watchHealth() {
  if (watching) return;
  for (watching = true; watching; watching && await sleep(2)) showHealth(await healthOf().catch(() => null));
}

/** health: null where the server cannot be reached. */
function showHealth(health) {
  let status = "is not reachable";
  if (health) {
    watching = health.status !== "ok";
    isPutAway = health.state === "unloaded";
    status = {ok: health.model + (isPutAway ? ", loaded when you ask" : ""), loading: "loading the model …",
              draining: "is shutting down", error: health.error}[health.status];
    $("show-pipes").hidden = !health.counts_pipes;
    expectPipes();
    countsExperts = health.counts_experts;
    sees = health.sees;
    if (!watching) showSuggestions(health.model);
  }
  $("health").textContent = status;
  $("health").title = status;
  $("health").classList.toggle("wrong", !health || health.status === "error");
}
