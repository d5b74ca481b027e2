// The parts of every chart: elements, scales, axes, a tip for the point at hand, a table.

const SVG = 'http://www.w3.org/2000/svg';

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const html = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// Numbers as text.
const count = (value) => value.toLocaleString('en-US', { maximumFractionDigits: 0 });
const fixed = (value, digits) => value.toLocaleString('en-US', {
  minimumFractionDigits: digits, maximumFractionDigits: digits,
});
const microseconds = (value) => fixed(value, value < 1000 ? 1 : 0);
const significant = (value) => value.toLocaleString('en-US', { maximumSignificantDigits: 3 });
const ratio = (value) => fixed(value, 2);
const orDash = (value, format) => (value === null || value === undefined ? '–' : format(value));

const distinct = (values) => [...new Set(values)];
const ascending = (values) => distinct(values).sort((a, b) => a - b);

// Items with the same key, in order of appearance: [[key, items], ...].
function groups(items, key) {
  const all = new Map();
  for (const item of items) {
    const at = key(item);
    if (!all.has(at)) all.set(at, []);
    all.get(at).push(item);
  }
  return [...all];
}

function logScale(low, high, from, to) {
  const span = Math.log(high / low) || 1;
  const scale = (value) => from + (to - from) * Math.log(value / low) / span;
  return Object.assign(scale, { low, high });
}

// Labels beside an axis have room for six characters.
const axisCount = (value) =>
  value >= 1e6 ? `${count(value / 1e6)}M` : value >= 1e5 ? `${count(value / 1e3)}k` : count(value);

// At most `most` round numbers: every digit, 1-2-5, decades, or every second decade and so on.
function logTicks(low, high, most) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const within = (digits, step) => {
    const ticks = [];
    for (let decade = first; decade <= last; ++decade) {
      if ((decade - first) % step !== 0) continue;
      for (const digit of digits) {
        const value = digit * 10 ** decade;
        if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
      }
    }
    return ticks;
  };
  for (const digits of [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5]]) {
    const ticks = within(digits, 1);
    if (ticks.length <= most) return ticks;
  }
  for (let step = 1; ; ++step) {
    const ticks = within([1], step);
    if (ticks.length <= most) return ticks;
  }
}

function linearTicks(low, high, most) {
  const rough = (high - low) / most;
  const decade = 10 ** Math.floor(Math.log10(rough));
  const step = decade * [1, 2, 5, 10].find((digit) => digit * decade >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high * (1 + 1e-9); ++i) ticks.push(i * step);
  return ticks;
}

// Charts of a whole row's width have other layouts where a window is as narrow as a telephone.
const kNarrow = matchMedia('(max-width: 559px)');
const wideOrNarrow = (wide, narrow) => (kNarrow.matches ? narrow : wide);

const kLabelCharacter = 7;  // px of a digit at the charts' 11 px, in a wide font

// Returns the values whose labels have room, the largest first.
function roomy(values, scale, format) {
  const kept = [];
  let left = Infinity;
  for (const value of [...values].sort((a, b) => b - a)) {
    const half = format(value).length * kLabelCharacter / 2;
    if (scale(value) + half + 4 > left) continue;
    kept.push(value);
    left = scale(value) - half;
  }
  return kept;
}

// A chart's paper: grid, axes with their ticks and names. `x` and `y`: {scale, ticks, format, name}.
function frame(width, height, margin, x, y) {
  const chart = svg('svg', {
    class: 'chart', viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: 'img',
  });
  const bottom = height - margin.bottom;
  const right = width - margin.right;
  for (const value of y.ticks) {
    const at = y.scale(value);
    chart.append(
      svg('line', { class: 'grid', x1: margin.left, x2: right, y1: at, y2: at }),
      svg('text', { class: 'dim', x: margin.left - 6, y: at + 4, 'text-anchor': 'end' },
        y.format(value)));
  }
  for (const value of x.ticks) {
    const at = x.scale(value);
    chart.append(svg('line', { class: 'grid', x1: at, x2: at, y1: margin.top, y2: bottom }));
  }
  for (const value of roomy(x.ticks, x.scale, x.format)) {
    chart.append(svg('text',
      { class: 'dim', x: x.scale(value), y: bottom + 15, 'text-anchor': 'middle' },
      x.format(value)));
  }
  const middle = (margin.top + bottom) / 2;
  chart.append(
    svg('line', { class: 'axis', x1: margin.left, x2: right, y1: bottom, y2: bottom }),
    svg('line', { class: 'axis', x1: margin.left, x2: margin.left, y1: margin.top, y2: bottom }),
    svg('text', { x: (margin.left + right) / 2, y: height - 4, 'text-anchor': 'middle' }, x.name),
    svg('text', { x: 11, y: middle, 'text-anchor': 'middle', transform: `rotate(-90 11 ${middle})` },
      y.name));
  return chart;
}

const tip = document.getElementById('tip');

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 16 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 16}px`;
}
const hideTip = () => { tip.hidden = true; };

// Tells of the point under the pointer; with the chart in focus, arrow keys go through all points.
// `points`: [{x, y, text}] in the chart's own units.
function explain(chart, points) {
  const ring = svg('circle', { class: 'here', r: 7, visibility: 'hidden' });
  chart.append(ring);
  let current = -1;
  const show = (index, at) => {
    current = index;
    const point = points[index];
    ring.setAttribute('cx', point.x);
    ring.setAttribute('cy', point.y);
    ring.setAttribute('visibility', 'visible');
    const box = ring.getBoundingClientRect();
    showTip(point.text, ...(at || [box.right, box.bottom]));
  };
  const hide = () => {
    current = -1;
    ring.setAttribute('visibility', 'hidden');
    hideTip();
  };
  chart.addEventListener('pointermove', (event) => {
    const matrix = chart.getScreenCTM().inverse();
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix);
    let nearest = -1;
    let least = 28;
    points.forEach((point, index) => {
      const distance = Math.hypot(point.x - at.x, point.y - at.y);
      if (distance < least) [nearest, least] = [index, distance];
    });
    if (nearest < 0) hide(); else show(nearest, [event.clientX, event.clientY]);
  });
  chart.addEventListener('focus', () => {
    if (points.length > 0 && chart.matches(':focus-visible')) show(0);
  });
  chart.addEventListener('pointerleave', hide);
  chart.addEventListener('blur', hide);
  chart.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === 'Escape') hide();
    if (!step || points.length === 0) return;
    event.preventDefault();
    const from = current < 0 && step < 0 ? 0 : current;
    show((from + step + points.length) % points.length);
  });
}

// `columns`: [[name, of an item the text], ...]; the first is the row's name.
function numbers(columns, items) {
  const cells = (item) => columns.map(([, text], i) =>
    html(i === 0 ? 'th' : 'td', i === 0 ? { scope: 'row' } : { class: 'number' }, text(item)));
  return html('details', {},
    html('summary', {}, 'Numbers'),
    html('div', { class: 'scroll' },
      html('table', {},
        html('thead', {}, html('tr', {}, ...columns.map(([name], i) =>
          html('th', { scope: 'col', class: i === 0 ? '' : 'number' }, name)))),
        html('tbody', {}, ...items.map((item) => html('tr', {}, ...cells(item)))))));
}

function figure(title, note, chart, table, legend = '') {
  chart.setAttribute('aria-label', `${title}. ${note}. The numbers are in the table that follows.`);
  return html('figure', {}, html('figcaption', {}, title, html('small', {}, note)), legend, chart, table);
}

// `entries`: [[a drawing or swatch, its name], ...].
const legend = (entries) =>
  html('ul', { class: 'legend' }, ...entries.map((entry) => html('li', {}, ...entry)));
