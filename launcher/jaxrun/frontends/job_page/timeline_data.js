
// The chart of what all ranks did: see timeline.py. Times are seconds since the job's start.
const US = 1e-6;
let job = {rows: [], attempts: [], duration: 1, ranks: [], costs: [], lasts: []};
let calls = {from: 0, to: 1};  // the time in which calls are known

function readTimeline(data) {
  job = data;
  for (const row of job.rows) decodeCalls(row);
  const known = job.rows.flatMap(row => row.count ? [row.begin[0], endOf(row, row.count - 1)] : []);
  calls = known.length ? {from: Math.min(...known), to: Math.max(...known)} : {from: 0, to: job.duration};
}

// Eight whole numbers for each call, times in microseconds: since the call before, took (-1 less that: it never ended),
// waited, what it cost the others, group, number, site, and the rank that came last (-1: not known).
function decodeCalls(row) {
  const count = row.count = row.calls.length / 8, floats = () => new Float64Array(count), ints = () => new Int32Array(count);
  Object.assign(row, {begin: floats(), until: floats(), waited: floats(), cost: floats(), group: ints(), number: ints(),
                      site: ints(), last: ints(), over: ints()});
  let time = 0;
  for (let i = 0, at = 0; i < count; i++, at += 8) {
    const [since, took, waited, cost, group, number, site, last] = row.calls.slice(at, at + 8);
    time += since;
    row.begin[i] = time * US;
    row.until[i] = (time + (took < 0 ? -1 - took : took)) * US;
    row.over[i] = took < 0 ? 0 : 1;
    row.waited[i] = waited * US;
    row.cost[i] = cost * US;
    row.group[i] = group;
    row.number[i] = number;
    row.site[i] = site;
    row.last[i] = last;
  }
  delete row.calls;
}

// When a call was over and waited for nobody any more.
function endOf(row, i) {
  return Math.max(row.until[i], row.begin[i] + row.waited[i]);
}

// The index of the first call of a row that ends, waits included, after this time; calls are in the order of their begin.
function firstAfter(row, time) {
  let low = 0, high = row.count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (endOf(row, middle) < time) low = middle + 1; else high = middle;
  }
  return low;
}

function callAt(row, time, slack) {
  for (let i = firstAfter(row, time - slack); i < row.count && row.begin[i] - row.cost[i] <= time + slack; i++) {
    if (endOf(row, i) >= time - slack) return i;
  }
  return -1;
}

function sameCall(row, group, number) {
  for (let i = 0; i < row.count; i++) if (row.group[i] === group && row.number[i] === number) return i;
  return -1;
}
