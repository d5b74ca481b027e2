// Recorded routings: the balancedness of each layer over its steps.

// `least`: the lowest balancedness on any panel, so that all have one scale.
function balancednessPanel(layer, least) {
  const { width, height, margin } = kPanel;
  const { steps } = layer;
  const first = steps[0].step, last = Math.max(steps.at(-1).step, first + 1);
  const left = margin.left + 10, right = width - margin.right - 10;
  const x = (step) => left + (right - left) * (step - first) / (last - first);
  const bottom = height - margin.bottom;
  const y = (beta) => bottom - (bottom - margin.top) * (beta - least) / (1 - least);
  const chart = frame(width, height, margin,
    { scale: x, ticks: linearTicks(first, last, 5).filter((tick) => tick >= first && tick <= last), format: count, name: 'step' },
    { scale: y, ticks: linearTicks(least, 1, 5).filter((tick) => tick >= least && tick <= 1), format: ratio, name: 'β' });
  const marks = steps.map(({ step, beta, rows }) =>
    ({ x: x(step), y: y(beta), text: `step ${count(step)}: β ${fixed(beta, 3)}, ${count(rows)} rows` }));
  chart.append(polyline('ours', marks.map((mark) => [mark.x, mark.y])));
  explain(chart, marks);
  const columns = [
    ['step', ({ step }) => count(step)], ['rows', ({ rows }) => count(rows)], ['β', ({ beta }) => fixed(beta, 3)],
  ];
  return figure(layer.name || 'a layer without a name', layer.text, chart, numbers(columns, steps));
}

function routingSection(routing) {
  const id = `routing-${routing.file}`;
  const layers = routing.layers.filter(({ steps }) => steps.length > 0);
  const betas = layers.flatMap(({ steps }) => steps.map(({ beta }) => beta));
  const least = Math.min(0.95, Math.floor(20 * Math.min(1, ...betas)) / 20);
  return html('section', { 'aria-labelledby': id },
    html('h2', { id }, 'Balancedness of recorded routings'),
    html('p', { class: 'note' }, `${routing.file}${routing.machine ? ` on ${routing.machine}` : ''}: ` +
      'β of the rows of each expert in each step; 1 is uniform.'),
    html('div', { class: 'panels' }, ...layers.map((layer) => balancednessPanel(layer, least))));
}
