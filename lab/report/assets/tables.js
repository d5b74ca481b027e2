// Rows of suites and scripts that have no charts of their own: lines over one field, or bars, and all
// fields in a table.

// What is drawn of a suite. `x`: the field of the axis, whose values stand side by side; without one, bars.
// `y`: fields or [name, function of a row]; `series`: fields whose values tell lines apart.
const overBest = ['chosen / best', (row) => row.chosen_us / row.exhaustive_us];
const kDrawn = {
  grouped: { x: 'rows_per_expert', y: ['median_us'], series: ['implementation', 'layout', 'beta', 'activation'], panel: ['experts', 'n', 'k', 'dtype'] },
  exchange: { x: 'tokens_per_rank', y: ['median_us', 'rival_us', 'floor_us'], series: [], panel: ['stage', 'dtype', 'ranks', 'hidden', 'experts', 'top_k', 'pre_sum'] },
  hosts: { x: 'tokens_per_rank', y: ['median_us', 'model_us'], series: [], panel: ['engine', 'stage', 'link', 'hosts', 'ranks', 'hidden', 'experts', 'top_k'] },
  late: { x: 'late_us', y: ['after_start_us'], series: ['policy'], panel: ['engine', 'model', 'dtype', 'ranks', 'tokens_per_rank', 'jitter'] },
  ramp: { x: 'tokens_per_rank', y: [overBest], series: ['beta'], panel: ['kernel', 'generator', 'model'] },
  ramp_regions: { y: ['measured_ratio'], label: ['model', 'prediction', 'predicted'], panel: ['kernel', 'generator'] },
  sonic_moe: { x: 'tokens_per_rank', y: ['median_us', 'rival_us'], series: [], panel: ['model', 'dtype', 'gate'] },
  deepgemm: { x: 'tokens_per_rank', y: ['in_a_row_us', 'cold_us'], series: [], panel: ['model', 'compute'] },
  stragglers: { x: 'jitter_us', y: ['median_us', 'p95_us'], series: ['way'], panel: ['ranks', 'experts', 'tokens_per_rank'] },
  python_gpu: { x: 'tokens_per_rank', y: ['median_us', 'bench_us'], series: [], panel: ['model', 'dtype'] },
  transformers: { x: 'batch', y: ['ttft_ms', 'tpot_ms', 'step_ms'], series: ['implementation', 'graph'], panel: ['model', 'dtype', 'prompt'] },
  engines: { x: 'batch', y: ['tpot_ms'], series: ['backend'], panel: ['engine', 'version', 'topology', 'model', 'dtype'] },
  'engines, first token': { x: 'prompt', y: ['ttft_ms'], series: ['backend'], panel: ['engine', 'version', 'topology', 'model', 'dtype'] },
  four_bit_rivals: { x: 'tokens', y: ['median_us'], series: ['rival', 'version'], panel: ['model', 'weights', 'tokens_in'] },
  ranks_rivals: { x: 'tokens_per_rank', y: ['rival_us'], series: ['rival'], panel: ['model', 'dtype', 'ranks'] },
  thesis_memory: { x: 'tokens_per_rank', y: ['heap_reserved_bytes', 'workspace_bytes'], series: ['experts'], panel: ['model', 'ranks', 'backend'] },
  thesis_utilisation: { y: ['active', 'busy'], label: ['unit', 'experts', 'tokens_per_rank'], panel: ['model', 'ranks'] },
  failures: { y: ['until_named_us'], label: ['kind', 'trials', 'first_seed'], panel: ['deadline_ms'] },
  cpu_bench: { y: ['real_time'], label: ['run_name'], panel: ['time_unit'], only: (row) => row.aggregate_name === 'median' },
};
const kTold = ['suite', 'machine', 'commit', 'command', 'date'];

const plain = (name) => name.replace(/_us$/, ' µs').replace(/_ms$/, ' ms').replaceAll('_', ' ');
const valueOf = (y) => (typeof y === 'string' ? (row) => row[y] : y[1]);
const nameOf = (y) => (typeof y === 'string' ? plain(y) : y[0]);
const shown = (value) => (value === undefined ? '–' : typeof value === 'number' ? significant(value) : String(value));
// "model olmoe, 4 ranks": those of the fields that the rows have.
const described = (row, fields) => fields.filter((field) => row[field] !== undefined)
  .map((field) => (typeof row[field] === 'string' ? row[field] : `${plain(field)} ${row[field]}`)).join(', ');

// Only what differs between rows has to be a column or a word.
const varying = (rows, fields) => fields.filter((field) => distinct(rows.map((row) => row[field])).length > 1);

function allFields(rows) {
  const fields = distinct(rows.flatMap(Object.keys)).filter((field) => !kTold.includes(field));
  const first = fields.filter((field) => rows.some((row) => typeof row[field] === 'string'));
  return [...first, ...fields.filter((field) => !first.includes(field))]
    .map((field) => [plain(field), (row) => shown(row[field])]);
}

// One chart of lines: {points: [[x, y, row]], name} in `lines`; positions on the axis are those of the values.
function linesChart(lines, xs, xName, yName) {
  const { width, height, margin } = kPanel;
  const values = lines.flatMap(({ points }) => points.map(([, value]) => value));
  const range = [Math.min(...values) / 1.25, Math.max(...values) * 1.25];
  const step = (width - margin.left - margin.right - 20) / Math.max(xs.length - 1, 1);
  const x = (value) => margin.left + 10 + (xs.length === 1 ? step / 2 : xs.indexOf(value) * step);
  const y = logScale(...range, height - margin.bottom, margin.top);
  const wide = range[1] / range[0] > 6;
  const chart = frame(width, height, margin, { scale: x, ticks: xs, format: axisCount, name: xName },
    { scale: y, ticks: wide ? logTicks(...range, 6) : linearTicks(...range, 6), format: (value) => (value >= 1000 ? axisCount(value) : significant(value)), name: yName });
  const marks = [];
  lines.forEach(({ name, points }, i) => {
    const at = points.map(([value, result]) => [x(value), y(result)]);
    const line = polyline('series', at);
    line.setAttribute('stroke', kColours[i % kColours.length]);
    chart.append(line, ...at.map(([cx, cy]) => svg('path', {
      d: kShapes[i % kShapes.length], transform: `translate(${cx.toFixed(1)} ${cy.toFixed(1)}) scale(0.75)`, fill: kColours[i % kColours.length],
    })));
    points.forEach(([value, result], k) => marks.push({
      x: at[k][0], y: at[k][1], text: `${name}\n${xName} ${value}: ${yName} ${significant(result)}`,
    }));
  });
  explain(chart, marks);
  return chart;
}

function linesFigure(rows, spec, title) {
  const lines = spec.y.flatMap((y) => groups(rows, (row) => described(row, spec.series)).map(([series, of]) => ({
    name: [spec.y.length > 1 || !series ? nameOf(y) : '', series].filter((text) => text).join(', '),
    points: of.map((row) => [row[spec.x], valueOf(y)(row)]).filter(([at, value]) => at !== undefined && value > 0)
      .sort(([a], [b]) => a - b),
  }))).filter(({ points }) => points.length > 0);
  if (lines.length === 0) return null;
  const xs = ascending(lines.flatMap(({ points }) => points.map(([at]) => at)));
  const sample = (i) => svg('svg', { width: 14, height: 14, 'aria-hidden': true },
    svg('path', { d: kShapes[i % kShapes.length], transform: 'translate(7 7)', fill: kColours[i % kColours.length] }));
  const yName = spec.y.length === 1 ? nameOf(spec.y[0]) : `time (${distinct(spec.y.map((y) => nameOf(y).split(' ').at(-1))).join(', ')})`;
  return figure(title, `${plain(spec.x)} side by side`, linesChart(lines, xs, plain(spec.x), yName), numbers(allFields(rows), rows),
    legend(lines.map(({ name }, i) => [sample(i), name])));
}

// Bars of one panel: a value below each label.
function barsFigure(rows, y, label, title) {
  const of = rows.filter((row) => valueOf(y)(row) > 0);
  if (of.length === 0) return null;
  const { width } = kPanel;
  const left = 6, right = 60, rowHeight = 30;
  const most = Math.max(...of.map(valueOf(y)));
  const height = of.length * rowHeight + 8;
  const chart = svg('svg', { class: 'chart', viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: 'img' });
  const marks = of.map((row, i) => {
    const value = valueOf(y)(row), top = i * rowHeight, wide = (width - left - right) * value / most;
    const words = described(row, label);
    chart.append(
      svg('text', { class: 'dim', x: left, y: top + 11 }, words.length > 44 ? `${words.slice(0, 43)}…` : words),
      svg('rect', { class: 'bar', x: left, y: top + 15, width: wide.toFixed(1), height: 10 }),
      svg('text', { x: left + wide + 5, y: top + 24 }, significant(value)));
    return { x: left + wide, y: top + 20, text: `${words}: ${nameOf(y)} ${significant(value)}` };
  });
  explain(chart, marks);
  return figure(title, nameOf(y), chart, numbers(allFields(of), of));
}

const kMostBars = 40;

function tableSuite(suite, all) {
  const spec = kDrawn[suite];
  const rows = spec?.only && all.some(spec.only) ? all.filter(spec.only) : all;
  const nodes = [html('h3', {}, suite)];
  const figures = [];
  if (spec) {
    const panel = [...spec.panel, 'machine'];
    const named = varying(rows, panel);
    for (const [, of] of groups(rows, (row) => JSON.stringify(panel.map((field) => row[field])))) {
      const title = described(of[0], named) || suite;
      if (spec.x) figures.push(linesFigure(of, spec, title));
      else spec.y.forEach((y) => figures.push(barsFigure(of.slice(0, kMostBars), y, spec.label, title)));
    }
  }
  const drawn = figures.filter((one) => one);
  if (drawn.length > 0) nodes.push(html('div', { class: 'panels' }, ...drawn));
  else nodes.push(numbers(allFields(rows), rows));
  return nodes;
}

function tableSection(table) {
  const id = `table-${table.file}`;
  const told = (field) => distinct(table.rows.map((row) => row[field]).filter((text) => text !== undefined));
  const parts = [['', 'machine'], ['commit ', 'commit'], ['', 'command']].flatMap(([before, field]) => {
    const values = told(field);
    return values.length === 0 ? [] : [before + values.slice(0, 4).join(', ') + (values.length > 4 ? `, and ${values.length - 4} more` : '')];
  });
  const nodes = [html('h2', { id }, table.file), html('p', { class: 'note origin' }, parts.join('; '))];
  const nameOfSuite = (row) => row.suite ?? table.file.replace(/\.json$/, '');
  // Rows of rivals over ranks carry the names of our suites. Engines' rows have one of two times.
  const drawnAs = (row) => {
    const suite = nameOfSuite(row);
    if (suite.startsWith('ep_') && row.rival) return 'ranks_rivals';
    return suite === 'engines' && row.ttft_ms !== undefined ? 'engines, first token' : suite;
  };
  for (const [suite, of] of groups(table.rows, drawnAs)) nodes.push(...tableSuite(suite, of));
  return html('section', { 'aria-labelledby': id }, ...nodes);
}
