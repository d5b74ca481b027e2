// Puts the page together.

const data = JSON.parse(document.getElementById('data').textContent);
const place = document.getElementById('charts');

function suiteSection({ name, rows }, most) {
  nameRows(rows);
  const maps = [];
  const notes = [];
  if (rows.some(onRoofline)) maps.push(roofline(rows, data.roofs));
  else notes.push('There is no roofline: no row of this suite tells FLOPs and touched bytes.');
  if (rows.some((row) => row.floor_us !== null)) maps.push(heatMap(rows, most));
  else notes.push('There is no map of time over floor: the rows of this suite have no floor.');
  return html('section', { 'aria-labelledby': `suite-${name}` },
    html('h2', { id: `suite-${name}` }, name),
    ...timeCharts(rows),
    html('h3', {}, 'Rate and distance from the floor'),
    ...notes.map((note) => html('p', { class: 'note' }, note)),
    html('div', { class: 'pair' }, ...maps),
    ...loadCharts(rows));
}

const kPaperWidth = 680;  // px: A4 without margins and a figure's padding

function timelineSection() {
  const section = html('section', { 'aria-labelledby': 'timeline' },
    html('h2', { id: 'timeline' }, 'Timeline of a pass'));
  place.after(section);
  const timeline = new Timeline(data.timeline);
  section.append(...timeline.nodes());
  timeline.draw();
  // Colours and widths are the canvas's own.
  let width = innerWidth;
  addEventListener('resize', () => {
    if (innerWidth !== width) timeline.draw();
    width = innerWidth;
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => timeline.draw());
  addEventListener('beforeprint', () => {
    document.documentElement.classList.add('on-paper');
    timeline.draw(kPaperWidth);
  });
  addEventListener('afterprint', () => {
    document.documentElement.classList.remove('on-paper');
    timeline.draw();
  });
}

function draw() {
  place.replaceChildren();
  // One scale for all maps, so that a colour is the same number everywhere.
  const most = Math.max(1, ...data.suites.flatMap(({ rows }) => rows.map(overFloor)));
  for (const suite of data.suites) place.append(suiteSection(suite, most));
  for (const tuning of data.tunings) place.append(tuningSection(tuning));
  for (const ladder of data.ladders) place.append(ladderSection(ladder));
  for (const table of data.tables) place.append(tableSection(table));
  for (const routing of data.routings) place.append(routingSection(routing));
  document.documentElement.dataset.charts =
    document.querySelectorAll('figure > .chart, figure > canvas').length;
}

function drawOrTell() {
  try {
    draw();
  } catch (error) {
    place.append(html('p', { class: 'problem' }, `A chart could not be drawn: ${error.message}`));
    document.documentElement.dataset.problem = error.stack;
  }
}

if (data.timeline) timelineSection();
drawOrTell();
kNarrow.addEventListener('change', drawOrTell);
