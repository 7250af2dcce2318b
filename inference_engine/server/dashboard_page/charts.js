// Numbers as text, and charts as SVG text. Pure functions: nothing here touches a page.

const WIDTH = 560, HEIGHT = 150, LEFT = 52, RIGHT = 6, TOP = 10, BOTTOM = 22;

const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
export const escape = (text) => String(text).replace(/[&<>"']/g, (character) => ENTITIES[character]);

const NONE = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function count(value) {
  if (!known(value)) return NONE;
  if (value > 0 && value < 10 && !Number.isInteger(value)) return value.toFixed(1);
  return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

export function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  while (value >= 999.5 && step < units.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${step && value < 99.95 ? Number(value.toPrecision(3)) : Math.round(value)} ${units[step]}`;
}

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value >= 1) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  const thousandths = value * 1000;
  return `${thousandths < 10 && thousandths > 0 ? thousandths.toFixed(1) : Math.round(thousandths)} ms`;
}

export function share(value) {
  if (!known(value)) return NONE;
  if (value > 0 && value < 0.001) return "< 0.1 %";
  return `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

export function duration(value) {
  const minutes = Math.floor(value / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (!minutes) return `${Math.round(value)} s`;
  if (!hours) return `${minutes} min`;
  return days ? `${days} d ${hours % 24} h` : `${hours} h ${minutes % 60} min`;
}

// The end of an axis, not below `value`: a number whose half is a round one, too.
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value * (1 - 1e-9));
}

export const latest = (values) => (values ?? []).findLast(known) ?? null;
const largest = (values) => values.filter(known).reduce((most, value) => Math.max(most, value), 0);

// Where the value of each point lies: the last point at the right edge, room for `slots` of them.
const placed = (index, length, slots) => LEFT + ((slots - length + index) / (slots - 1)) * (WIDTH - LEFT - RIGHT);
const height = (value, most) => TOP + (1 - value / most) * (HEIGHT - TOP - BOTTOM);

// A line through what is known; it is interrupted where nothing is.
export function linePath(values, most, slots) {
  let path = "", isDown = false;
  values.forEach((value, index) => {
    if (!known(value)) {
      isDown = false;
      return;
    }
    const x = placed(index, values.length, slots).toFixed(1), y = height(Math.min(value, most), most).toFixed(1);
    // A point between two gaps is a line of no length, which round caps show as a dot.
    path += isDown ? `L${x} ${y}` : `M${x} ${y}h0`;
    isDown = true;
  });
  return path;
}

// Bands of shares, one upon the other; interrupted where one of them is not known.
export function bandPaths(series, slots) {
  const length = series[0]?.length ?? 0, paths = series.map(() => "");
  let from = 0;
  while (from < length) {
    const isKnown = (index) => series.every((values) => known(values[index]));
    if (!isKnown(from)) {
      from += 1;
      continue;
    }
    let to = from;
    while (to < length && isKnown(to)) to += 1;
    const floor = new Array(to - from).fill(0);
    series.forEach((values, which) => {
      const up = [], down = [];
      for (let index = from; index < to; index += 1) {
        const x = placed(index, length, slots).toFixed(1);
        down.unshift(`${x} ${height(floor[index - from], 1).toFixed(1)}`);
        floor[index - from] += values[index];
        up.push(`${x} ${height(Math.min(1, floor[index - from]), 1).toFixed(1)}`);
      }
      paths[which] += `M${up.join("L")}L${down.join("L")}Z`;
    });
    from = to;
  }
  return paths;
}

// The point under a place `fraction` of the width from the left; null if there is none.
export function pointAt(fraction, length, slots) {
  const index = Math.round(((fraction * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT)) * (slots - 1)) - (slots - length);
  return index >= 0 && index < length ? index : null;
}

const swatch = (index, isBand) =>
  `<svg viewBox="0 0 18 10" aria-hidden="true">${
    isBand ? `<rect width="18" height="10" rx="2" class="f${index}"/>` : `<path d="M1 5h16" class="s l${index} d${index}"/>`
  }</svg>`;

// A chart with its title and legend. spec: {title, series: [[name, values]], format, bands, most}; at: a point looked at.
export function chart(spec, slots, ago, at = null) {
  const { title, series, format, bands = false } = spec;
  const lists = series.map(([, values]) => values ?? []);
  const most = bands ? 1 : (spec.most ?? ceiling(largest(lists.flat())));
  const look = at !== null && at < (lists[0]?.length ?? 0) ? at : null;
  const shown = lists.map((values) => (look === null ? latest(values) : values[look]));
  const legend = series
    .map(([name], index) => `<li>${swatch(index, bands)}${escape(name)} <b>${escape(format(shown[index]))}</b></li>`)
    .join("");
  const lines = [0, 0.5, 1].map((part) => {
    const y = height(part * most, most);
    return `<path class="grid" d="M${LEFT} ${y}H${WIDTH - RIGHT}"/>` +
      `<text x="${LEFT - 8}" y="${y + 4}" text-anchor="end">${escape(format(part * most))}</text>`;
  });
  const drawn = bands
    ? bandPaths(lists, slots).map((path, index) => `<path class="area f${index}" d="${path}"/>`)
    : lists.map((values, index) => `<path class="s l${index} d${index}" d="${linePath(values, most, slots)}"/>`);
  const x = look === null ? 0 : placed(look, lists[0].length, slots);
  const described = series.map(([name], index) =>
    `${name} ${format(latest(lists[index]))}${bands ? "" : `, highest ${format(known(latest(lists[index])) ? largest(lists[index]) : null)}`}`);
  return `<h3>${escape(title)}</h3><ul class="legend">${legend}</ul>` +
    `<svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="${escape(`${title}. Now: ${described.join("; ")}`)}">` +
    lines.join("") + drawn.join("") +
    (look === null ? "" : `<path class="at" d="M${x.toFixed(1)} ${TOP}V${HEIGHT - BOTTOM}"/>`) +
    `<text x="${LEFT}" y="${HEIGHT - 5}">${escape(ago)}</text>` +
    `<text x="${WIDTH - RIGHT}" y="${HEIGHT - 5}" text-anchor="end">now</text></svg>`;
}

// Bytes held, by kind, in front of what is reserved, in front of what there is.
export function bar(title, kinds, reserved, capacity) {
  const held = kinds.filter(([, value]) => value > 0), scale = capacity > 0 ? 1000 / capacity : 0;
  let x = 0;
  const parts = held.map(([, value, index]) => {
    const width = Math.min(1000 - x, value * scale), rect = `<rect class="f${index}" x="${x.toFixed(2)}" width="${width.toFixed(2)}" height="24"/>`;
    x += width;
    return rect;
  });
  const total = held.reduce((sum, [, value]) => sum + value, 0);
  const legend = held.map(([name, value, index]) => `<li>${swatch(index, true)}${escape(name)} <b>${bytes(value)}</b></li>`);
  const words = `held ${bytes(total)}, reserved ${bytes(reserved)}, of ${bytes(capacity)}`;
  return `<h3>${escape(title)}</h3><ul class="legend">${legend.join("")}<li class="free">${words}</li></ul>` +
    `<svg viewBox="0 0 1000 24" preserveAspectRatio="none" class="bar" role="img" aria-label="${escape(`${title}: ${words}`)}">` +
    `<rect class="empty" width="1000" height="24"/><rect class="reserved" width="${Math.min(1000, reserved * scale).toFixed(2)}" height="24"/>` +
    `${parts.join("")}</svg>`;
}

export function table(caption, heads, rows) {
  if (!rows.length) return `<table><caption>${escape(caption)}</caption><tbody><tr><td class="none">none</td></tr></tbody></table>`;
  const head = heads.map((name) => `<th scope="col">${escape(name)}</th>`).join("");
  const body = rows.map(([name, ...cells]) =>
    `<tr><th scope="row">${escape(name)}</th>${cells.map((cell) => `<td>${cell ? count(cell) : `<span class="none">${NONE}</span>`}</td>`).join("")}</tr>`);
  return `<table><caption>${escape(caption)}</caption><thead><tr>${head}</tr></thead><tbody>${body.join("")}</tbody></table>`;
}

// One row a strategy, one column a state that some session is in, and a sum.
export function sessionRows(sessions, states) {
  const used = states.filter((state) => sessions.some((entry) => entry.state === state));
  const strategies = [...new Set(sessions.map((entry) => entry.strategy))];
  const number = (strategy, state) => sessions
    .filter((entry) => entry.strategy === strategy && (state === null || entry.state === state))
    .reduce((sum, entry) => sum + entry.count, 0);
  return {
    heads: ["strategy", ...used, "all"],
    rows: strategies.map((strategy) => [strategy, ...used.map((state) => number(strategy, state)), number(strategy, null)]),
  };
}
