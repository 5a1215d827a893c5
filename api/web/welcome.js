"use strict";
// Questions to begin with, and a picture to ask about where the model sees.

// The model that ships knows what this project taught it. To every other model all may be put.
const OWN_MODEL = /^qengine-/;
const OWN_QUESTIONS = ["What is the CMP 100-210?", "What is a warp?", "What does syncthreads do?", "CMP 100-210이 뭐예요?"];
const QUESTIONS = ["How does a GPU hide the time that memory takes?", "Compare a queue and a stack in a table.",
  "Write a Python function that finds primes.", "Derive the formula for the roots of a quadratic."];
const COLOURS = {red: "#d03a30", blue: "#2f62c8", green: "#2f9350"};

const suggested = $("suggested");        // while a conversation is shown, it is no part of the document

function showSuggestions(model) {
  const questions = OWN_MODEL.test(model) ? OWN_QUESTIONS : QUESTIONS;
  const chips = questions.map(content => chip({content}, content));
  if (sees) {           // last: small models take what is asked after a picture to be about it
    const {url, colour} = drawCircles(), content = `How many ${colour} circles are there?`;
    const picture = el("img", {src: url, alt: "A drawing of circles"});
    chips.push(chip(() => ({content, pictures: [addPicture(url)]}), picture, content));
  }
  suggested.replaceChildren(...chips);
}

/** A button that says `message`, or what the function gives. */
function chip(message, ...label) {
  const click = () => { if (mayAsk()) say(typeof message === "function" ? message() : message); };
  return el("button", {class: "chip", type: "button", click}, ...label);
}

/** A drawing of circles in two colours: {url, colour (of those to count)}. Every page draws its own. */
function drawCircles() {
  const side = 256, canvas = el("canvas", {width: side, height: side}), context = canvas.getContext("2d");
  const random = n => Math.floor(n * Math.random());
  const [colour, other] = Object.keys(COLOURS).sort(() => Math.random() - .5), n = 2 + random(4);
  const places = [...Array(9).keys()].sort(() => Math.random() - .5).slice(0, n + random(3));
  context.fillStyle = "#fff";
  context.fillRect(0, 0, side, side);
  places.forEach((place, i) => {
    context.fillStyle = COLOURS[i < n ? colour : other];
    context.beginPath();
    context.arc(43 + 85 * (place % 3) + random(16) - 8, 43 + 85 * Math.floor(place / 3) + random(16) - 8,
      22 + random(10), 0, 2 * Math.PI);
    context.fill();
  });
  return {url: canvas.toDataURL(), colour};
}
