
// Draws the overview, the axis and a row for each rank.
const [overview, band, axis, chart, labels, scroller] = ["overview", "band", "axis", "rows", "labels", "scroller"].map(ids);
// Of the parts of the time; all others are starts and ends.
const PART_COLOURS = {steps: "good", compiling: "compile", saving: "accent", restoring: "accent", repeated: "mild",
                      data: "hot", slowest: "hot", stalled: "worst", suspended: "band", unknown: "idle"};
const view = {from: 0, to: 1};
let ROW = 38;  // pixels
let colours = {}, chosen = null, picture = null;  // `picture` of the overview

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["panel", "ink", "muted", "line", "band", "call", "wait", "compile", "startup", "accent",
                      "mild", "hot", "worst", "good", "idle"])
    colours[name] = style.getPropertyValue(`--${name}`).trim();
}

const x = (time, width) => (time - view.from) / (view.to - view.from) * width;

// From 1 ms, the mildest colour, to 1 s, the worst.
function heat(cost) {
  const level = Math.min(1, Math.max(0, Math.log10(cost / 0.001) / 3));
  const [one, other, share] = level < 0.5 ? ["mild", "hot", level * 2] : ["hot", "worst", level * 2 - 1];
  return `color-mix(in srgb, ${colours[one]} ${Math.round(100 - 100 * share)}%, ${colours[other]})`;
}

function draw() {
  drawOverview();
  drawBand();
  drawAxis();
  drawRows();
}

// Only those rows that can be seen, or are on a printed page.
function drawRows() {
  const {pen, width} = prepare(chart, job.rows.length * ROW);
  const first = Math.max(0, Math.floor((scroller.scrollTop - 200) / ROW));
  const last = Math.ceil((scroller.scrollTop + scroller.clientHeight + 200) / ROW);
  job.rows.slice(first, last).forEach((row, index) => drawRow(pen, row, (first + index) * ROW, width));
  for (const attempt of job.attempts) for (const mark of attempt.marks) drawLine(pen, mark, width);
}

function drawRow(pen, row, top, width) {
  const pad = ROW > 15 ? 4 : 1, height = ROW - 2 * pad, y = top + pad;
  if (row.culprit) { pen.globalAlpha = 0.09; pen.fillStyle = colours.worst; pen.fillRect(0, top, width, ROW); pen.globalAlpha = 1; }
  for (const [kind, start, end] of row.phases) {
    if (end < view.from || start > view.to) continue;
    const left = Math.max(0, x(start, width)), right = Math.min(width, x(end, width));
    pen.fillStyle = kind === "program" ? colours.band : kind === "JAX profile" ? colours.accent : colours.startup;
    pen.fillRect(left, kind === "JAX profile" ? top + ROW - 2 : y, Math.max(1, right - left), kind === "JAX profile" ? 2 : height);
    caption(pen, kind === "program" ? "" : kind, left, right, y, height, colours.ink);
  }
  for (const [name, start, end] of row.compilations) bar(pen, name, start, end, colours.compile, y, height, width);
  const first = firstAfter(row, view.from), spread = new Float32Array(3 * Math.ceil(width + 1));
  let seen = 0;
  for (let i = first; i < row.count && row.begin[i] - row.cost[i] <= view.to; i++) seen++;
  if (seen > width / 2) drawDense(pen, row, first, spread, y, height, width);
  else for (let i = first; i < first + seen; i++) drawCall(pen, row, i, y, height, width);
  for (const [start, end] of row.awaited)
    if (end - start > 0.05) bar(pen, "others wait for it", start, end, heat(end - start), y, height, width);
  drawFlags(pen, row.marks, top, width);
}

function drawCall(pen, row, i, y, height, width) {
  const left = x(row.begin[i], width), right = Math.max(left + 1, x(row.until[i], width));
  const waits = x(row.begin[i] + row.waited[i], width), costly = row.cost[i] >= 0.001;
  pen.fillStyle = costly ? heat(row.cost[i]) : colours.call;
  pen.fillRect(left, y, right - left, height);
  if (waits > left + 0.5) {
    pen.fillStyle = colours.wait;
    pen.fillRect(left, y, waits - left, height);
  }
  if (costly) {
    const since = x(row.begin[i] - row.cost[i], width);
    pen.globalAlpha = 0.7;
    pen.fillStyle = heat(row.cost[i]);
    pen.fillRect(since, y, left - since, height);
    pen.globalAlpha = 1;
  }
  if (chosen && row.group[i] === chosen.group && row.number[i] === chosen.number) {
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 1.5;
    pen.strokeRect(left + 0.5, y - 0.5, Math.max(2, Math.max(right, waits) - left), height + 1);
  }
  caption(pen, job.sites[row.site[i]][0], Math.max(left, waits), right, y, height, colours.ink);
}

// Many calls in few pixels: each pixel column shows how much of its time was calls, waiting, and others waiting.
function drawDense(pen, row, first, spread, y, height, width) {
  const columns = Math.ceil(width), scale = width / (view.to - view.from);
  const worst = new Float32Array(columns + 1);
  const add = (from, to, kind, cost = 0) => {
    const left = Math.max(0, (from - view.from) * scale), right = Math.min(columns, (to - view.from) * scale);
    for (let at = Math.floor(left); at < right; at++) {
      spread[3 * at + kind] += Math.min(right, at + 1) - Math.max(left, at);
      if (cost > worst[at]) worst[at] = cost;
    }
  };
  for (let i = first; i < row.count && row.begin[i] - row.cost[i] <= view.to; i++) {
    const begin = row.begin[i], ready = begin + row.waited[i];
    add(ready, row.until[i], 0);
    add(begin, ready, 1);
    add(begin - row.cost[i], begin, 2, row.cost[i]);
  }
  for (let at = 0; at < columns; at++) {
    const parts = [[spread[3 * at + 1], colours.wait], [spread[3 * at], colours.call],
                   [spread[3 * at + 2], worst[at] >= 0.001 ? heat(worst[at]) : null]];
    let top = y;
    for (const [share, colour] of parts) {
      const part = Math.min(1, share) * height;
      if (colour && part > 0.3) { pen.fillStyle = colour; pen.fillRect(at, top, 1, part); }
      top += part;
    }
  }
}

function bar(pen, name, start, end, colour, y, height, width) {
  if (end < view.from || start > view.to) return;
  const left = Math.max(0, x(start, width)), right = Math.min(width, Math.max(x(end, width), x(start, width) + 1));
  pen.fillStyle = colour;
  pen.fillRect(left, y, right - left, height);
  caption(pen, name, left, right, y, height, colours.ink);
}

function caption(pen, text, left, right, y, height, colour) {
  const from = Math.max(0, left), to = Math.min(right, chart.clientWidth);
  if (height < 14 || to - from < 34 || !text) return;
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  pen.fillStyle = colour;
  pen.save();
  pen.beginPath();
  pen.rect(from + 4, y, to - from - 8, height);
  pen.clip();
  pen.textBaseline = "middle";
  pen.fillText(text, from + 5, y + height / 2 + 0.5);
  pen.restore();
}

function line(pen, at, colour, height) {
  pen.fillStyle = colour;
  pen.fillRect(Math.round(at) - 0.5, 0, 1, height);
}

function drawLine(pen, [time, , , bad], width) {
  if (time >= view.from && time <= view.to) line(pen, x(time, width), bad ? colours.worst : colours.muted, chart.clientHeight);
}

// A dot for each mark, and its name where that covers no other mark; only a failure's may cover dots of what is no failure.
function drawFlags(pen, marks, top, width) {
  const shown = marks.filter(([time]) => time >= view.from && time <= view.to), size = Math.min(shown.length > width / 40 ? 3 : 5, ROW / 3);
  const tint = bad => bad ? colours.worst : colours.accent;
  for (const [time, , , bad] of shown) {
    const at = x(time, width);
    pen.fillStyle = tint(bad);
    pen.fillRect(at - 1, top + 1, 2, ROW - 2);
    pen.beginPath();
    pen.arc(at, top + ROW / 2, size, 0, 7);
    pen.fill();
  }
  if (ROW < 15) return;
  pen.font = "600 11px system-ui, 'DejaVu Sans', sans-serif";
  pen.textBaseline = "middle";
  const failures = shown.filter(mark => mark[3]), others = shown.filter(mark => !mark[3]);
  const dotOf = ([time]) => [x(time, width) - size, x(time, width) + size];
  const names = [], dots = {true: failures.map(dotOf), false: shown.map(dotOf)};
  for (const [time, name, , bad] of [...failures, ...others]) {
    const at = x(time, width), wide = pen.measureText(name).width, taken = [...names, ...dots[bad]];
    const sides = [at + size + 4, at - size - 6 - wide], fits = left => left >= 2 && left + wide + 2 <= width;
    const left = (bad ? sides.filter(fits) : [sides.find(fits)]).find(start => taken.every(([from, to]) => start + wide + 1 < from || start - 1 > to));
    if (left === undefined) continue;
    names.push([left, left + wide]);
    pen.fillStyle = colours.panel;
    pen.fillRect(left - 2, top + 4, wide + 4, ROW - 8);
    pen.fillStyle = tint(bad);
    pen.fillText(name, left, top + ROW / 2 + 0.5);
  }
}

// What the time was worth: in each period the shares of the parts, productive time at the bottom.
function drawBand() {
  if (!job.goodput) return;
  const {pen, width, height} = prepare(band, 20), tall = height - 4;
  for (const [start, end, parts] of job.goodput.periods) {
    if (end < view.from || start > view.to) continue;
    const left = Math.floor(Math.max(0, x(start, width))), right = Math.ceil(Math.min(width, x(end, width)));
    const whole = Math.max(1e-9, Object.values(parts).reduce((sum, spent) => sum + spent, 0));
    let low = height - 2;
    for (const {part} of job.goodput.parts) {
      const share = (parts[part] || 0) / whole * tall;
      if (!share) continue;
      pen.fillStyle = colours[PART_COLOURS[part] || "startup"];
      pen.fillRect(left, low -= share, right - left, share);
    }
  }
}

function drawAxis() {
  const {pen, width, height} = prepare(axis, 28), span = view.to - view.from;
  const rough = span / Math.max(2, width / 110), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= rough);
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  for (let tick = Math.ceil(view.from / step); tick * step <= view.to; tick++) {
    const at = x(tick * step, width);
    pen.fillStyle = colours.line;
    pen.fillRect(at, height - 6, 1, 6);
    pen.fillStyle = colours.muted;
    const text = tick ? tickLabel(tick * step, step) : "0 s";
    if (at + 4 + pen.measureText(text).width <= width) pen.fillText(text, at + 4, height - 8);
  }
  pen.fillStyle = colours.line;
  pen.fillRect(0, height - 1, width, 1);
  for (const attempt of job.attempts) {
    if (job.attempts.length < 2 || attempt.start < view.from || attempt.start > view.to) continue;
    pen.fillStyle = colours.accent;
    pen.fillText(`attempt ${attempt.number}`, x(attempt.start, width) + 4, 8);
  }
}

function tickLabel(time, step) {
  if (step >= 1) return time < 120 ? `${time.toFixed(0)} s` : seconds(time);
  return `${time.toFixed(Math.min(6, Math.ceil(-Math.log10(step))))} s`;
}

// How much of the time ranks wait, over the whole job, and what of it is shown below.
function drawOverview() {
  const {pen, width, height} = prepare(overview, 44);
  if (!picture || picture.width !== overview.width) picture = drawPicture(overview.width, overview.height);
  pen.drawImage(picture, 0, 0, width, height);
  const left = view.from / job.duration * width, right = view.to / job.duration * width;
  pen.globalAlpha = 0.55;
  pen.fillStyle = colours.panel;
  pen.fillRect(0, 0, left, height);
  pen.fillRect(right, 0, width - right, height);
  pen.globalAlpha = 1;
  pen.strokeStyle = colours.accent;
  pen.lineWidth = 1.5;
  pen.strokeRect(left + 0.75, 0.75, Math.max(2, right - left - 1.5), height - 1.5);
}

function drawPicture(width, height) {
  const canvas = Object.assign(document.createElement("canvas"), {width, height}), pen = canvas.getContext("2d");
  const columns = Math.ceil(width / 2), scale = columns / job.duration;
  const sums = {waited: new Float32Array(columns + 1), busy: new Float32Array(columns + 1), compiled: new Float32Array(columns + 1)};
  const add = (kind, from, to) => {
    const left = Math.max(0, from * scale), right = Math.min(columns, to * scale);
    for (let at = Math.floor(left); at < right; at++) sums[kind][at] += Math.min(right, at + 1) - Math.max(left, at);
  };
  for (const row of job.rows) {
    for (let i = 0; i < row.count; i++) {
      add("waited", row.begin[i], row.begin[i] + row.waited[i]);
      add("busy", row.begin[i] + row.waited[i], row.until[i]);
    }
    for (const [, start, end] of row.compilations) add("compiled", start, end);
  }
  for (let at = 0; at < columns; at++) {
    let top = height;
    for (const [kind, colour] of [["compiled", "compile"], ["busy", "call"], ["waited", "wait"]]) {
      const part = Math.min(1, sums[kind][at] / job.rows.length) * (height - 4);
      pen.fillStyle = colours[colour];
      pen.fillRect(2 * at, Math.max(0, top -= part), 2, part);
    }
  }
  for (const row of job.rows) for (const [time, , , bad] of row.marks) {
    pen.fillStyle = bad ? colours.worst : colours.accent;
    pen.fillRect(time / job.duration * width - 1, 0, 2, height);
  }
  return canvas;
}
