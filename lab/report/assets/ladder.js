// The all-to-all problem rung by rung: a bar for each rung, of the slowest rank's stages, and a dot
// for each rank.

const slowestOf = (row) => row.rank_us.indexOf(Math.max(...row.rank_us));
const ofGpus = ({ gpus }) => (gpus === null ? 'CPU' : gpus === 1 ? '1 GPU' : `${gpus} GPUs`);

function rungText(ladder, row) {
  const slowest = slowestOf(row);
  const lines = [`${row.rung}: ${microseconds(row.median_us)} µs (p10 ${microseconds(row.p10_us)}, p90 ${microseconds(row.p90_us)})`];
  ladder.stages.forEach((name, s) => {
    if (row.stage_us[s].length > 0) lines.push(`${name} ${microseconds(row.stage_us[s][slowest])} µs`);
  });
  lines.push(`of rank ${slowest}, the slowest; ranks ${microseconds(Math.min(...row.rank_us))} to ${microseconds(Math.max(...row.rank_us))} µs`);
  if (row.receive_imbalance !== null) lines.push(`most rows of a receiving block over the mean: ${ratio(row.receive_imbalance)}`);
  return lines.join('\n');
}

// A row of the chart for each item of `bars`: {name, parts: [µs, ...], dots: [µs, ...], end, text}.
function barChart(bars, floor) {
  const width = wideOrNarrow(620, 330), rowHeight = 26;
  const margin = { left: wideOrNarrow(128, 118), right: 56, top: 6, bottom: 40 };
  const height = margin.top + bars.length * rowHeight + margin.bottom;
  const most = Math.max(...bars.flatMap(({ parts, dots, end }) =>
    [parts.reduce((sum, part) => sum + part, 0), end, ...dots]), floor ?? 0);
  const x = (value) => margin.left + (width - margin.left - margin.right) * value / most;
  const y = (i) => margin.top + (i + 0.5) * rowHeight;
  const chart = frame(width, height, margin,
    { scale: x, ticks: linearTicks(0, most, wideOrNarrow(6, 3)), format: count, name: 'µs' },
    { scale: y, ticks: [], format: String, name: '' });
  const marks = [];
  bars.forEach(({ name, parts, dots, end, text }, i) => {
    chart.append(svg('text', { x: margin.left - 8, y: y(i) + 4, 'text-anchor': 'end' }, name));
    let begin = 0;
    parts.forEach((part, s) => {
      chart.append(svg('rect', {
        x: x(begin).toFixed(1), y: y(i) - 9, width: (x(begin + part) - x(begin)).toFixed(1), height: 14,
        fill: kColours[s % kColours.length],
      }));
      begin += part;
    });
    for (const dot of dots) {
      chart.append(svg('circle', { cx: x(dot).toFixed(1), cy: y(i) + 9, r: 2.2, fill: 'var(--ink)', 'fill-opacity': 0.7 }));
    }
    chart.append(svg('text', { x: x(Math.max(begin, end)) + 6, y: y(i) + 3 }, microseconds(end)));
    marks.push({ x: x(end), y: y(i), text });
  });
  if (floor !== null) {
    chart.append(svg('line', {
      class: 'floor', x1: x(floor), x2: x(floor), y1: margin.top, y2: height - margin.bottom,
    }));
  }
  explain(chart, marks);
  return chart;
}

const stageLegend = (names) => legend(names.map((name, s) => [
  svg('svg', { width: 14, height: 14, 'aria-hidden': true },
    svg('rect', { x: 1, y: 1, width: 12, height: 12, fill: kColours[s % kColours.length] })), name]));

function caseFigure(ladder, problem, rows) {
  const bars = rows.map((row) => ({
    name: row.rung,
    parts: row.stage_us.map((times) => times[slowestOf(row)] ?? 0),
    dots: row.rank_us, end: row.median_us, text: rungText(ladder, row),
  }));
  const { floor_us: floor } = rows[0];
  const columns = [
    ['rung', (row) => row.rung], ['µs', (row) => microseconds(row.median_us)],
    ['p10', (row) => microseconds(row.p10_us)], ['p90', (row) => microseconds(row.p90_us)],
    ['time / F', (row) => orDash(row.floor_us, (us) => ratio(row.median_us / us))],
    ...ladder.stages.map((name, s) => [name, (row) => orDash(row.stage_us[s][slowestOf(row)], microseconds)]),
    ['fastest rank', (row) => microseconds(Math.min(...row.rank_us))],
    ['slowest rank', (row) => microseconds(Math.max(...row.rank_us))],
    ['uneven', (row) => orDash(row.receive_imbalance, ratio)], ['blocks', (row) => row.blocks],
  ];
  return figure(problem,
    `Bars are the slowest rank’s stages, dots are ranks${floor === null ? '' : `; the line is the floor, ${microseconds(floor)} µs`}`,
    barChart(bars, floor), numbers(columns, rows), stageLegend(ladder.stages));
}

function meansFigure(rows) {
  const means = groups(rows, ({ rung }) => rung).map(([rung, of]) => ({
    rung, cases: of.length, us: geometricMean(of.map((row) => row.median_us)),
  }));
  const bars = means.map(({ rung, cases, us }) => ({
    name: rung, parts: [us], dots: [], end: us,
    text: `${rung}: ${microseconds(us)} µs, geometric mean of ${cases} cases`,
  }));
  const columns = [['rung', ({ rung }) => rung], ['cases', ({ cases }) => String(cases)],
    ['µs', ({ us }) => microseconds(us)], ['speed-up over the first', ({ us }) => `${ratio(means[0].us / us)}×`]];
  return figure('All cases', 'Geometric mean of the cases’ medians', barChart(bars, null), numbers(columns, means));
}

function ladderSection(ladder) {
  const id = `ladder-${ladder.file}`;
  const { rows } = ladder;
  const nodes = [html('h2', { id }, 'The all-to-all problem, rung by rung'),
    html('p', { class: 'note' }, `${ladder.file}: ${distinct(rows.map((row) => row.machine)).join(' and ')}; ` +
      `commit ${distinct(rows.map((row) => row.commit)).join(', ')}; ${distinct(rows.map((row) => row.command)).join(', ')}. ` +
      'Each rung takes one step more than the rung above it; NAME_alone takes that step alone.')];
  const key = (row) => `${row.ranks} ranks on ${ofGpus(row)}${row.stand_in === 'random' ? ', experts multiply by random weights' : ''}`;
  for (const [name, of] of groups(rows, key)) {
    nodes.push(html('h3', {}, name), html('div', { class: 'pair' }, meansFigure(of),
      ...groups(of, (row) => row.case).map(([problem, ofCase]) => caseFigure(ladder, problem, ofCase))));
  }
  return html('section', { 'aria-labelledby': id }, ...nodes);
}
