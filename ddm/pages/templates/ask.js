"use strict";
// What the pages share on which a person decides: asking the program, saying what it said, and ending it.

const find = (id) => document.getElementById(id);
let timer = 0; // of the next look at the program's state

async function ask(path, content) {
  const options = content === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content),
  };
  const answer = await fetch(path, { cache: "no-store", ...options }).catch(() => null);
  if (answer === null) {
    say("The program does not answer. If it ended, start it again: what was decided is kept.");
    return null;
  }
  if (!answer.ok) {
    say((await answer.text()).trim());
    return null;
  }
  return answer.json();
}

function say(text) {
  find("message").textContent = text;
}

find("done").addEventListener("click", async () => {
  clearTimeout(timer);
  if (await ask("done", {}) !== null) {
    document.querySelector("main").replaceChildren();
    find("done").remove();
    document.querySelector("h1").textContent = "Done. Close this page.";
  }
});
