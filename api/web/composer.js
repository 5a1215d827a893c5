"use strict";
// The field for the next message, and the pictures that go with it.

const EMPTY = {text: "", urls: []};
let edited = null, draft = EMPTY;   // the message that is being changed, and what the composer had before
let chosen = [], reading = 0;       // data: URLs of the next message's pictures; files that are being read
let sees = null;                    // {pixels of a picture, pictures of a request}; null: the model has no eyes
const AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_BYTES = 5e5;             // of a picture, if it can be: the browser keeps two million letters of them
const QUALITIES = [.93, .85, .75];  // of JPEG, the best that fits

/** Begins to change a message; null: ends it, and the composer has again what it had before. */
function edit(message) {
  if (!edited) draft = message ? {text: $("text").value, urls: chosen} : EMPTY;
  edited = message;
  const isAnswer = message?.role === "assistant";
  $("editing").hidden = !message;
  $("edited-kind").textContent = isAnswer ? "an answer" : "a message";
  $("send").textContent = isAnswer ? "Save" : "Send";
  $("text").value = message ? message.content : draft.text;
  choose(message ? urlsOf(message) : draft.urls);
  turns.forEach(turn => turn.update());
  $("text").focus();
}

/** Whether nothing is lost if the message that is being changed is left, or the reader agrees to that. */
const mayLeave = () => !edited || !isChanged() || confirm("Give up your changes?");
const isChanged = () => reading || $("text").value !== edited.content || chosen.join() !== urlsOf(edited).join();

/** Sends what the composer has. A changed message becomes a version beside the one before the change. */
function send() {
  const content = $("text").value.trim(), urls = chosen, former = edited;
  if (!content && !urls.length || reading || !mayAsk()) return;
  edit(null);
  say({content, ...urls.length && {pictures: urls.map(addPicture)}}, former);
}

/** Adds a message to the conversation, in place of `former` if there is one, and asks for an answer to it. */
function say(message, former = null) {
  const isAnswer = former?.role === "assistant", after = former ? former.after : chat.head;
  const more = isAnswer ? {thoughts: "", calls: [], figures: "written by you"} : {};
  addMessage(chat, {role: isAnswer ? "assistant" : "user", ...more, ...message}, after);
  history.replaceState(null, "", `#${chat.id}`);
  if (!isAnswer) return generate();
  save(chat);
  showAll();
  showChats();
}

$("composer").addEventListener("submit", event => { event.preventDefault(); send(); });
$("text").addEventListener("keydown", event => {
  // While Hangul or Kanji are composed, Enter ends a syllable; under a thumb it starts a line.
  const isOrdinary = event.isComposing || event.shiftKey || matchMedia("(pointer: coarse)").matches;
  if (event.key === "Enter" && !isOrdinary) { event.preventDefault(); send(); }
});
$("cancel").addEventListener("click", () => { if (mayLeave()) edit(null); });
$("stop").addEventListener("click", () => running.get(chat)?.abort.abort());
addEventListener("keydown", event => {
  if (event.key !== "Escape" || $("settings").open) return;
  if (foldChats()) $("show-chats").focus();
  else if (running.has(chat)) running.get(chat).abort.abort();
  else if (edited && mayLeave()) edit(null);
});
addEventListener("pagehide", () => {
  for (const own of running.values()) { own.abort.abort(); keep(own); }
});

// ---- pictures ----------------------------------------------------------------------------------------------

function choose(urls) {
  chosen = urls;
  $("chosen").hidden = !chosen.length;
  $("chosen").replaceChildren(...chosen.map((url, i) => el("figure", null, pictureNode(url, i), el("button",
    {type: "button", "aria-label": `Remove picture ${i + 1}`, click: () => choose(chosen.toSpliced(i, 1))}, "×"))));
  note("");
  scrollDown();
}

function note(sentence) {
  $("notice").textContent = sentence;
  $("notice").hidden = !sentence;
}

/** Takes files that were chosen, pasted or dropped. */
async function addFiles(files) {
  if (!files.length) return;
  if (!sees) return note("This model has no eyes: it reads text alone.");
  const mistakes = [], former = edited;
  reading++;
  for (const file of files) {
    try {
      const url = await readPicture(file);
      if (!addChosen(url, former)) mistakes.push(`A request may have ${count(sees.pictures, "picture")}.`);
    } catch { mistakes.push(`${file.name || "That"} is no picture that this browser can read.`); }
  }
  reading--;
  note(mistakes[0] ?? "");
  $("text").focus();
}

/** Adds a picture to those that were there when it was chosen, while `former` was changed; false: they are too many.
 *  By now another message may be changed. Then the draft gets its picture, and a change that was given up gets none. */
function addChosen(url, former) {
  if (former && edited !== former) return true;
  const urls = edited === former ? chosen : draft.urls;
  if (urls.length >= sees.pictures) return false;
  if (edited === former) choose([...urls, url]);
  else draft = {...draft, urls: [...urls, url]};
  return true;
}

/** A file as a data: URL. What has more pixels than the model sees is made smaller here, so that less is sent; what has
 *  many bytes becomes a JPEG, so that a reload brings it back. */
async function readPicture(file) {
  const image = await createImageBitmap(file), scale = Math.min(1, Math.sqrt(sees.pixels / image.width / image.height));
  if (scale === 1 && file.size <= MOST_BYTES && AS_THEY_ARE.includes(file.type)) return dataUrl(file);
  const canvas = el("canvas", {width: Math.max(1, Math.round(image.width * scale)),
                               height: Math.max(1, Math.round(image.height * scale))});
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff";               // JPEG knows no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  const urls = QUALITIES.map(quality => canvas.toDataURL("image/jpeg", quality));
  return urls.find(url => url.length <= MOST_BYTES * 4 / 3) ?? urls.at(-1);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = reject;
    reader.readAsDataURL(file);
  });
}

for (const [name, input] of [["add", "files"], ["camera", "shot"]]) {
  $(name).addEventListener("click", () => sees ? $(input).click() : addFiles([null]));
  $(input).addEventListener("change", async () => { await addFiles([...$(input).files]); $(input).value = ""; });
}
addEventListener("paste", event => {
  const {files, types} = event.clipboardData;
  if (!files.length || types.includes("text/plain")) return;        // cells of a table come as a picture, too
  event.preventDefault();
  addFiles([...files]);
});
const isOfFiles = event => event.dataTransfer?.types.includes("Files");
addEventListener("dragover", event => {
  if (!isOfFiles(event)) return;
  event.preventDefault();                   // or the browser would open the file in place of the page
  document.body.classList.add("dropping");
});
addEventListener("dragleave", event => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
addEventListener("drop", event => {
  if (!isOfFiles(event)) return;
  event.preventDefault();
  document.body.classList.remove("dropping");
  addFiles([...event.dataTransfer.files]);
});
