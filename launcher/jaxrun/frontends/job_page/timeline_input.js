
// Zooming, moving, hovering and choosing; what stands beside the chart.
const tip = ids("tip"), hair = ids("hair"), MIN_SPAN = 20e-6;
let frame = 0;

function redraw() {
  frame = frame || requestAnimationFrame(() => { frame = 0; draw(); });
}

function show(from, to) {
  const span = Math.min(job.duration, Math.max(MIN_SPAN, to - from));
  view.from = Math.max(0, Math.min(from, job.duration - span));
  view.to = view.from + span;
  redraw();
}

function zoom(factor, around = (view.from + view.to) / 2) {
  show(around - (around - view.from) * factor, around + (view.to - around) * factor);
}

const timeAt = event => {
  const box = chart.getBoundingClientRect();
  return view.from + (event.clientX - box.left) / box.width * (view.to - view.from);
};

function showCalls() {
  const margin = Math.max(MIN_SPAN, (calls.to - calls.from) * 0.02);
  show(calls.from - margin, calls.to + margin);
}

// ---- the chart

scroller.addEventListener("wheel", event => {
  const scrolls = scroller.scrollHeight > scroller.clientHeight + 1;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const part = (event.deltaX || event.deltaY) / 1000 * (view.to - view.from);
    show(view.from + part, view.to + part);
  } else if (event.ctrlKey || event.metaKey || !scrolls) zoom(Math.exp(event.deltaY / 300), timeAt(event));
  else return;
  event.preventDefault();
}, {passive: false});

chart.addEventListener("dblclick", event => zoom(1 / 4, timeAt(event)));
chart.addEventListener("pointerdown", event => {
  const start = {x: event.clientX, from: view.from, to: view.to};
  let moved = false;
  chart.setPointerCapture(event.pointerId);
  const move = event => {
    const part = (start.x - event.clientX) / chart.clientWidth * (start.to - start.from);
    moved = moved || Math.abs(start.x - event.clientX) > 3;
    if (moved) { chart.classList.add("moving"); show(start.from + part, start.to + part); }
  };
  chart.addEventListener("pointermove", move);
  chart.addEventListener("pointerup", event => {
    chart.removeEventListener("pointermove", move);
    chart.classList.remove("moving");
    if (!moved) choose(event);
  }, {once: true});
});

chart.addEventListener("pointermove", event => {
  const box = chart.getBoundingClientRect();
  hair.style.left = `${event.clientX - box.left + chart.offsetLeft}px`;
  hair.style.height = `${chart.clientHeight}px`;
  hair.hidden = false;
  hover(event);
});
chart.addEventListener("pointerleave", () => { hair.hidden = tip.hidden = true; });
scroller.addEventListener("scroll", redraw);

overview.addEventListener("pointerdown", event => {
  const box = overview.getBoundingClientRect();
  const at = event => Math.max(0, Math.min(1, (event.clientX - box.left) / box.width)) * job.duration;
  const start = at(event);
  overview.setPointerCapture(event.pointerId);
  const move = event => show(Math.min(start, at(event)), Math.max(start, at(event)));
  overview.addEventListener("pointermove", move);
  overview.addEventListener("pointerup", event => {
    overview.removeEventListener("pointermove", move);
    const span = view.to - view.from;
    if (Math.abs(at(event) - start) < job.duration / 500) show(start - span / 2, start + span / 2);
  }, {once: true});
});

scroller.addEventListener("keydown", event => {
  const part = (view.to - view.from) / 5;
  const keys = {"+": () => zoom(1 / 2), "=": () => zoom(1 / 2), "-": () => zoom(2), "0": () => show(0, job.duration), c: showCalls,
                ArrowLeft: () => show(view.from - part, view.to - part), ArrowRight: () => show(view.from + part, view.to + part),
                Escape: () => choose(null)};
  if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  keys[event.key]();
  event.preventDefault();
});
ids("all").onclick = () => show(0, job.duration);
ids("calls").onclick = showCalls;
ids("in").onclick = () => zoom(1 / 2);
ids("out").onclick = () => zoom(2);

// ---- what is below the pointer

const rowAt = event => job.rows[Math.floor((event.clientY - chart.getBoundingClientRect().top) / ROW)];

function find(event) {
  const row = rowAt(event), time = timeAt(event), pixel = (view.to - view.from) / chart.clientWidth;
  if (!row) return null;
  const near = spans => spans.find(span => span[1] - 2 * pixel <= time && time <= span[2] + 2 * pixel);
  const mark = row.marks.find(([at]) => Math.abs(at - time) < 6 * pixel);
  const i = callAt(row, time, pixel);
  return {row, time, i, mark, compiled: near(row.compilations), phase: near([...row.phases].reverse())};
}

function hover(event) {
  const found = find(event);
  showTip(event, found ? describe(found) : []);
}

function showTip(event, lines) {
  tip.hidden = !lines.length;
  if (!lines.length) return;
  tip.replaceChildren(...lines.map((text, at) => Object.assign(document.createElement(at ? "div" : "b"), {textContent: text})));
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18}px`;
}

band.addEventListener("pointermove", event => {
  const time = timeAt(event), found = job.goodput.periods.find(([start, end]) => start <= time && time <= end);
  showTip(event, found ? describePeriod(found) : []);
});
band.addEventListener("pointerleave", () => { tip.hidden = true; });

function describePeriod([start, end, parts]) {
  const whole = Object.values(parts).reduce((sum, spent) => sum + spent, 0) || 1;
  const shares = job.goodput.parts.filter(({part}) => parts[part]).map(({part, name}) => `${percent(parts[part] / whole)} ${name}`);
  return [`${seconds(start)} to ${seconds(end)}`, ...shares];
}

function describe({row, time, i, mark, compiled, phase}) {
  const at = `${row.label} · ${time.toFixed(4)} s`;
  if (mark) return [mark[1], mark[2], at].filter(Boolean);
  if (i >= 0) return [...describeCall(row, i), at];
  const [awaited] = row.awaited.filter(([start, end]) => start <= time && time <= end);
  if (awaited) return ["others wait for it in a call that it never enters", `for ${seconds(awaited[1] - awaited[0])}`, at];
  if (compiled) return [compiled[0], `took ${seconds(compiled[2] - compiled[1])}`, compiled[3], at].filter(Boolean);
  return phase ? [phase[0], `took ${seconds(phase[2] - phase[1])}`, phase[3], at].filter(Boolean) : [];
}

function describeCall(row, i) {
  const [name, place] = job.sites[row.site[i]], missing = job.missing[`${row.group[i]} ${row.number[i]}`];
  const lines = [`${name || "call"} #${row.number[i]}${place ? `, ${place}` : ""}`];
  lines.push(row.over[i] ? `took ${seconds(row.until[i] - row.begin[i])}` : `never came back: ${seconds(row.until[i] - row.begin[i])}`);
  if (missing) lines.push(`waits for ${missing}, to the end: ${seconds(row.waited[i])}`);
  else if (row.waited[i] > 0) lines.push(`waited ${seconds(row.waited[i])} for rank ${row.last[i]}`);
  if (row.cost[i] > 0) lines.push(`came last: the others waited ${seconds(row.cost[i])} on average`);
  return lines;
}

// ---- a call that was chosen: when did each rank come to it?

function choose(event) {
  const found = event && find(event), panel = ids("chosen");
  chosen = found && found.i >= 0 ? {group: found.row.group[found.i], number: found.row.number[found.i]} : null;
  panel.hidden = !chosen;
  if (chosen) {
    const came = job.rows.map(row => [row, sameCall(row, chosen.group, chosen.number)]).filter(([, i]) => i >= 0);
    const first = Math.min(...came.map(([row, i]) => row.begin[i]));
    const late = came.map(([row, i]) => [row, row.begin[i] - first, row.cost[i]]).sort((one, other) => other[1] - one[1]);
    const [name, place] = job.sites[found.row.site[found.i]];
    panel.querySelector("h2").textContent = `${name || "call"} #${chosen.number}`;
    panel.querySelector("p").textContent = `${place ? `at ${place}; ` : ""}when each rank came to it, after the first`;
    list(panel, late.slice(0, 64).map(([row, after, cost]) =>
      [row.short, after / (late[0][1] || 1), seconds(after), cost >= 0.001 ? heat(cost) : colours.call]));
  }
  redraw();
}

function list(panel, entries) {
  panel.querySelector("ol").replaceChildren(...entries.map(([who, share, text, colour]) => {
    const item = document.createElement("li"), track = document.createElement("span"), fill = document.createElement("i");
    Object.assign(fill.style, {width: `${100 * share}%`, background: colour});
    track.append(fill);
    const row = job.rows.findIndex(row => row.short === who);
    if (row >= 0) {
      item.className = "known";
      item.tabIndex = 0;
      item.onkeydown = event => { if (event.key === "Enter") item.click(); };
      item.onclick = () => scroller.scrollTo({top: (row + 0.5) * ROW - scroller.clientHeight / 2, behavior: "smooth"});
    }
    item.append(Object.assign(document.createElement("b"), {textContent: who}), track,
                Object.assign(document.createElement("span"), {textContent: text}));
    return item;
  }));
}

function showCosts() {
  const panel = ids("costs"), span = Math.max(1e-9, calls.to - calls.from);
  const ranked = job.costs.map((cost, at) => [cost, job.ranks[at], job.lasts[at]]).sort((one, other) => other[0] - one[0]);
  const top = ranked.filter(([cost]) => cost > 0).slice(0, 8);
  panel.hidden = !top.length;
  panel.querySelector("p").textContent =
    `In the calls that are known, ranks waited ${percent(Math.min(1, job.waited / span))} of the time, on average, for the last to come:`;
  list(panel, top.map(([cost, rank, last]) =>
    [`rank ${rank}`, cost / top[0][0], `${seconds(cost)} · last in ${percent(last)}`, heat(Math.max(0.001, cost / span))]));
  const canvas = panel.querySelector("canvas");
  canvas.hidden = job.ranks.length <= 8;
  if (canvas.hidden || !top.length) return;
  const {pen, width, height} = prepare(canvas, 56);
  job.costs.forEach((cost, at) => {
    const tall = Math.max(cost > 0 ? 1 : 0, cost / top[0][0] * (height - 14));
    pen.fillStyle = heat(Math.max(0.001, cost / span));
    pen.fillRect(at / job.costs.length * width, height - 12 - tall, Math.max(1, width / job.costs.length - 0.5), tall);
  });
  pen.fillStyle = colours.muted;
  pen.font = "10px system-ui, 'DejaVu Sans', sans-serif";
  pen.fillText(`rank ${job.ranks[0]}`, 0, height - 1);
  const text = `rank ${job.ranks[job.ranks.length - 1]}`;
  pen.fillText(text, width - pen.measureText(text).width, height - 1);
}

function showGoodput() {
  const panel = ids("goodput"), found = job.goodput;
  panel.hidden = band.hidden = !found;
  scroller.classList.toggle("has-band", Boolean(found));
  if (!found) return;
  const whole = found.parts.reduce((sum, one) => sum + one.seconds, 0) || 1;
  const tint = ({part}) => colours[PART_COLOURS[part] || "startup"];
  panel.querySelector("p").textContent = found.line;
  panel.querySelector(".stack").replaceChildren(...found.parts.map(one => {
    const piece = make("i");
    Object.assign(piece.style, {flex: `${one.seconds / whole} 0 0`, background: tint(one)});
    piece.title = one.name;
    return piece;
  }));
  panel.querySelector("ol").replaceChildren(...found.parts.map(one => {
    const item = make("li"), sample = make("i");
    sample.style.background = tint(one);
    item.title = one.meaning;
    item.append(sample, make("b", one.name), make("span", seconds(one.seconds)), make("span", percent(one.seconds / whole)));
    return item;
  }));
}

// ---- start

function loadTimeline(data) {
  const isFirst = !job.rows.length, isWhole = view.to - view.from >= 0.999 * job.duration;
  readTimeline(data);
  ids("timeline").classList.add("has-chart");
  ROW = job.rows.length <= 8 ? 38 : job.rows.length <= 24 ? 28 : job.rows.length <= 80 ? 20 : 11;
  [chosen, picture] = [null, null];
  ids("chosen").hidden = true;
  readColours();
  showLabels();
  ids("notes").replaceChildren(...job.notes.map(note => make("span", note)));
  const asked = location.hash.match(/^#([\d.]+)-([\d.]+)$/);  // page.html#12.5-13 shows that half second
  if (isFirst && asked) show(Number(asked[1]), Number(asked[2]));
  else if (isFirst && calls.to - calls.from < job.duration / 5) showCalls();
  else if (isFirst || isWhole) show(0, job.duration);
  showCosts();
  showGoodput();
  draw();
}

function showLabels() {
  labels.replaceChildren(...job.rows.map(row => {
    const label = document.createElement("div");
    label.style.height = `${ROW}px`;
    const awaited = row.awaited.some(([start, end]) => end - start > Math.max(1, job.duration / 20));
    const at = job.ranks.indexOf(row.rank), slow = job.lasts[at] > 0.5 && job.costs[at] > 0.05 * (calls.to - calls.from);
    label.className = `${row.culprit || awaited ? "culprit" : slow ? "slow" : ""} ${ROW < 15 ? "dense" : ""}`;
    label.title = row.trouble;
    label.append(row.short, make("small", row.host));
    return label;
  }));
}

function repaintTimeline() {
  if (!job.rows.length) return;
  picture = null;
  readColours();
  draw();
  showCosts();
  showGoodput();
}

addEventListener("resize", () => { if (job.rows.length) redraw(); });
