// The charts of a suite's rows.

const sizes = (row) =>
  `H ${row.hidden}, I ${row.intermediate}, ${row.experts} experts, top-${row.top_k}`;
const types = (row) =>
  (row.dtype === row.compute ? row.dtype : `${row.dtype} computed in ${row.compute}`);
const cardOf = (row) => row.card.replace(/^NVIDIA /, '');
const ranksText = (ranks) => (ranks === 1 ? '1 rank' : `${ranks} ranks`);

const overFloor = (row) => (row.floor_us === null ? null : row.median_us / row.floor_us);
const flopPerByte = (row) => row.flops / row.touched_bytes;
const teraflops = (row) => row.flops / row.median_us * 1e-6;
const onRoofline = (row) => row.flops > 0 && row.touched_bytes > 0;

// Gives every row of a suite the name of its layer, no longer than tells layers apart, and of its
// variant: what else differs between points of the same tokens.
function nameRows(rows) {
  const kinds = [
    (row) => row.model,
    (row) => `${row.model}, ${row.experts} experts`,
    (row) => `${row.model}, ${sizes(row)}`,
    (row) => `${row.model}, ${sizes(row)}, ${types(row)}`,
  ];
  const layers = distinct(rows.map(kinds.at(-1))).length;
  const name = kinds.find((kind) => distinct(rows.map(kind)).length === layers);
  const differs = (of) => distinct(rows.map(of)).length > 1;
  const [betas, ranks, routings, cards] = [
    differs((row) => row.beta), differs((row) => row.ranks), differs((row) => row.routing), differs(cardOf),
  ];
  for (const row of rows) {
    row.layer = name(row);
    row.variant = [
      ranks ? ranksText(row.ranks) : '', betas ? `β ${row.beta}` : '',
      routings ? `routing ${row.routing}` : '', cards ? cardOf(row) : '',
    ].filter((text) => text).join(', ');
    row.title = row.variant ? `${row.layer}, ${row.variant}` : row.layer;
  }
}

// Published times of the row's layer at its tokens, for any number of ranks.
const publishedBeside = (row) => data.published
  .filter((series) => series.model === row.model && series.experts === row.experts &&
    (series.compute === null || series.compute === row.compute))
  .map(({ rival, ranks, source, time_us }) => ({
    name: `${rival}, ${ranksText(ranks)}`, source,
    time: time_us.find(([tokens]) => tokens === row.tokens)?.[1],
  })).filter(({ time }) => time);
const publishedNames = (rows) => distinct(rows.flatMap(publishedBeside).map(({ name }) => name));
const publishedTime = (name, row) => publishedBeside(row).find((one) => one.name === name)?.time ?? null;

function publishedLine(points, index) {
  const line = polyline('published', points);
  line.setAttribute('stroke-dasharray', ['2 2', '6 2 2 2', '9 3'][index % 3]);
  return line;
}
const publishedMark = (cx, cy) => svg('circle', { class: 'published-mark', cx, cy, r: 1.8 });

function rowText(row) {
  const lines = [
    `${row.title}, ${row.tokens} tokens`,
    `time ${microseconds(row.median_us)} µs (${microseconds(row.p10_us)} to ${microseconds(row.p90_us)}, ${row.repeats} repeats)`,
  ];
  if (row.floor_us !== null) {
    lines.push(`floor F ${microseconds(row.floor_us)} µs, time / F ${ratio(overFloor(row))}`);
  }
  if (row.rival) {
    lines.push(`${row.rival.name} ${microseconds(row.rival.median_us)} µs, speed-up ${ratio(row.rival.median_us / row.median_us)}×`);
  }
  for (const { name, source, time } of publishedBeside(row)) {
    lines.push(`${name}: ${microseconds(time)} µs (${source})`);
  }
  if (onRoofline(row)) {
    lines.push(`${significant(teraflops(row))} TFLOP/s at ${significant(flopPerByte(row))} FLOP per byte`);
  }
  return lines.join('\n');
}

const tokensColumn = ['tokens', (row) => String(row.tokens)];
const floorColumns = [
  ['time µs', (row) => microseconds(row.median_us)],
  ['F µs', (row) => orDash(row.floor_us, microseconds)],
  ['time / F', (row) => orDash(overFloor(row), ratio)],
];

// Time over tokens.

const kPanel = { width: 300, height: 232, margin: { left: 62, right: 10, top: 8, bottom: 38 } };

function extent(rows) {
  const values = rows.flatMap((row) => [
    row.p10_us, row.p90_us, row.floor_us, row.rival?.median_us, row.rival?.p10_us, row.rival?.p90_us,
    ...publishedBeside(row).map(({ time }) => time),
  ]).filter((value) => value);
  return [Math.min(...values) / 1.25, Math.max(...values) * 1.25];
}

function polyline(kind, points) {
  return svg('polyline', { class: kind, points: points.map((at) => at.join(',')).join(' ') });
}

function whisker(kind, x, low, high) {
  return svg('path', {
    class: `${kind} whisker`,
    d: `M${x - 3.5},${high}h7M${x},${high}V${low}M${x - 3.5},${low}h7`,
  });
}

const square = (x, y, half) =>
  svg('rect', { class: 'rival-mark', x: x - half, y: y - half, width: 2 * half, height: 2 * half });

function timePanel(rows, yRange) {
  const { width, height, margin } = kPanel;
  const tokens = ascending(rows.map((row) => row.tokens));
  // A single number of tokens is in the middle.
  const xRange = tokens.length > 1 ? [tokens[0], tokens.at(-1)] : [tokens[0] / 2, tokens[0] * 2];
  const x = logScale(...xRange, margin.left + 10, width - margin.right - 10);
  const y = logScale(...yRange, height - margin.bottom, margin.top);
  const chart = frame(width, height, margin,
    { scale: x, ticks: tokens, format: String, name: 'tokens per rank' },
    { scale: y, ticks: logTicks(...yRange, 9), format: axisCount, name: 'time of a pass (µs)' });
  const sorted = [...rows].sort((a, b) => a.tokens - b.tokens);
  const floors = sorted.filter((row) => row.floor_us !== null);
  const rivals = sorted.filter((row) => row.rival);
  const published = publishedNames(rows);
  published.forEach((name, i) => {
    const points = sorted.filter((row) => publishedTime(name, row))
      .map((row) => [x(row.tokens), y(publishedTime(name, row))]);
    chart.append(publishedLine(points, i), ...points.map((at) => publishedMark(...at)));
  });
  chart.append(
    polyline('floor', floors.map((row) => [x(row.tokens), y(row.floor_us)])),
    polyline('rival', rivals.map((row) => [x(row.tokens), y(row.rival.median_us)])),
    polyline('ours', sorted.map((row) => [x(row.tokens), y(row.median_us)])));
  for (const { tokens: at, rival } of rivals) {
    if (rival.p10_us && rival.p90_us) {
      chart.append(whisker('rival', x(at), y(rival.p10_us), y(rival.p90_us)));
    }
    chart.append(square(x(at), y(rival.median_us), 2.6));
  }
  for (const row of sorted) {
    chart.append(whisker('ours', x(row.tokens), y(row.p10_us), y(row.p90_us)),
      svg('circle', { class: 'ours-mark', cx: x(row.tokens), cy: y(row.median_us), r: 3.2 }));
  }
  explain(chart, sorted.map((row) => ({ x: x(row.tokens), y: y(row.median_us), text: rowText(row) })));
  const columns = [
    tokensColumn, ...floorColumns.slice(0, 1),
    ['p10 µs', (row) => microseconds(row.p10_us)],
    ['p90 µs', (row) => microseconds(row.p90_us)],
    ['repeats', (row) => count(row.repeats)],
    ...floorColumns.slice(1),
  ];
  if (rivals.length > 0) {
    columns.push(
      ['rival', (row) => orDash(row.rival, (rival) => rival.name)],
      ['rival µs', (row) => orDash(row.rival?.median_us, microseconds)],
      ['rival p10 µs', (row) => orDash(row.rival?.p10_us, microseconds)],
      ['rival p90 µs', (row) => orDash(row.rival?.p90_us, microseconds)],
      ['speed-up', (row) => orDash(row.rival, (rival) => `${ratio(rival.median_us / row.median_us)}×`)]);
  }
  for (const name of published) {
    columns.push([`${name}, µs`, (row) => orDash(publishedTime(name, row), microseconds)]);
  }
  const first = rows[0];
  const note = [sizes(first), types(first), ...(first.ranks > 1 && !first.variant ? [ranksText(first.ranks)] : [])].join(', ');
  return figure(first.title, note, chart, numbers(columns, sorted));
}

function timeLegend(rows) {
  const sample = (...parts) => svg('svg', { width: 34, height: 14, 'aria-hidden': true }, ...parts);
  const entries = [[
    sample(polyline('ours', [[0, 7], [34, 7]]), whisker('ours', 17, 13, 1),
      svg('circle', { class: 'ours-mark', cx: 17, cy: 7, r: 3.2 })),
    'time: median, 10th to 90th percentile']];
  if (rows.some((row) => row.floor_us !== null)) {
    entries.push([sample(polyline('floor', [[0, 7], [34, 7]])), 'floor F']);
  }
  if (rows.some((row) => row.rival)) {
    const names = distinct(rows.filter((row) => row.rival).map((row) => row.rival.name));
    entries.push([sample(polyline('rival', [[0, 7], [34, 7]]), square(17, 7, 2.6)),
      `rival: ${names.join(', ')}`]);
  }
  const published = publishedNames(rows);
  if (published.length > 0) {
    entries.push([sample(publishedLine([[0, 7], [34, 7]], 0), publishedMark(17, 7)),
      `published: ${published.join('; ')}`]);
  }
  return legend(entries);
}

function timeCharts(rows) {
  const yRange = extent(rows);
  return [
    html('h3', {}, 'Time over tokens'), timeLegend(rows),
    html('div', { class: 'panels' },
      ...groups(rows, (row) => row.title).map(([, panel]) => timePanel(panel, yRange))),
  ];
}

// The roofline.

const kColours = ['var(--ours)', 'var(--rival)', '#1f9d63', '#8a4fbf', '#b8860b', '#c2306b', '#0c8599', '#7a7f87'];
const kShapes = [
  'M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z', 'M-3.6,-3.6h7.2v7.2h-7.2z', 'M0,-4.8l4.6,8h-9.2z',
  'M0,-5.2l4.4,5.2l-4.4,5.2l-4.4,-5.2z', 'M0,4.8l4.6,-8h-9.2z',
  'M-1.6,-4.6h3.2v3h3v3.2h-3v3h-3.2v-3h-3v-3.2h3z', 'M-4.8,0l8,-4.6v9.2z', 'M4.8,0l-8,-4.6v9.2z',
];

// A layer has a shape and a colour; its first variant is full, its last hollow.
function mark(layer, opacity, transform) {
  const colour = kColours[layer % kColours.length];
  return svg('path', {
    d: kShapes[layer % kShapes.length], transform, fill: colour, stroke: colour,
    'fill-opacity': opacity, 'stroke-width': 1.3,
  });
}

function roofline(rows, roofs) {
  const shown = rows.filter(onRoofline);
  const width = wideOrNarrow(620, 330), height = wideOrNarrow(380, 300);
  const margin = { left: 58, right: 14, top: 22, bottom: 40 };
  // The roofs are of the machine that the floors are of.
  const computes = distinct(shown.filter((row) => row.floor_us !== null).map((row) => row.compute))
    .filter((compute) => roofs.flops_per_second[compute]);
  const flat = (compute) => roofs.flops_per_second[compute] * 1e-12;
  const slope = roofs.read_bytes_per_second * 1e-12;
  const intensities = shown.map(flopPerByte);
  const xRange = [Math.min(...intensities) / 1.6, Math.max(...intensities) * 1.6];
  const rates = [...shown.map(teraflops), ...computes.map(flat)];
  const yRange = [Math.min(...rates) / 2, Math.max(...rates) * 1.5];
  const x = logScale(...xRange, margin.left, width - margin.right);
  const y = logScale(...yRange, height - margin.bottom, margin.top);
  const chart = frame(width, height, margin,
    { scale: x, ticks: logTicks(...xRange, wideOrNarrow(9, 5)), format: significant, name: 'arithmetic per touched weight byte (FLOP/B)' },
    { scale: y, ticks: logTicks(...yRange, 8), format: significant, name: 'achieved rate of a rank (TFLOP/s)' });
  computes.forEach((compute) => {
    const ridge = Math.min(Math.max(flat(compute) / slope, xRange[0]), xRange[1]);
    const low = Math.max(xRange[0], yRange[0] / slope);
    chart.append(polyline('roof', [
      [x(low), y(Math.min(slope * low, flat(compute)))], [x(ridge), y(Math.min(slope * ridge, flat(compute)))],
      [x(xRange[1]), y(Math.min(slope * xRange[1], flat(compute)))],
    ]));
    if (ridge < xRange[1]) {
      chart.append(svg('text',
        { x: width - margin.right - 4, y: y(flat(compute)) - 5, 'text-anchor': 'end' },
        `${count(flat(compute))} TFLOP/s (${compute})`));
    }
  });
  if (computes.length > 0) {
    const low = Math.max(xRange[0], yRange[0] / slope);
    const high = Math.min(xRange[1], Math.max(...computes.map(flat)) / slope);
    if (high > low) {
      // In the middle of the slope, along it.
      const middle = Math.sqrt(low * high);
      const angle = Math.atan2(y(slope * high) - y(slope * low), x(high) - x(low)) * 180 / Math.PI;
      chart.append(svg('text', {
        'text-anchor': 'middle',
        transform: `translate(${x(middle)} ${y(slope * middle)}) rotate(${angle}) translate(0 -6)`,
      }, `${significant(slope)} TB/s`));
    }
  }
  const layers = distinct(shown.map((row) => row.layer));
  const variants = distinct(shown.map((row) => row.variant));
  const opacity = (variant) =>
    (variants.length === 1 ? 1 : 1 - variants.indexOf(variant) / (variants.length - 1));
  const points = shown.map((row) => ({ x: x(flopPerByte(row)), y: y(teraflops(row)), text: rowText(row) }));
  shown.forEach((row, i) => chart.append(mark(layers.indexOf(row.layer), opacity(row.variant),
    `translate(${points[i].x.toFixed(2)} ${points[i].y.toFixed(2)})`)));
  explain(chart, points);
  const sample = (layer, alpha) => svg('svg', { width: 14, height: 14, 'aria-hidden': true },
    mark(layer, alpha, 'translate(7 7)'));
  const entries = layers.map((layer, i) => [sample(i, 1), layer]);
  if (variants.length > 1) {
    for (const variant of variants) entries.push([sample(0, opacity(variant)), variant]);
  }
  const columns = [
    ['point', (row) => row.title], tokensColumn,
    ['GFLOP', (row) => significant(row.flops * 1e-9)],
    ['touched MB', (row) => significant(row.touched_bytes * 1e-6)],
    ['FLOP/B', (row) => significant(flopPerByte(row))],
    ['time µs', (row) => microseconds(row.median_us)],
    ['TFLOP/s', (row) => significant(teraflops(row))],
  ];
  const note = computes.length > 0 ? 'Roofs: reading weights, and arithmetic. Of the most loaded rank'
    : 'Of the most loaded rank; no roofs, because the rows have no floor';
  return figure('Roofline', note, chart, numbers(columns, shown), legend(entries));
}

// Time over floor as a map.

// From light to dark, so that it also reads in grey; the numbers stand in the cells.
const kHeat = [[255, 247, 230], [253, 204, 128], [236, 126, 52], [176, 48, 24], [84, 14, 14]];

function heatColour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (kHeat.length - 1);
  const index = Math.min(Math.floor(at), kHeat.length - 2);
  const mixed = kHeat[index].map((channel, i) =>
    Math.round(channel + (kHeat[index + 1][i] - channel) * (at - index)));
  const light = 0.299 * mixed[0] + 0.587 * mixed[1] + 0.114 * mixed[2] > 140;
  return { fill: `rgb(${mixed})`, text: light ? '#1b1f24' : '#ffffff' };
}

// A line of cells for each layer, below its name, with the tokens above the cells; long lines are broken.
function narrowHeatMap(lines, most) {
  const width = 330, cellHeight = 22, perLine = 8;
  const cellWidth = width / perLine;
  const chart = svg('svg', { class: 'chart', tabindex: 0, role: 'img' });
  const points = [];
  let y = 0;
  for (const { layer, variant, cells } of lines) {
    const name = variant ? `${layer}, ${variant}` : layer;
    chart.append(svg('text', { x: 0, y: y + 13 }, name.length > 54 ? `${name.slice(0, 53)}…` : name));
    y += 18;
    const sorted = [...cells].sort((a, b) => a.tokens - b.tokens);
    for (let begin = 0; begin < sorted.length; begin += perLine) {
      sorted.slice(begin, begin + perLine).forEach((row, i) => {
        const x = (i + 0.5) * cellWidth, over = overFloor(row);
        const colour = heatColour(most > 1 ? (over - 1) / (most - 1) : 0);
        chart.append(
          svg('text', { class: 'dim', x, y: y + 11, 'text-anchor': 'middle' }, String(row.tokens)),
          svg('rect', { x: x - cellWidth / 2 + 1, y: y + 14, width: cellWidth - 2, height: cellHeight - 2, fill: colour.fill }),
          svg('text', { x, y: y + 28, 'text-anchor': 'middle', style: `fill: ${colour.text}` }, ratio(over)));
        points.push({ x, y: y + 24, text: rowText(row) });
      });
      y += cellHeight + 16;
    }
    y += 6;
  }
  chart.setAttribute('viewBox', `0 0 ${width} ${y}`);
  explain(chart, points);
  const shown = lines.flatMap(({ cells }) => cells);
  const columns = [['point', (row) => row.title], tokensColumn, ...floorColumns];
  return figure('Time over floor', 'Median time as a multiple of F; tokens per rank stand above the cells', chart, numbers(columns, shown));
}

function heatMap(rows, most) {
  const shown = rows.filter((row) => row.floor_us !== null);
  const tokens = ascending(shown.map((row) => row.tokens));
  const layers = groups(shown, (row) => row.layer);
  const named = shown.some((row) => row.variant);
  const lines = layers.flatMap(([layer, ofLayer]) =>
    groups(ofLayer, (row) => row.variant).map(([variant, cells]) => ({ layer, variant, cells })));
  const variantLength = Math.max(...lines.map((line) => line.variant.length));
  const layerLength = Math.max(...lines.map((line) => line.layer.length));
  const gap = named ? 10 : 0, top = 8;
  // As high as the roofline beside it, if that makes legible cells.
  const cellHeight = Math.min(Math.max((330 - gap * (layers.length - 1)) / lines.length, 22), 60);
  if (kNarrow.matches) return narrowHeatMap(lines, most);
  const variantWidth = named ? variantLength * kLabelCharacter + 8 : 0;
  const left = layerLength * kLabelCharacter + 14 + variantWidth;
  // Wider where long names leave no room for the numbers.
  const width = Math.max(620, left + 8 + 36 * tokens.length);
  const cellWidth = (width - left - 8) / tokens.length;
  const heightOf = lines.length * cellHeight + (layers.length - 1) * gap;
  const height = top + heightOf + 40 + 40;
  const chart = svg('svg', { class: 'chart', viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: 'img' });
  const columnX = (value) => left + (tokens.indexOf(value) + 0.5) * cellWidth;
  const points = [];
  let y = top;
  let before = null;
  for (const { layer, variant, cells } of lines) {
    if (layer !== before) {
      if (before !== null) y += gap;
      chart.append(svg('text', { x: 2, y: y + cellHeight / 2 + 4 }, layer));
      before = layer;
    }
    chart.append(svg('text',
      { class: 'dim', x: left - 8, y: y + cellHeight / 2 + 4, 'text-anchor': 'end' }, variant));
    for (const row of cells) {
      const x = columnX(row.tokens);
      const over = overFloor(row);
      const colour = heatColour(most > 1 ? (over - 1) / (most - 1) : 0);
      chart.append(
        svg('rect', { x: x - cellWidth / 2 + 1, y: y + 1, width: cellWidth - 2, height: cellHeight - 2, fill: colour.fill }),
        svg('text', { x, y: y + cellHeight / 2 + 4, 'text-anchor': 'middle', style: `fill: ${colour.text}` }, ratio(over)));
      points.push({ x, y: y + cellHeight / 2, text: rowText(row) });
    }
    y += cellHeight;
  }
  for (const value of roomy(tokens, columnX, String)) {
    chart.append(svg('text', { class: 'dim', x: columnX(value), y: y + 15, 'text-anchor': 'middle' }, String(value)));
  }
  chart.append(svg('text', { x: (left + width - 8) / 2, y: y + 32, 'text-anchor': 'middle' }, 'tokens per rank'));
  const steps = 40, barLeft = left, barWidth = Math.min(260, width - left - 60), barTop = y + 46;
  for (let i = 0; i < steps; ++i) {
    chart.append(svg('rect', {
      x: barLeft + i * barWidth / steps, y: barTop, width: barWidth / steps + (i + 1 < steps ? 1 : 0), height: 10,
      fill: heatColour((i + 0.5) / steps).fill,
    }));
  }
  const ticks = linearTicks(1, Math.max(most, 1.1), 4);
  const scale = (value) => barLeft + (value - 1) / (Math.max(most, 1.1) - 1) * barWidth;
  for (const value of ticks) {
    chart.append(svg('text', { class: 'dim', x: scale(value), y: barTop + 22, 'text-anchor': 'middle' }, significant(value)));
  }
  chart.append(svg('text', { x: barLeft - 10, y: barTop + 9, 'text-anchor': 'end' }, 'time / F'));
  explain(chart, points);
  const columns = [['point', (row) => row.title], tokensColumn, ...floorColumns];
  return figure('Time over floor', 'Median time as a multiple of F; 1 is the floor', chart, numbers(columns, shown));
}

// The load of the experts.

function loadPanel(rows) {
  const { width } = kPanel;
  const sorted = [...rows].sort((a, b) => a.tokens - b.tokens);
  const margin = { left: 62, right: 62, top: 16, bottom: 38 };
  const stripHeight = 26, gap = 6;
  const height = margin.top + sorted.length * (stripHeight + gap) + margin.bottom;
  const right = width - margin.right;
  const chart = svg('svg', { class: 'chart', viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: 'img' });
  chart.append(svg('text', { class: 'dim', x: right + 6, y: 11 }, 'most'));
  const points = [];
  sorted.forEach((row, i) => {
    const bottom = margin.top + (i + 1) * (stripHeight + gap) - gap;
    const load = row.expert_load;
    const most = load.at(-1);
    const step = (right - margin.left) / load.length;
    load.forEach((value, at) => chart.append(svg('rect', {
      class: 'bar', x: margin.left + at * step, width: Math.max(step - 0.6, 0.6),
      y: bottom - stripHeight * value / most, height: stripHeight * value / most,
    })));
    const mean = bottom - stripHeight / most;
    chart.append(
      svg('line', { class: 'mean', x1: margin.left, x2: right, y1: mean, y2: mean }),
      svg('line', { class: 'axis', x1: margin.left, x2: right, y1: bottom, y2: bottom }),
      svg('text', { class: 'dim', x: margin.left - 6, y: bottom - 8, 'text-anchor': 'end' }, String(row.tokens)),
      svg('text', { class: 'dim', x: right + 6, y: bottom - 8 }, `${significant(most)}×`));
    points.push({
      x: (margin.left + right) / 2, y: bottom - stripHeight / 2,
      text: `${row.title}, ${row.tokens} tokens\n${loadText(row)}`,
    });
  });
  const middle = (margin.top + height - margin.bottom) / 2;
  chart.append(
    svg('text', { class: 'dim', x: margin.left, y: height - 23, 'text-anchor': 'start' }, 'least'),
    svg('text', { class: 'dim', x: right, y: height - 23, 'text-anchor': 'end' }, 'most loaded'),
    svg('text', { x: (margin.left + right) / 2, y: height - 6, 'text-anchor': 'middle' }, 'experts by load (quantiles)'),
    svg('text', { x: 11, y: middle, 'text-anchor': 'middle', transform: `rotate(-90 11 ${middle})` }, 'tokens per rank'));
  explain(chart, points);
  const at = (share) => (row) => significant(row.expert_load[Math.round(share * (row.expert_load.length - 1))]);
  const columns = [
    tokensColumn, ['least / mean', at(0)], ['p25 / mean', at(0.25)], ['median / mean', at(0.5)],
    ['p75 / mean', at(0.75)], ['p90 / mean', at(0.9)], ['most / mean', at(1)],
    ['β reached', (row) => orDash(row.beta_reached, ratio)],
  ];
  return figure(rows[0].title, `${rows[0].experts} experts; bars: tokens of an expert, dashed: their mean`,
    chart, numbers(columns, sorted));
}

function loadText(row) {
  const load = row.expert_load;
  return `tokens of an expert over the mean: least ${significant(load[0])}×, median ` +
    `${significant(load[Math.floor((load.length - 1) / 2)])}×, most ${significant(load.at(-1))}×` +
    `${row.beta_reached === null ? '' : `\nbalancedness ${ratio(row.beta_reached)}`}`;
}

function loadCharts(rows) {
  const shown = rows.filter((row) => row.expert_load);
  const missing = rows.length - shown.length;
  const nodes = [html('h3', {}, 'Load of the experts')];
  if (missing > 0) {
    nodes.push(html('p', { class: 'note' }, shown.length === 0
      ? 'The rows of this suite do not tell how many tokens each expert got; rows that are measured anew do.'
      : `${missing} of ${rows.length} rows do not tell how many tokens each expert got; they are left out.`));
  }
  if (shown.length > 0) {
    nodes.push(html('div', { class: 'panels' },
      ...groups(shown, (row) => row.title).map(([, panel]) => loadPanel(panel))));
  }
  return nodes;
}
