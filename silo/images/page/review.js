"use strict";
// Draws what the server says is to be seen, and sends decisions back. All text is set as text, never as markup.

const shown = { show: "waiting", flag: "", start: 0 };
let state = null;
let current = 0; // which picture of those shown has the keys
let large = null; // the number of the picture that is enlarged
let whole = false;

async function refresh() {
  clearTimeout(timer);
  const found = await ask("state?" + new URLSearchParams(shown));
  if (found === null) {
    return;
  }
  state = found;
  shown.start = found.start;
  drawHead();
  drawTiles();
  drawLarge();
  if (found.pictures.some((each) => !each.drawn && !each.problem)) {
    timer = setTimeout(refresh, 300);
  }
}

function drawHead() {
  const { counts } = state;
  const total = counts.waiting + counts.clear + counts["leave out"];
  find("decided").textContent = `${counts.clear} cleared, ${counts["leave out"]} left out`;
  find("left").textContent = counts.waiting ? `${counts.waiting} of ${total} left` : `none of ${total} left`;
  find("progress").max = Math.max(1, total);
  find("progress").value = total - counts.waiting;
  const last = Math.min(state.listed, state.start + state.pictures.length);
  find("where").textContent = state.listed ? `${state.start + 1}–${last} of ${state.listed}` : "";
  find("before").disabled = state.start === 0;
  find("after").disabled = last >= state.listed;
  find("undo").disabled = !state.undo;
  find("clear-all").disabled = find("leave-all").disabled = state.pictures.length === 0;
  find("clear-all").hidden = ["clear", "accepted"].includes(shown.show);
  find("show-accepted").textContent = `accepted, of the last preview sheet (${state.accepted})`;
  find("leave-all").hidden = shown.show === "leave out";
  const options = [["", "any reason"], ...Object.entries(state.flags).map(([flag, num]) => [flag, `${flag} (${num})`])];
  if (shown.flag && !(shown.flag in state.flags)) {
    options.push([shown.flag, `${shown.flag} (0)`]);
  }
  find("flag").replaceChildren(...options.map(([value, text]) => new Option(text, value, false, value === shown.flag)));
}

function drawTiles() {
  const held = document.activeElement?.closest(".tile") !== null && document.activeElement !== null;
  const before = new Map([...find("pictures").children].map((tile) => [tile.dataset.number, tile]));
  const tiles = state.pictures.map((each) => filled(before.get(String(each.number)) ?? made(), each));
  find("pictures").replaceChildren(...tiles);
  current = Math.max(0, Math.min(current, tiles.length - 1));
  if (held && tiles.length && large === null) {
    tiles[current].focus({ preventScroll: false });
  }
  if (!tiles.length) {
    say(shown.show === "waiting" && !shown.flag ? "No pictures are waiting. Scan again to update the counts." : "None.");
  } else if (find("message").textContent === "None." || find("message").textContent.startsWith("Nothing waits")) {
    say("");
  }
}

function made() {
  return find("tile").content.firstElementChild.cloneNode(true);
}

function filled(tile, each) {
  const part = (name) => tile.querySelector(name);
  tile.dataset.number = each.number;
  tile.title = `${each.folder}/${each.name}`;
  part(".name").textContent = each.name;
  part(".folder").textContent = each.folder;
  part(".about").textContent = each.about;
  part(".flags").replaceChildren(...each.flags.map((flag) => {
    const pill = document.createElement("span");
    pill.className = "pill warn";
    pill.textContent = flag;
    return pill;
  }));
  const image = part(".view img");
  image.hidden = !each.drawn;
  image.alt = `${each.name}, as its file holds it`;
  if (each.drawn && !image.hasAttribute("src")) {
    image.src = `picture/${each.number}`;
  }
  part(".view span").textContent = each.drawn ? "" : each.problem ? `Not drawn: ${each.problem}` : "Drawing";
  for (const button of tile.querySelectorAll("button[data-decision]")) {
    const undecided = ["waiting", "accepted"].includes(shown.show);
    button.hidden = button.dataset.decision === (undecided ? "" : shown.show);
    if (button.dataset.decision === "") {
      button.textContent = each.flags.length ? "Wait again" : "Accept again";
    }
    if (button.dataset.decision === "clear" && !each.flags.length) {
      button.hidden = true; // there is nothing to clear
    }
    button.disabled = button.dataset.decision === "clear" && !each.drawn && !("together" in button.dataset);
  }
  part(".together").hidden = each.together < 2;
  part(".together span").textContent = `All ${each.together} of this ${each.of}:`;
  return tile;
}

function drawLarge() {
  const each = state.pictures.find(({ number }) => number === large);
  if (each === undefined) {
    if (large !== null && state.pictures.length) { // it was decided: go on with the next one
      enlarge(state.pictures[current].number);
    } else if (large !== null) {
      find("large").close();
    }
    return;
  }
  find("large-name").textContent = `${each.name}, ${each.about}`;
  find("large-range").hidden = !each.whole;
  find("large-range").textContent = whole ? "Show its window" : "Show all values";
  find("large-clear").disabled = !each.drawn || !each.flags.length;
  const address = `picture/${each.number}${whole ? "?whole" : ""}`;
  if (each.drawn && find("large-image").getAttribute("src") !== address) {
    find("large-image").src = address;
  }
  find("large-image").alt = `${each.name}, as its file holds it`;
}

function enlarge(number) {
  large = number;
  whole = false;
  find("large-image").removeAttribute("src");
  if (!find("large").open) {
    find("large").showModal();
  }
  drawLarge();
}

async function decide(numbers, decision, together) {
  if (numbers.length === 0) {
    return;
  }
  say("");
  const body = { numbers, decision: decision || null, together: Boolean(together) };
  if (await ask("decide", body) !== null) {
    await refresh();
  }
}

function focusTile(index) {
  const tiles = find("pictures").children;
  if (tiles.length) {
    current = Math.max(0, Math.min(index, tiles.length - 1));
    tiles[current].focus();
    tiles[current].scrollIntoView({ block: "nearest" });
  }
}

function columns() {
  return getComputedStyle(find("pictures")).gridTemplateColumns.split(" ").length;
}

function turn(by) {
  if ((by < 0 && !find("before").disabled) || (by > 0 && !find("after").disabled)) {
    shown.start += by * state.shown;
    current = 0;
    refresh();
  }
}

function decideCurrent(decision) {
  const each = state.pictures[current];
  const isClear = decision === "clear";
  if (each === undefined || decision === shown.show || (isClear && (!each.drawn || !each.flags.length))) {
    return;
  }
  decide([each.number], decision);
}

function move(by) {
  if (large === null) {
    focusTile(current + by);
  } else if (state.pictures[current + by] !== undefined) {
    current += by;
    enlarge(state.pictures[current].number);
  }
}

const KEYS = {
  c: () => decideCurrent("clear"),
  l: () => decideCurrent("leave out"),
  u: () => find("undo").click(),
  n: () => turn(1),
  p: () => turn(-1),
  r: () => large !== null && find("large-range").click(),
  ArrowRight: () => move(1),
  ArrowLeft: () => move(-1),
  ArrowDown: () => large === null && move(columns()),
  ArrowUp: () => large === null && move(-columns()),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select") || state === null) {
    return;
  }
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (key === "Enter" && event.target.classList.contains("tile")) {
    enlarge(Number(event.target.dataset.number));
  } else if (KEYS[key] === undefined || (large !== null && ["ArrowUp", "ArrowDown"].includes(key))) {
    return;
  } else {
    KEYS[key]();
  }
  event.preventDefault();
});

find("pictures").addEventListener("focusin", (event) => {
  current = [...find("pictures").children].indexOf(event.target.closest(".tile"));
});
find("pictures").addEventListener("click", (event) => {
  const tile = event.target.closest(".tile");
  const button = event.target.closest("button");
  if (button === null) {
    return;
  }
  const number = Number(tile.dataset.number);
  if (button.classList.contains("view")) {
    current = [...find("pictures").children].indexOf(tile);
    enlarge(number);
  } else {
    decide([number], button.dataset.decision, "together" in button.dataset);
  }
});
const numbersShown = (drawn) => state.pictures.filter((each) => each.drawn || !drawn).map((each) => each.number);
find("clear-all").addEventListener("click", () => decide(numbersShown(true), "clear"));
find("leave-all").addEventListener("click", () => decide(numbersShown(false), "leave out"));
find("undo").addEventListener("click", async () => {
  if (await ask("undo", {}) !== null) {
    await refresh();
  }
});
find("before").addEventListener("click", () => turn(-1));
find("after").addEventListener("click", () => turn(1));
find("show").addEventListener("change", (event) => {
  Object.assign(shown, { show: event.target.value, flag: "", start: 0 });
  refresh();
});
find("flag").addEventListener("change", (event) => {
  Object.assign(shown, { flag: event.target.value, start: 0 });
  refresh();
});
find("large-clear").addEventListener("click", () => decideCurrent("clear"));
find("large-leave").addEventListener("click", () => decideCurrent("leave out"));
find("large-range").addEventListener("click", () => {
  whole = !whole;
  drawLarge();
});
find("large-close").addEventListener("click", () => find("large").close());
find("large").addEventListener("close", () => {
  large = null;
  focusTile(current);
});
refresh().then(() => focusTile(0));
