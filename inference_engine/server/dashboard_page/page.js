// Fetches what there is every two seconds, and draws it.

import { bar, bytes, chart, count, duration, escape, latest, pointAt, seconds, sessionRows, share, table } from "./charts.js";

const SLOTS = 300;
const STALL_SECONDS = 10;
const STATES = ["idle", "dropped", "appending", "queued", "prefilling", "decoding", "failed"];
const KINDS = {
  entries: "entries", archive: "archives", restored: "restored", draft: "draft memories", sink_copy: "sink copies",
  bounds: "block bounds", components: "key components", fetched: "fetched blocks",
};
const PARTS = { forward: "model", sample: "sampling", plan: "planning", draft: "drafting", settle: "settling" };
const percentiles = (points, name) => ["p50", "p95", "p99"].map((part) => [part, points[`${name}_${part}`]]);

const place = (id) => document.getElementById(id);
let data = null, looked = null;

const specs = ({ points }) => [
  { title: "Generated tokens per second", series: [["all sessions", points.tokens_per_second]], format: count },
  { title: "Prefilled tokens per second", series: [["all sessions", points.prefilled_per_second]], format: count },
  { title: "Time to the first token", series: percentiles(points, "first_token"), format: seconds },
  { title: "Time between tokens", series: percentiles(points, "inter_token"), format: seconds },
  { title: "Generates", series: [["running", points.running], ["waiting", points.waiting], ["in one step", points.batch]], format: count },
  { title: "Time in the queue", series: percentiles(points, "queue"), format: seconds },
  {
    title: "Where a step's time goes",
    series: Object.entries(PARTS).map(([part, name]) => [name, points[`${part}_share`]]),
    format: share,
    bands: true,
  },
  { title: "Drafts accepted", series: [["of draft tokens", points.acceptance]], format: share, most: 1 },
];

const tile = (name, value, more) =>
  `<div class="card tile"><span>${escape(name)}</span><b>${escape(value)}</b><small>${escape(more)}</small></div>`;

function tiles({ points, sessions }) {
  const now = (name) => latest(points[name]?.slice(-1));
  const open = sessions.reduce((sum, entry) => sum + entry.count, 0);
  const shares = ["plan", "draft", "settle"].map((part) => now(`${part}_share`));
  const outside = shares.includes(null) ? null : shares.reduce((sum, part) => sum + part, 0);
  return [
    tile("Tokens per second", count(now("tokens_per_second")), `prefill ${count(now("prefilled_per_second"))}`),
    tile("Sessions", count(open), `${count(now("running"))} generating, ${count(now("waiting"))} waiting`),
    tile("First token, p95", seconds(now("first_token_p95")), `p50 ${seconds(now("first_token_p50"))}`),
    tile("Between tokens, p95", seconds(now("inter_token_p95")), `p50 ${seconds(now("inter_token_p50"))}`),
    tile("Drafts accepted", share(now("acceptance")), "of draft tokens verified"),
    tile("Outside the model", share(outside), `engine busy ${share(now("busy"))}`),
  ].join("");
}

function memory({ bytes: held }) {
  const kinds = Object.keys({ ...KINDS, ...held.kinds })
    .map((kind, index) => [KINDS[kind] ?? kind, held.kinds[kind] ?? 0, Math.min(index, 7)]);
  const bars = [bar("On the device", kinds, held.reserved, held.capacity)];
  if (held.tier_reserved) bars.push(bar("Second tier", [["entries and latents", held.tier, 0]], held.tier_reserved, held.tier_capacity));
  return bars.map((html) => `<div class="card">${html}</div>`).join("");
}

function tables({ sessions, ended, errors, evicted }) {
  const { heads, rows } = sessionRows(sessions, STATES);
  return [
    table("Sessions", heads, rows),
    table("Generates that ended", ["how", "since the start"], Object.entries(ended)),
    table("Errors returned to clients", ["reason", "since the start"], Object.entries(errors)),
    table("Sessions that lost their K/V", ["cause", "since the start"], Object.entries(evicted)),
  ].map((html) => `<div class="card">${html}</div>`).join("");
}

function say(kind, text) {
  const status = place("status");
  if (status.textContent !== text) status.textContent = text;
  status.className = kind;
}

function drawCharts() {
  const ago = `${Math.round((SLOTS * data.sample_seconds) / 60)} min ago`;
  const cards = place("charts");
  specs(data).forEach((spec, index) => {
    const card = cards.children[index] ?? cards.appendChild(Object.assign(document.createElement("div"), { className: "card" }));
    card.innerHTML = chart(spec, SLOTS, ago, looked);
  });
}

function draw() {
  const { server, uptime_seconds: uptime } = data;
  place("server").textContent =
    `${server.model} in ${server.dtype} on ${server.device} · ${server.mode} · version ${server.version} · up ${duration(uptime)}`;
  const silent = data.beat_age_seconds;
  if (silent > STALL_SECONDS) say("stalled", `the engine stands still, ${duration(silent)}`);
  else say(...(data.draining ? ["draining", "draining"] : ["serving", "serving"]));
  place("tiles").innerHTML = tiles(data);
  place("memory").innerHTML = memory(data);
  drawCharts();
  place("tables").innerHTML = tables(data);
  place("method").textContent =
    `Rates, shares and percentiles are over the last ${data.window_seconds} s. A step's time outside the model is planning, drafting and settling.`;
  document.documentElement.dataset.drawn = data.now;
}

async function look() {
  if (!document.hidden) {
    try {
      const answer = await fetch("/dashboard/data", { cache: "no-store" });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      data = await answer.json();
      draw();
    } catch (error) {
      say("silent", "no answer from the server");
      console.warn(error);
    }
  }
  setTimeout(look, (data?.sample_seconds ?? 2) * 1000);
}

// All charts show the same moment while the pointer is over one of them.
place("charts").addEventListener("pointermove", (event) => {
  const svg = event.target.closest("svg[role=img]");
  if (!svg || !data) return;
  const box = svg.getBoundingClientRect();
  looked = pointAt((event.clientX - box.left) / box.width, data.points.at?.length ?? 0, SLOTS);
  drawCharts();
});
place("charts").addEventListener("pointerleave", () => {
  looked = null;
  if (data) drawCharts();
});

look();
