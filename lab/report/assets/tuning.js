// The choice of a kernel's configurations: times over tokens and balancedness, regions, regret, and
// predicted against measured.

const regretOf = ({ outcome }) => outcome.chosen_us / outcome.exhaustive_us - 1;
const percentage = (share) => `${fixed(100 * share, 2)} %`;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const geometricMean = (values) => Math.exp(mean(values.map(Math.log)));

// The index of the configuration with the least time, without the kernel's own rule.
function bestOf(tuning, point) {
  let best = -1;
  point.times.forEach((time, c) => {
    if (time === null || c === tuning.rule) return;
    if (best < 0 || time < point.times[best]) best = c;
  });
  return best;
}

const isTimed = (tuning, point) => bestOf(tuning, point) >= 0;

function pointText(tuning, point) {
  const best = bestOf(tuning, point);
  const lines = [
    `${tuning.models[point.model].name}, ${point.tokens} tokens, β ${point.beta} (reached ${ratio(point.beta_reached)})`,
    `best configuration ${microseconds(point.times[best])} µs: ${tuning.configurations[best]}`,
  ];
  if (tuning.rule !== null && point.times[tuning.rule] !== null) {
    const nothing = point.times[tuning.rule] <= point.times[best] ? '; nothing is faster' : '';
    lines.push(`the kernel's rule ${microseconds(point.times[tuning.rule])} µs${nothing}`);
  }
  if (point.outcome) {
    lines.push(
      `chosen ${microseconds(point.outcome.chosen_us)} µs: ${tuning.configurations[point.outcome.chosen]}`,
      `predicted ${microseconds(point.outcome.predicted_us)} µs, regret ${percentage(regretOf(point))}${point.held_out ? ', held out' : ''}`);
  }
  lines.push(`region ${point.region}, ${ratio(point.omega)} waves`);
  return lines.join('\n');
}

// Draws a model's points as cells of tokens and balancedness. `shown`: -1: each cell has the best
// configuration's time and colour; otherwise the time of that configuration, coloured by how much
// longer it is than the best one's.
function timeMap(tuning, points, winners, shown) {
  const tokens = ascending(points.map((point) => point.tokens));
  const betas = ascending(points.map((point) => point.beta)).reverse();
  const width = 620, left = 44, top = 8, cellHeight = 30;
  const cellWidth = (width - left - 8) / tokens.length;
  const height = top + betas.length * cellHeight + 40;
  const chart = svg('svg', { class: 'chart', viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: 'img' });
  const columnX = (value) => left + (tokens.indexOf(value) + 0.5) * cellWidth;
  const rowY = (value) => top + (betas.indexOf(value) + 0.5) * cellHeight;
  const marks = [];
  for (const point of points) {
    const best = bestOf(tuning, point);
    const time = point.times[shown < 0 ? best : shown];
    const x = columnX(point.tokens), y = rowY(point.beta);
    const over = time === null ? null : time / point.times[best] - 1;
    const colour = shown < 0
      ? { fill: kColours[winners.indexOf(best) % kColours.length], text: '#ffffff' }
      : over === null ? { fill: 'var(--wait)', text: 'var(--ink)' } : heatColour(over);
    chart.append(
      svg('rect', {
        x: x - cellWidth / 2 + 1, y: y - cellHeight / 2 + 1, width: cellWidth - 2, height: cellHeight - 2,
        fill: colour.fill, 'fill-opacity': shown < 0 && winners.indexOf(best) >= kColours.length ? 0.6 : 1,
      }),
      svg('text', { x, y: y + 4, 'text-anchor': 'middle', style: `fill: ${colour.text}` }, orDash(time, microseconds)));
    marks.push({ x, y, text: pointText(tuning, point) });
  }
  for (const beta of betas) {
    chart.append(svg('text', { class: 'dim', x: left - 8, y: rowY(beta) + 4, 'text-anchor': 'end' }, String(beta)));
  }
  const bottom = top + betas.length * cellHeight;
  for (const value of tokens) {
    chart.append(svg('text', { class: 'dim', x: columnX(value), y: bottom + 15, 'text-anchor': 'middle' }, String(value)));
  }
  chart.append(
    svg('text', { x: (left + width - 8) / 2, y: bottom + 33, 'text-anchor': 'middle' }, 'tokens'),
    svg('text', { x: 11, y: (top + bottom) / 2, 'text-anchor': 'middle', transform: `rotate(-90 11 ${(top + bottom) / 2})` }, 'β'));
  explain(chart, marks);
  return chart;
}

function timeFigure(tuning, model) {
  const { name } = tuning.models[model];
  const points = tuning.points.filter((point) => point.model === model && isTimed(tuning, point));
  const winners = [...groups(points, (point) => bestOf(tuning, point))]
    .sort((a, b) => b[1].length - a[1].length).map(([best]) => best);
  const holder = html('div', {});
  const draw = (shown) => {
    const chart = timeMap(tuning, points, winners, shown);
    chart.setAttribute('aria-label', `${name}: time over tokens and balancedness. The numbers are in the table that follows.`);
    holder.replaceChildren(chart);
  };
  const choice = html('select', { 'aria-label': `Configuration whose times are shown of ${name}` },
    html('option', { value: -1 }, 'best of all'),
    ...tuning.configurations.map((text, c) => html('option', { value: c }, text)));
  choice.addEventListener('change', () => draw(Number(choice.value)));
  draw(-1);
  const swatch = (best) => svg('svg', { width: 14, height: 14, 'aria-hidden': true },
    svg('rect', {
      x: 1, y: 1, width: 12, height: 12, fill: kColours[winners.indexOf(best) % kColours.length],
      'fill-opacity': winners.indexOf(best) >= kColours.length ? 0.6 : 1,
    }));
  const columns = [
    ['tokens', (point) => String(point.tokens)], ['β', (point) => String(point.beta)],
    ['β reached', (point) => ratio(point.beta_reached)],
    ['best µs', (point) => microseconds(point.times[bestOf(tuning, point)])],
    ['best', (point) => tuning.configurations[bestOf(tuning, point)]],
    ['chosen µs', (point) => orDash(point.outcome?.chosen_us, microseconds)],
    ['chosen', (point) => orDash(point.outcome, ({ chosen }) => tuning.configurations[chosen])],
    ['static µs', (point) => orDash(point.outcome?.static_us, microseconds)],
    ['rule µs', (point) => orDash(tuning.rule === null ? null : point.times[tuning.rule], microseconds)],
  ];
  return html('figure', {},
    html('figcaption', {}, name, html('small', {},
      `${winners.length} configurations are the best somewhere. A colour is a configuration; of a single one, the darker the longer than the best`)),
    html('p', {}, html('label', {}, 'Time in µs of ', choice)),
    legend(winners.slice(0, 12).map((best) => [swatch(best), tuning.configurations[best]])),
    holder, numbers(columns, points));
}

// Where the models stand, and the thresholds.
function regionsFigure(tuning) {
  const { models, thresholds } = tuning;
  const width = 620, height = 380;
  const margin = { left: 58, right: 14, top: 12, bottom: 40 };
  const around = (values, more) => [Math.min(...values) / more, Math.max(...values) * more];
  const xRange = around(models.map(({ lambda }) => lambda), 2);
  const yRange = around([...models.map(({ rho }) => rho), thresholds.rho, thresholds.lambda_kappa], 2);
  const x = logScale(...xRange, margin.left, width - margin.right);
  const y = logScale(...yRange, height - margin.bottom, margin.top);
  const chart = frame(width, height, margin,
    { scale: x, ticks: logTicks(...xRange, 9), format: significant, name: 'λ: blocks of 256 weight rows' },
    { scale: y, ticks: logTicks(...yRange, 8), format: significant, name: 'ρ: products of a block' });
  for (const [value, name] of [[thresholds.rho, 'start = work: A below, B above'], [thresholds.lambda_kappa, 'the L2 cache is full: group_m above']]) {
    chart.append(
      svg('line', { class: 'mean', x1: margin.left, x2: width - margin.right, y1: y(value), y2: y(value) }),
      svg('text', { class: 'dim', x: width - margin.right - 4, y: y(value) - 5, 'text-anchor': 'end' }, `${name} (${significant(value)})`));
  }
  const marks = models.map((model) => ({
    x: x(model.lambda), y: y(model.rho),
    text: `${model.name}${model.unseen ? ' (unseen)' : ''}\nρ ${significant(model.rho)}, λ ${model.lambda}, κ ${significant(model.kappa)}\ngroup_m is predicted ${model.group_m ? '' : 'not '}to help`,
  }));
  models.forEach((model, i) => chart.append(mark(i, model.unseen ? 0 : 1, `translate(${marks[i].x.toFixed(2)} ${marks[i].y.toFixed(2)})`)));
  explain(chart, marks);
  const sample = (i, alpha) => svg('svg', { width: 14, height: 14, 'aria-hidden': true }, mark(i, alpha, 'translate(7 7)'));
  const columns = [
    ['model', (model) => model.name], ['E', (model) => String(model.experts)], ['N', (model) => String(model.n)],
    ['K', (model) => String(model.k)], ['ρ', (model) => significant(model.rho)], ['λ', (model) => String(model.lambda)],
    ['κ', (model) => significant(model.kappa)], ['λκ', (model) => significant(model.lambda * model.kappa)],
    ['region', (model) => (model.rho < thresholds.rho ? 'A' : 'B')], ['group_m', (model) => (model.group_m ? 'yes' : 'no')],
  ];
  return figure('Regions', `Thresholds follow from the device's constants; splitting K is predicted to help from κ ${significant(thresholds.kappa)}, below ${significant(thresholds.split_omega)} waves`,
    chart, numbers(columns, models), legend(models.map((model, i) => [sample(i, model.unseen ? 0 : 1), model.name])));
}

function findingsFigure(tuning) {
  const { findings, models } = tuning;
  const width = 620, left = 240, right = 14, top = 26, line = 22;
  const height = top + findings.length * line + 40;
  const span = Math.max(0.1, ...findings.map(({ ratio: found }) => Math.abs(Math.log(found)))) * 1.1;
  const x = (found) => left + (width - left - right) * (Math.log(found) + span) / (2 * span);
  const chart = svg('svg', { class: 'chart', viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: 'img' });
  const bottom = height - 40;
  chart.append(
    svg('line', { class: 'axis', x1: x(1), x2: x(1), y1: top - 6, y2: bottom }),
    svg('text', { class: 'dim', x: x(1) - 8, y: 12, 'text-anchor': 'end' }, 'slower'),
    svg('text', { class: 'dim', x: x(1) + 8, y: 12, 'text-anchor': 'start' }, 'faster'),
    svg('text', { x: (left + width - right) / 2, y: height - 8, 'text-anchor': 'middle' }, 'best time without / best time with'));
  const marks = [];
  findings.forEach((finding, i) => {
    const y = top + (i + 0.5) * line;
    chart.append(
      svg('text', { x: left - 10, y: y + 4, 'text-anchor': 'end' },
        `${models[finding.model].name}: ${finding.prediction} ${finding.predicted ? 'helps' : 'does not'}`),
      svg('rect', {
        x: Math.min(x(1), x(finding.ratio)), width: Math.max(Math.abs(x(finding.ratio) - x(1)), 1), y: y - 6, height: 12,
        fill: finding.confirmed ? 'var(--published)' : 'var(--rival)',
      }));
    marks.push({
      x: x(finding.ratio), y,
      text: `${models[finding.model].name}: ${finding.prediction}, predicted ${finding.predicted ? '' : 'not '}to help at ${finding.points} points\nmeasured ${fixed(finding.ratio, 3)}×: ${finding.confirmed ? 'as' : 'not as'} predicted`,
    });
  });
  explain(chart, marks);
  const columns = [
    ['model', (finding) => models[finding.model].name], ['prediction', (finding) => finding.prediction],
    ['predicted', (finding) => (finding.predicted ? 'helps' : 'does not')], ['points', (finding) => String(finding.points)],
    ['measured', (finding) => `${fixed(finding.ratio, 3)}×`], ['', (finding) => (finding.confirmed ? 'as predicted' : 'not as predicted')],
  ];
  const confirmed = findings.filter((finding) => finding.confirmed).length;
  return figure('Predicted against found', `${confirmed} of ${findings.length} as predicted (green); the others are orange`, chart, numbers(columns, findings));
}

function regretPanel(tuning, model, most) {
  const { width, height, margin } = kPanel;
  const points = tuning.points.filter((point) => point.model === model && point.outcome);
  const tokens = ascending(points.map((point) => point.tokens));
  const xRange = tokens.length > 1 ? [tokens[0], tokens.at(-1)] : [tokens[0] / 2, tokens[0] * 2];
  const x = logScale(...xRange, margin.left + 10, width - margin.right - 10);
  const bottom = height - margin.bottom;
  const y = (share) => bottom - (bottom - margin.top) * share / most;
  const chart = frame(width, height, margin,
    { scale: x, ticks: tokens, format: String, name: 'tokens' },
    { scale: y, ticks: linearTicks(0, most, 5), format: (share) => significant(100 * share), name: 'regret (%)' });
  const marks = points.map((point) => ({ x: x(point.tokens), y: y(regretOf(point)), text: pointText(tuning, point) }));
  points.forEach((point, i) => chart.append(svg('circle', {
    class: 'ours-mark', cx: marks[i].x, cy: marks[i].y, r: 3.2, 'fill-opacity': point.held_out ? 0.15 : 1,
    stroke: 'var(--ours)',
  })));
  explain(chart, marks);
  const regrets = points.map(regretOf);
  const statics = points.filter(({ outcome }) => outcome.static_us !== null)
    .map(({ outcome }) => outcome.static_us / outcome.chosen_us);
  const columns = [
    ['tokens', (point) => String(point.tokens)], ['β', (point) => String(point.beta)],
    ['held out', (point) => (point.held_out ? 'yes' : 'no')],
    ['best µs', (point) => microseconds(point.outcome.exhaustive_us)],
    ['chosen µs', (point) => microseconds(point.outcome.chosen_us)],
    ['regret', (point) => percentage(regretOf(point))],
    ['static µs', (point) => orDash(point.outcome.static_us, microseconds)],
    ['rule µs', (point) => orDash(point.outcome.rule_us, microseconds)],
  ];
  const note = `mean ${percentage(mean(regrets))}, most ${percentage(Math.max(...regrets))}` +
    (statics.length > 0 ? `; ${ratio(geometricMean(statics))}× over static choice` : '');
  return figure(tuning.models[model].name, note, chart, numbers(columns, points));
}

// A few configurations of every point, the chosen one among them: all of them would be too many.
function predictedFigure(tuning) {
  const kMostPerPoint = 6;
  const items = tuning.points.flatMap((point) => {
    const timed = point.times.map((time, c) => c)
      .filter((c) => point.times[c] !== null && point.predicted[c] !== null && point.predicted[c] > 0 && c !== tuning.rule);
    const step = Math.max(1, Math.ceil(timed.length / kMostPerPoint));
    const some = timed.filter((c, i) => i % step === 0 || c === point.outcome?.chosen);
    return some.map((c) => ({ point, c, measured: point.times[c], predicted: point.predicted[c] }));
  });
  const width = 620, height = 460;
  const margin = { left: 58, right: 14, top: 12, bottom: 40 };
  const all = items.flatMap(({ measured, predicted }) => [measured, predicted]);
  const range = [Math.min(...all) / 1.3, Math.max(...all) * 1.3];
  const x = logScale(...range, margin.left, width - margin.right);
  const y = logScale(...range, height - margin.bottom, margin.top);
  const chart = frame(width, height, margin,
    { scale: x, ticks: logTicks(...range, 9), format: count, name: 'measured (µs)' },
    { scale: y, ticks: logTicks(...range, 9), format: axisCount, name: 'predicted (µs)' });
  chart.append(polyline('floor', [[x(range[0]), y(range[0])], [x(range[1]), y(range[1])]]));
  const marks = items.map(({ point, c, measured, predicted }) => ({
    x: x(measured), y: y(predicted),
    text: `${tuning.models[point.model].name}, ${point.tokens} tokens, β ${point.beta}${point.held_out ? ', held out' : ''}\n${tuning.configurations[c]}: measured ${microseconds(measured)} µs, predicted ${microseconds(predicted)} µs`,
  }));
  items.forEach(({ point, c }, i) => chart.append(svg('circle', {
    cx: marks[i].x.toFixed(1), cy: marks[i].y.toFixed(1), r: c === point.outcome?.chosen ? 3.2 : 1.8,
    fill: kColours[point.model % kColours.length], 'fill-opacity': 0.6,
  })));
  explain(chart, marks);
  const dot = (model) => svg('svg', { width: 14, height: 14, 'aria-hidden': true },
    svg('circle', { cx: 7, cy: 7, r: 4, fill: kColours[model % kColours.length] }));
  const columns = [
    ['model', ({ point }) => tuning.models[point.model].name], ['tokens', ({ point }) => String(point.tokens)],
    ['β', ({ point }) => String(point.beta)], ['configuration', ({ c }) => tuning.configurations[c]],
    ['measured µs', ({ measured }) => microseconds(measured)], ['predicted µs', ({ predicted }) => microseconds(predicted)],
    ['predicted / measured', ({ measured, predicted }) => ratio(predicted / measured)],
  ];
  return figure('Predicted against measured', `At most ${kMostPerPoint} configurations of a point, and the chosen one (large); form ${tuning.form}`,
    chart, numbers(columns, items), legend(tuning.models.map(({ name }, i) => [dot(i), name])));
}

function tuningSection(tuning) {
  const id = `tuning-${tuning.file}`;
  const judged = tuning.points.filter((point) => point.outcome);
  const most = Math.max(0.01, ...judged.map(regretOf)) * 1.08;
  const models = tuning.models.map((model, i) => i);
  const nodes = [
    html('h2', { id }, `Choice of configurations: ${tuning.kernel}`),
    html('p', { class: 'note' }, `${tuning.file}: version ${tuning.version} on ${tuning.machine}; ` +
      `${tuning.configurations.length} configurations, ${tuning.generator} histograms.`),
    html('h3', {}, 'Time over tokens and balancedness'),
    html('div', { class: 'pair' }, ...models.map((model) => timeFigure(tuning, model))),
    html('h3', {}, 'Regions'),
    html('div', { class: 'pair' }, regionsFigure(tuning),
      ...(tuning.findings.length > 0 ? [findingsFigure(tuning)] : [])),
  ];
  if (judged.length > 0) {
    nodes.push(
      html('h3', {}, 'Regret of the cost model’s choice'),
      html('p', { class: 'note' }, 'How much longer the chosen configuration takes than the best of all. Full: points that were fitted on; hollow: held out.'),
      html('div', { class: 'panels' }, ...models
        .filter((model) => judged.some((point) => point.model === model))
        .map((model) => regretPanel(tuning, model, most))));
  }
  nodes.push(html('h3', {}, 'The cost model'), html('div', { class: 'pair' }, predictedFigure(tuning)));
  return html('section', { 'aria-labelledby': id }, ...nodes);
}
