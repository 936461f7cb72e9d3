"use strict";
// Shows samples as they are drawn, and sends a person's decision back. All text is set as text, never as markup.

const digest = document.body.dataset.digest;
const WORDS = {
  approve: ["Approve exactly these bytes?", "The worker signs them and sends them. What was sent cannot be called back.", "Approve", "ok"],
};
let asked = "";

async function refresh() {
  clearTimeout(timer);
  const found = await ask("state");
  if (found === null) {
    return;
  }
  drawState(found);
  found.sheets.forEach(drawSheet);
  timer = setTimeout(refresh, found.done ? 3000 : 500);
}

function drawState({ state, waits, approved }) {
  find("approve").disabled = !waits;
  const pill = find("state");
  pill.textContent = approved ? "approved" : state.replaceAll("_", " ");
  pill.className = `pill ${approved || state === "in_outbox" || state === "accepted" ? "ok" : waits ? "warn" : "idle"}`;
  if (!waits && !approved && state === "awaiting_approval") {
    say("Another draft waits by now: run silo review again.");
  } else if (approved) {
    say("Approved. The worker signs and sends it.");
  }
}

function drawSheet(sheet) {
  let card = [...find("sheets").children].find((each) => each.dataset.expert === sheet.expert_id);
  if (card === undefined) {
    card = document.createElement("section");
    card.className = "card sheet";
    card.dataset.expert = sheet.expert_id;
    for (const [tag, name] of [["h3", "name"], ["p", "soft small words"], ["div", "pictures"]]) {
      const part = document.createElement(tag);
      part.className = name;
      card.append(part);
    }
    find("sheets").append(card);
  }
  card.querySelector(".name").textContent = `Expert ${sheet.expert_id}`;
  const num = sheet.pictures.length;
  const drawing = num < sheet.num && !sheet.problem ? `drawing, ${num} of ${sheet.num}` : "";
  card.querySelector(".words").textContent = [sheet.words, drawing, sheet.problem].filter(Boolean).join("; ");
  const pictures = card.querySelector(".pictures");
  const wanted = sheet.problem ? num : sheet.num;
  while (pictures.children.length > wanted) {
    pictures.lastElementChild.remove();
  }
  for (let i = 0; i < wanted; i += 1) {
    const place = pictures.children[i];
    if (i < num && place?.tagName !== "IMG") {
      const image = document.createElement("img");
      image.src = sheet.pictures[i];
      image.alt = `sample ${i + 1} of expert ${sheet.expert_id}`;
      place ? place.replaceWith(image) : pictures.append(image);
    } else if (place === undefined) {
      pictures.append(document.createElement("span"));
    }
  }
}

function question(what) {
  asked = what;
  const [title, consequence, yes, kind] = WORDS[what];
  find("question").textContent = title;
  find("consequence").textContent = consequence;
  find("yes").textContent = yes;
  find("yes").className = kind;
  find("confirm").showModal();
}

find("approve").addEventListener("click", () => question("approve"));
find("no").addEventListener("click", () => find("confirm").close());
find("yes").addEventListener("click", async () => {
  find("confirm").close();
  say("");
  if (await ask(asked, { submission_digest: digest }) !== null) {
    await refresh();
  }
});
refresh();
