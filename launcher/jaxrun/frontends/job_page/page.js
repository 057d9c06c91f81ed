
// Shows the document that stands in the page; if it comes from a server and its job runs, asks for news.
const INTERVAL_MS = 2000;
const isServed = document.documentElement.dataset.served === "yes";
let shown = JSON.parse(ids("data").textContent);

async function ask(path, read) {
  try {
    const answer = await fetch(path);
    if (!answer.ok) throw new Error(await answer.text());
    return await read(answer);
  } catch (error) {
    showNote(`jaxrun top --web does not answer${error.message ? `: ${error.message}` : ""}`);
    return null;
  }
}

function showDocument(data) {
  shown = data;
  showRanks(data.top);
  showHeading(data);
  showStates(!data.is_live);
  showRates(data);
  showMemory(data);
  showAttempts(data);
  showVerdict(data.verdict);
  showRank();
  showAttemptChoice(data);
  if (chosenAttempt !== null) fetchOutput();
  else if (chosenRank !== null && `${chosenRank}` in data.outputs) showOutput(data.outputs[chosenRank]);
  else if (!data.is_live && chosenRank !== null) chooseRank(chosenRank);
  ids("load").hidden = !(data.is_live && isServed);
  if (data.timeline) loadTimeline(data.timeline);
}

async function follow() {
  const began = performance.now();
  if (!document.hidden) {
    const data = await ask(`document.json?rank=${chosenRank || 0}`, answer => answer.json());
    if (data !== null) showDocument(data);
  }
  if (shown.is_live) setTimeout(follow, Math.max(INTERVAL_MS, 2 * (performance.now() - began)));
}

ids("load").addEventListener("click", async () => {
  ids("load").disabled = true;
  const data = await ask("document.json?timeline", answer => answer.json());
  ids("load").disabled = false;
  if (data === null || !data.timeline) return;
  loadTimeline(data.timeline);
  ids("load").textContent = "update";
});
addEventListener("resize", () => showRates(shown));
for (const change of [matchMedia("(prefers-color-scheme: dark)"), matchMedia("print")])
  change.addEventListener("change", () => { showRates(shown); showMemory(shown); repaintTimeline(); });
showDocument(shown);
if (shown.is_live && isServed) setTimeout(follow, INTERVAL_MS);
