"use strict";
// Asks for data.json once a second, and shows it. All text comes as text: nothing of the job is read as HTML.

const KINDS = {
  "like others": ["like", "like the others"], slow: ["slow", "others wait for it often"], late: ["late", "behind the others"],
  stopped: ["stopped", "stopped"], failed: ["failed", "failed, or does not answer"], ended: ["ended", "finished, or not started"],
};
const DENSE_ABOVE = 256;  // ranks, from which on cells are small and have no number
const $ = (id) => document.getElementById(id);
let chosen = null, ranks = [], cells = new Map();

function make(tag, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}

function kindOf(rank) {
  return /^(finished|not started|stopped with)/.test(rank.state) ? "ended" : rank.standing_out;
}

function bytes(count) {
  if (count === null) return "not known";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 999.5 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${Number(count.toPrecision(3))} ${units[unit]}`;
}

function seconds(value) {
  if (value < 60) return `${value.toFixed(1)} s`;
  const whole = Math.round(value), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function ranges(numbers) {
  const parts = [];
  for (const number of numbers) {
    const last = parts[parts.length - 1];
    if (last && number === last[1] + 1) last[1] = number; else parts.push([number, number]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(", ");
}

function showLegend() {
  for (const [name, text] of Object.values(KINDS)) {
    const item = make("li");
    item.append(make("i", "", name), text);
    $("legend").append(item);
  }
}

function layOut(hosts) {
  cells = new Map();
  $("hosts").replaceChildren();
  $("hosts").classList.toggle("dense", ranks.length > DENSE_ABOVE);
  $("hosts").style.setProperty("--cell", ranks.length > DENSE_ABOVE ? "12px" : "32px");
  for (const [host, members] of hosts) {
    const row = make("div", undefined, "host"), group = make("div", undefined, "cells");
    row.setAttribute("role", "row");
    for (const rank of members) {
      const cell = make("div", `${rank}`, "rank");
      cell.setAttribute("role", "gridcell");
      cell.dataset.rank = rank;
      cells.set(rank, cell);
      group.append(cell);
    }
    const label = make("span", host);
    label.append(make("small", "", "memory"));
    row.append(label, group);
    $("hosts").append(row);
  }
}

function showRanks() {
  const hosts = new Map();
  for (const one of ranks) {
    if (!hosts.has(one.host)) hosts.set(one.host, []);
    hosts.get(one.host).push(one.rank);
  }
  const shape = JSON.stringify([...hosts]);
  if ($("hosts").dataset.shape !== shape) { layOut(hosts); $("hosts").dataset.shape = shape; }
  [...document.querySelectorAll(".memory")].forEach((label, number) => {
    const members = new Set([...hosts.values()][number]);
    label.textContent = bytes(ranks.reduce((sum, one) => sum + (members.has(one.rank) ? one.memory_bytes || 0 : 0), 0));
  });
  for (const one of ranks) {
    const cell = cells.get(one.rank), name = `rank ${KINDS[kindOf(one)][0]}`;
    if (cell.className !== name) cell.className = name;
    cell.title = `rank ${one.rank} on ${one.host}: ${one.state}`;
    cell.setAttribute("aria-label", cell.title);
    cell.setAttribute("aria-selected", one.rank === chosen);
  }
}

function showStates() {
  const groups = new Map();
  for (const one of ranks) {
    const key = `${kindOf(one)}|${one.state}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(one.rank);
  }
  const order = Object.keys(KINDS), sorted = [...groups].sort(([a, x], [b, y]) => {
    const rank = (key) => (key.startsWith("ended") ? -1 : order.indexOf(key.split("|")[0]));
    return rank(b) - rank(a) || y.length - x.length;
  });
  $("states").replaceChildren(...sorted.slice(0, 40).map(([key, members]) => {
    const [kind, state] = [key.slice(0, key.indexOf("|")), key.slice(key.indexOf("|") + 1)];
    const item = make("li"), text = make("span", state);
    text.append(make("small", `${members.length === 1 ? "rank" : `${members.length} ranks:`} ${ranges(members)}`));
    item.append(make("i", "", KINDS[kind][0]), text);
    return item;
  }));
}

function showRate(history) {
  const canvas = $("rate"), scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale; canvas.height = height * scale;
  const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  context.scale(scale, scale);
  const most = Math.max(...history.map(([, rate]) => rate), 0), [first, last] = [history[0], history[history.length - 1]];
  if (!most || last[0] === first[0]) return;
  context.strokeStyle = style.getPropertyValue("--accent");
  context.fillStyle = style.getPropertyValue("--muted");
  context.lineWidth = 1.5;
  context.beginPath();
  for (const [time, rate] of history) {
    const x = ((time - first[0]) / (last[0] - first[0])) * width, y = height - 4 - (rate / most) * (height - 22);
    context.lineTo(x, y);
  }
  context.stroke();
  context.font = "11px system-ui, sans-serif";
  context.fillText(`${Number(most.toPrecision(3))}/s at most, in ${seconds(last[0] - first[0])}`, 0, 11);
}

function showChosen() {
  const one = ranks.find((rank) => rank.rank === chosen);
  $("chosen").hidden = !one;
  if (!one) return;
  const facts = [["state", one.state]], late = one.late_s;
  if (one.since_s !== null) facts.push(["for", seconds(one.since_s)]);
  if (one.number !== null) facts.push(["last call", `#${one.number}${one.behind ? `, ${one.behind} behind` : ""}`]);
  if (late !== null) facts.push(["late by", seconds(late)]);
  if (one.cpu_percent !== null) facts.push(["CPU", `${Math.round(one.cpu_percent)} % of a core`]);
  facts.push(["memory", bytes(one.memory_bytes)]);
  if (one.gpu_percent !== null) facts.push(["GPU", `${Math.round(one.gpu_percent)} %`]);
  if (one.gpu_bytes !== null) facts.push(["GPU memory", bytes(one.gpu_bytes)]);
  $("chosen").querySelector("h2").textContent = `Rank ${one.rank} on ${one.host}`;
  $("chosen").querySelector("dl").replaceChildren(...facts.flatMap(([name, text]) => [make("dt", name), make("dd", text)]));
  fetch(`output?rank=${one.rank}`).then((answer) => answer.text()).then((text) => {
    const output = $("chosen").querySelector("pre");
    const isAtEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 4;
    output.textContent = text || "(nothing written yet)";
    if (isAtEnd) output.scrollTop = output.scrollHeight;
  });
}

function choose(rank) {
  chosen = rank;
  showRanks();
  showChosen();
}

function show(data) {
  const job = data.top;
  ranks = job.ranks;
  if (chosen === null && ranks.length) chosen = ranks[0].rank;
  document.title = `${job.run_dir.split("/").pop()} · jaxrun`;
  $("where").textContent = job.run_dir;
  $("name").textContent = job.run_dir.split("/").pop();
  const hosts = new Set(ranks.map((one) => one.host)).size, time = job.seconds === null ? "" : `, ${seconds(job.seconds)}`;
  $("phase").textContent = data.verdict || `attempt ${job.attempt}, ${job.phase || "not known"}${time} · ${count(ranks.length, "rank")} on ${count(hosts, "host")}`;
  $("note").hidden = !job.note;
  $("note").textContent = job.note;
  $("end").hidden = !data.is_over;
  const rate = job.calls_per_second;
  $("pace").textContent = rate === null ? "not known" : `${Number(rate.toPrecision(3))} now${job.calls_per_step ? `, ${job.calls_per_step} in a step` : ""}`;
  showRanks();
  showStates();
  if (data.rates.length) showRate(data.rates);
  showChosen();
  return data.is_over;
}

async function follow() {
  let isOver = false;
  try {
    const answer = await fetch("data.json");
    isOver = show(await answer.json());
  } catch (error) {
    $("note").hidden = false;
    $("note").textContent = "jaxrun top --web does not answer any more";
  }
  if (!isOver) setTimeout(follow, 1000);
}

$("hosts").addEventListener("click", (event) => {
  const cell = event.target.closest(".rank");
  if (cell) choose(Number(cell.dataset.rank));
});
$("hosts").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const order = [...cells.keys()];
  if (!step || !order.length) return;
  event.preventDefault();
  const at = order.indexOf(chosen);
  choose(order[Math.min(order.length - 1, Math.max(0, at < 0 ? 0 : at + step))]);
  cells.get(chosen).scrollIntoView({ block: "nearest" });
});
showLegend();
follow();
