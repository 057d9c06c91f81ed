
// The grid of hosts and ranks, and the rank that is chosen.
const KINDS = {  // in the order in which they are listed; the sign says the same as the colour
  failed: ["✕", "has failed, or does not answer"], stopped: ["‖", "is stopped"],
  debugged: ["D", "is debugged"], late: ["!", "others wait for it"],
  waiting: ["…", "waits for other ranks"], compiling: ["c", "compiles"], working: ["▸", "works"],
  idle: ["·", "is idle, or waits for something else"], starting: ["↑", "starts"], ended: ["–", "was ended"],
  finished: ["✓", "has finished"],
};
const DENSE_ABOVE = 256;  // ranks, from which on cells are small and have no number
let ranks = [], hosts = new Map(), cells = new Map(), chosenRank = null, chosenAttempt = null;  // null: the last

function kindOf(one) {
  return ["late", "slow"].includes(one.standing_out) && one.doing !== "debugged" ? "late" : one.doing;
}

function sign(kind) {
  const mark = make("i", KINDS[kind][0], `sign ${kind}`);
  mark.setAttribute("aria-hidden", "true");
  return mark;
}

function layOutRanks() {
  const grid = ids("hosts");
  cells = new Map();
  grid.classList.toggle("dense", ranks.length > DENSE_ABOVE);
  grid.replaceChildren(...[...hosts].map(([host, members]) => {
    const row = make("div", undefined, "host"), group = make("div", undefined, "cells"), label = make("span", host || "this host");
    row.setAttribute("role", "row");
    label.setAttribute("role", "rowheader");
    label.title = host;
    label.append(make("small"));
    for (const rank of members) {
      const cell = make("div", undefined, "cell");
      cell.append(make("span", `${rank}`));
      cell.id = `cell-${rank}`;
      cell.setAttribute("role", "gridcell");
      cells.set(rank, cell);
      group.append(cell);
    }
    row.append(label, group);
    return row;
  }));
}

function showRanks(job) {
  const before = JSON.stringify([...hosts]);
  ranks = job.ranks;
  hosts = new Map();
  for (const one of ranks) {
    if (!hosts.has(one.host)) hosts.set(one.host, []);
    hosts.get(one.host).push(one.rank);
  }
  const isNew = JSON.stringify([...hosts]) !== before, grid = ids("hosts");
  if (isNew) layOutRanks();
  const held = new Map();
  for (const one of ranks) held.set(one.host, (held.get(one.host) || 0) + (one.memory_bytes || 0));
  const labels = document.querySelectorAll("#hosts .host small");
  [...hosts.keys()].forEach((host, at) => { labels[at].textContent = held.get(host) ? bytes(held.get(host)) : ""; });
  if (!cells.has(chosenRank)) chosenRank = ranks.length ? (ranks.find(one => one.doing === "failed") || ranks[0]).rank : null;
  paintRanks();
  if (isNew && chosenRank !== null) grid.scrollTop = cells.get(chosenRank).offsetTop - grid.offsetTop - grid.clientHeight / 2;
}

function paintRanks() {
  const chosen = ranks.find(one => one.rank === chosenRank), awaited = new Set(chosen ? chosen.waits_for : []), counts = {};
  for (const one of ranks) {
    const kind = kindOf(one), cell = cells.get(one.rank), name = `cell ${kind}${awaited.has(one.rank) ? " is-awaited" : ""}`;
    counts[kind] = (counts[kind] || 0) + 1;
    const title = `rank ${one.rank}${one.host ? ` on ${one.host}` : ""}: ${one.state}`;
    if (cell.className !== name) { cell.className = name; cell.dataset.sign = KINDS[kind][0]; }
    if (cell.title !== title) { cell.title = title; cell.setAttribute("aria-label", title); }
    cell.setAttribute("aria-selected", one.rank === chosenRank);
  }
  if (chosen) ids("hosts").setAttribute("aria-activedescendant", `cell-${chosenRank}`);
  ids("legend").replaceChildren(...Object.keys(KINDS).filter(kind => counts[kind]).map(kind => {
    const item = make("li");
    item.append(sign(kind), `${KINDS[kind][1]}: ${counts[kind].toLocaleString("en")}`);
    return item;
  }));
}

function showRank() {
  const one = ranks.find(rank => rank.rank === chosenRank);
  ids("rank").hidden = !one;
  if (!one) return;
  const isOver = !shown.is_live, awaiting = ranks.filter(other => other.waits_for.includes(one.rank)).map(other => other.rank);
  const facts = [[isOver ? "ended" : "state", one.state, true]];
  if (one.waits_for.length > 1) facts.push(["waits for", rankNames(one.waits_for), true]);
  if (awaiting.length) facts.push(["awaited by", rankNames(awaiting), true]);
  if (one.since_s !== null) facts.push(["for", seconds(one.since_s)]);
  if (one.number !== null) facts.push(["last call", `#${one.number}${one.behind ? `, ${one.behind} behind` : ""}`]);
  if (one.late_s !== null) facts.push(["late by", seconds(one.late_s)]);
  if (one.cpu_percent !== null) facts.push(["CPU", `${Math.round(one.cpu_percent)} % of a core`]);
  if (one.memory_bytes) facts.push([isOver ? "memory at most" : "memory", bytes(one.memory_bytes)]);
  if (one.gpu_percent !== null) facts.push(["GPU", `${Math.round(one.gpu_percent)} %`]);
  if (one.gpu_bytes !== null) facts.push([isOver ? "GPU memory at last" : "GPU memory", bytes(one.gpu_bytes)]);
  ids("rank-title").textContent = `Rank ${one.rank}${one.host ? ` on ${one.host}` : ""}`;
  ids("facts").replaceChildren(...facts.map(([name, text, isWide]) => {
    const part = make("div", undefined, isWide ? "wide" : "");
    part.append(make("dt", name), make("dd", text));
    return part;
  }));
}

function showOutput(text) {
  const output = ids("output"), isAtEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 4;
  const shownText = text || "(nothing written)";
  if (output.textContent === shownText) return;
  output.textContent = shownText;
  if (isAtEnd) output.scrollTop = output.scrollHeight;
}

async function chooseRank(rank) {
  chosenRank = rank;
  paintRanks();
  showRank();
  cells.get(rank).scrollIntoView({block: "nearest"});
  await fetchOutput();
}

async function fetchOutput() {
  const [rank, attempt] = [chosenRank, chosenAttempt];
  const known = attempt === null ? shown.outputs : shown.earlier_outputs[attempt] || {};
  if (`${rank}` in known || !isServed) { showOutput(known[rank] || ""); return; }
  showOutput("…");
  const text = await ask(`output?rank=${rank}&attempt=${attempt || 0}`, answer => answer.text());
  if (text !== null && chosenRank === rank && chosenAttempt === attempt) showOutput(text);
}

// The attempts whose output can be shown: all from a server, else those that are in the page.
function showAttemptChoice(data) {
  const last = data.attempts.length ? data.attempts[data.attempts.length - 1].number : null;
  const numbers = data.attempts.map(one => one.number).filter(n => n === last || isServed || n in data.earlier_outputs);
  ids("of-attempt").hidden = numbers.length < 2;
  const select = ids("attempt"), wanted = numbers.map(number => number === last ? `attempt ${number}, the last` : `attempt ${number}`);
  if (JSON.stringify([...select.options].map(one => one.textContent)) === JSON.stringify(wanted)) return;
  select.replaceChildren(...numbers.map((number, at) => Object.assign(make("option", wanted[at]), {value: number === last ? "" : number})));
  select.value = chosenAttempt === null ? "" : `${chosenAttempt}`;
}

ids("attempt").addEventListener("change", () => {
  chosenAttempt = ids("attempt").value ? Number(ids("attempt").value) : null;
  fetchOutput();
});

ids("hosts").addEventListener("click", event => {
  const cell = event.target.closest(".cell");
  if (cell) chooseRank(Number(cell.id.slice("cell-".length)));
});
ids("hosts").addEventListener("keydown", event => {
  const rows = [...hosts.values()], at = rows.findIndex(members => members.includes(chosenRank));
  if (at < 0) return;
  const order = rows.flat(), place = order.indexOf(chosenRank), column = rows[at].indexOf(chosenRank);
  const inRow = to => { const row = rows[Math.max(0, Math.min(rows.length - 1, to))]; return row[Math.min(column, row.length - 1)]; };
  const keys = {ArrowRight: () => order[Math.min(order.length - 1, place + 1)], ArrowLeft: () => order[Math.max(0, place - 1)],
                ArrowDown: () => inRow(at + 1), ArrowUp: () => inRow(at - 1),
                Home: () => order[0], End: () => order[order.length - 1]};
  if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  chooseRank(keys[event.key]());
});
