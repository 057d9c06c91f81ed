
// What stands beside the grid: the heading, states, the rate of steps, memory, attempts and the verdict.
const MOST_GROUPS = 40, MOST_HOSTS = 16;

function showHeading(data) {
  const job = data.top, time = job.seconds === null ? "" : seconds(job.seconds);
  const began = data.start ? new Date(data.start * 1000).toLocaleString("sv") : "";
  ids("where").textContent = [job.run_dir, began, data.tag ? `tag: ${data.tag}` : ""].filter(Boolean).join(" · ");
  ids("title").textContent = data.title;
  document.title = `${data.title} · jaxrun`;
  const size = `${plural(ranks.length, "rank")} on ${plural(hosts.size, "host")}`;
  const tries = data.attempts.length > 1 ? `attempt ${job.attempt}` : "";
  ids("badge").className = data.verdict ? data.verdict.tone : "live";
  ids("badge").textContent = data.verdict ? data.verdict.outcome : job.phase || "not known";
  const live = [tries, time, ranks.length ? size : "", paceText(job)], over = [data.verdict && data.verdict.headline];
  ids("summary").textContent = (data.verdict ? over : live).filter(Boolean).join(" · ");
  showNote(job.note);
  const told = data.verdict ? null : job.progress;
  ids("progress").hidden = !told || !told.total;
  if (told && told.total) Object.assign(ids("progress"), {max: told.total, value: Math.min(told.step, told.total)});
}

function showNote(text) {
  ids("note").hidden = !text;
  ids("note").textContent = text;
}

function paceText(job) {
  if (job.calls_per_second === null) return "";
  const noun = job.calls_per_step ? "step" : "call", rate = job.calls_per_second / (job.calls_per_step || 1);
  if (rate <= 0) {
    const made = Math.floor((job.calls || 0) / (job.calls_per_step || 1));
    return made ? `${plural(made, noun)}${job.idle_s === null ? "" : `, none for ${seconds(job.idle_s)}`}` : `no ${noun}s yet`;
  }
  return rate < 0.095 ? `a ${noun} in ${Math.round(1 / rate)} s` : `${figure(rate)} ${noun}s/s`;
}

function showStates(isOver) {
  const groups = new Map(), order = Object.keys(KINDS);
  for (const one of ranks) {
    const key = JSON.stringify([kindOf(one), one.state, one.waits_for.length > 1 ? one.waits_for : []]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(one);
  }
  const found = [...groups.values()].sort((one, other) =>
    order.indexOf(kindOf(one[0])) - order.indexOf(kindOf(other[0])) || other.length - one.length);
  ids("states-title").textContent = isOver ? "How ranks ended" : "What ranks do, and for whom they wait";
  ids("states").replaceChildren(...found.slice(0, MOST_GROUPS).map(members => {
    const [first] = members, item = make("li"), text = make("span", first.state);
    const longest = Math.max(...members.map(one => one.since_s || 0));
    const who = [rankNames(members.map(one => one.rank))];
    if (members.length > 8) who[0] = `${plural(members.length, "rank")}: ${ranges(members.map(one => one.rank))}`;
    if (longest >= 1) who.push(seconds(longest));
    if (first.waits_for.length > 1) text.append(make("small", `→ ${rankNames(first.waits_for)}`));
    text.append(make("small", who.join(" · ")));
    item.append(sign(kindOf(first)), text);
    return item;
  }));
  if (found.length > MOST_GROUPS) ids("states").append(make("li", `… ${plural(found.length - MOST_GROUPS, "more state")}`));
}

function showRates(data) {
  const perStep = data.top.calls_per_step || 1, noun = data.top.calls_per_step ? "Steps" : "Calls", points = data.rates;
  ids("pace").hidden = points.length < 2;
  if (points.length < 2) return;
  ids("pace-title").textContent = `${noun} per second`;
  const {pen, width, height} = prepare(ids("rate"), 96), rates = points.map(([, rate]) => rate / perStep);
  const most = Math.max(...rates), from = points[0][0], to = points[points.length - 1][0], colour = colourOf;
  ids("rate").setAttribute("aria-label", `${noun} per second, from ${seconds(from)} to ${seconds(to)}: ${figure(most)} at most, ${figure(rates[rates.length - 1])} at last`);
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  const left = pen.measureText(figure(most)).width + 8, top = 8, bottom = height - 18;
  const at = time => left + (to > from ? (time - from) / (to - from) : 0) * (width - left - 2);
  pen.fillStyle = colour("line");
  for (const y of [top, bottom]) pen.fillRect(left, y, width - left, 1);
  pen.fillStyle = colour("muted");
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  pen.fillText(figure(most), left - 5, top);
  pen.fillText("0", left - 5, bottom);
  pen.fillText(seconds(to), width, height - 6);
  pen.textAlign = "left";
  pen.fillText(seconds(from), left, height - 6);
  pen.strokeStyle = colour("accent");
  pen.lineWidth = 1.5;
  pen.lineJoin = "round";
  pen.beginPath();
  points.forEach(([time], index) => pen.lineTo(at(time), bottom - (most ? rates[index] / most : 0) * (bottom - top)));
  pen.stroke();
}

const colourOf = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Of each host: how full its memory is, what its ranks hold, and the used memory of its GPUs; the fullest first.
function showMemory(data) {
  const known = new Map(data.top.hosts.map(one => [one.host, one])), found = [];
  for (const [host, members] of hosts) {
    const inside = new Set(members), own = ranks.filter(one => inside.has(one.rank));
    const sum = field => own.reduce((total, one) => total + (one[field] || 0), 0), memory = known.get(host);
    const [held, gpu] = [sum("memory_bytes"), sum("gpu_bytes")];
    if (memory || held || gpu) found.push({host, memory, held, gpu, share: memory ? memory.used_bytes / memory.limit_bytes : 0});
  }
  const level = one => Math.round(100 * one.share);  // so that hosts that are alike stay in their order
  found.sort((one, other) => level(other) - level(one));
  ids("memory").hidden = !found.length;
  ids("memories").replaceChildren(...found.slice(0, MOST_HOSTS).map(({host, memory, held, gpu, share}) => {
    const item = make("li"), track = make("span", undefined, "track"), fill = make("i");
    fill.style.width = `${100 * share}%`;
    fill.style.background = colourOf(share > 0.9 ? "worst" : share > 0.75 ? "hot" : "call");
    if (memory) track.append(fill); else track.className = "";
    const parts = [memory ? `${bytes(memory.used_bytes)} of ${bytes(memory.limit_bytes)}` : `ranks ${data.is_live ? "hold" : "held"} ${bytes(held)}`];
    if (gpu) parts.push(`GPUs ${bytes(gpu)}`);
    item.append(make("b", host || "this host"), track, make("span", parts.join(" · ")));
    item.title = `${host}: its ranks hold ${bytes(held)}`;
    return item;
  }));
  if (found.length > MOST_HOSTS) ids("memories").append(make("li", `… ${plural(found.length - MOST_HOSTS, "more host")}`, "more"));
}

function showAttempts(data) {
  ids("attempts").hidden = !data.attempts.length;
  ids("tries").replaceChildren(...data.attempts.map((one, at) => {
    const isLast = at === data.attempts.length - 1, runs = data.is_live && isLast;
    const length = runs ? `since ${seconds(Math.max(0, (data.top.seconds || 0) - one.start))}` : seconds(one.seconds);
    const facts = [`attempt ${one.number}`, one.hosts ? plural(one.hosts, "host") : "", length].filter(Boolean).join(" · ");
    const item = make("li", facts);
    item.append(make("small", one.outcome || (runs ? "running" : "no end is recorded")));
    return item;
  }));
}

function showVerdict(verdict) {
  ids("verdict").hidden = !verdict;
  if (verdict && ids("report").textContent !== verdict.report) ids("report").textContent = verdict.report;
}
