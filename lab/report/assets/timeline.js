// One pass as a Chrome trace tells it: a canvas per rank, a line per track, one time axis for all.

const kKinds = {
  gate: '#5f3dc4', route: '#a78bfa', counts: '#862e5c', plan: '#e599c0', send: '#d9480f',
  pack: '#f2b134', task: '#7d8597', gemm1: '#0b4f9c', gemm2: '#4ba3e3', combine: '#2f8f4e',
  signal: '#0c8599',
};
const kOtherKinds = ['#5c940d', '#c2255c', '#087f5b', '#e67700', '#364fc7', '#868e96'];
const kSliceFields = ['start', 'extent', 'busy', 'count', 'name', 'tile', 'block', 'expert', 'rows', 'peer'];
const isWait = (name) => name.startsWith('wait');
const kTop = 8;  // px, for half a label
const kManyTracks = 40;

// Ten numbers to a slice, starts as differences to the one before.
function unpack(track) {
  const slices = [];
  let start = 0;
  for (let i = 0; i < track.slices.length; i += kSliceFields.length) {
    const slice = {};
    kSliceFields.forEach((field, j) => { slice[field] = track.slices[i + j]; });
    start += slice.start;
    slice.start = start;
    slices.push(slice);
  }
  return { ...track, slices };
}

class Timeline {
  constructor(data) {
    this.data = data;
    this.from = 0;
    this.to = Math.max(data.span_ns, 1);
    this.whole = this.to;
    // Tracks are called "SM 17 math": of many, those of a role show more beside each other.
    this.byRole = data.ranks.some(({ rank }) =>
      data.tracks.filter((track) => track.rank === rank).length > kManyTracks);
    let other = 0;
    this.colours = data.names.map((name) =>
      (isWait(name) ? null : kKinds[name] || kOtherKinds[other++ % kOtherKinds.length]));
    this.range = html('output', {});
    this.ranks = data.ranks.map((rank) => this.makeRank(rank));
  }

  makeRank({ rank, name }) {
    const inOrder = this.data.tracks.filter((track) => track.rank === rank).map(unpack);
    const tracks = groups(inOrder, (track) => this.trackName(track).split(' ').at(-1))
      .flatMap(([, ofRole]) => ofRole);
    const canvas = html('canvas', { tabindex: 0, role: 'img' });
    const longest = Math.max(...tracks.map((track) => this.trackName(track).length));
    const view = {
      canvas, orders: { role: tracks, unit: inOrder }, left: Math.min(190, longest * 6.2 + 12), tracks: this.byRole ? tracks : inOrder, first: 0, last: tracks.length,
      height: Math.min(Math.max(tracks.length * 15, 45), 560), drag: null,
    };
    view.title = name || `process ${rank}`;
    view.totals = this.data.totals.filter((total) => total.rank === rank);
    this.listen(view);
    return view;
  }

  trackName(track) { return track.name || `track ${track.id}`; }

  // Returns the nodes of the page's section.
  nodes() {
    const { data } = this;
    const said = [`${count(data.num_slices)} slices over ${significant(data.span_ns * 1e-3)} µs, from ${data.file}.`];
    if (data.merged_below_ns > 0) {
      said.push(`Slices shorter than ${significant(data.merged_below_ns * 1e-3)} µs are drawn together, the fainter the more of the time between them is free; the tables count all.`);
    }
    if (data.num_other > 0) said.push(`${count(data.num_other)} other events, such as arrows and counters, are left out.`);
    if (data.num_dropped > 0) said.push(`The pass had ${count(data.num_dropped)} more events, for which the trace had no room.`);
    const buttons = [
      ['Zoom in', () => this.zoom(0.5)], ['Zoom out', () => this.zoom(2)],
      ['Earlier', () => this.move(-0.25)], ['Later', () => this.move(0.25)],
      ['Whole pass', () => this.reset()],
    ].map(([name, act]) => {
      const button = html('button', { type: 'button' }, name);
      button.addEventListener('click', act);
      return button;
    });
    const order = html('button', { type: 'button' });
    const nameOrder = () => { order.textContent = this.byRole ? 'Sort by unit' : 'Sort by role'; };
    order.addEventListener('click', () => {
      this.byRole = !this.byRole;
      for (const view of this.ranks) view.tracks = view.orders[this.byRole ? 'role' : 'unit'];
      nameOrder();
      this.reset();
    });
    nameOrder();
    const swatch = (colour) => html('span', { class: 'swatch', style: `background: ${colour}` });
    const swatches = data.names.map((name, i) => [swatch(this.colours[i]), name])
      .filter(([, name]) => !isWait(name));
    if (data.names.some(isWait)) swatches.push([swatch('var(--wait)'), 'waits']);
    return [
      html('p', { class: 'note' }, said.join(' ')),
      html('p', { class: 'note hint' }, 'Drag over a chart to zoom in, over several lines also to those tracks; with a chart in focus, + and − zoom, the arrow keys move, 0 shows all.'),
      legend(swatches),
      html('div', { class: 'tools' }, ...buttons, order, this.range),
      html('div', { class: 'wide' }, ...this.ranks.map((view) => this.figureOf(view))),
    ];
  }

  figureOf(view) {
    const { data } = this;
    const columns = [
      ['what', (total) => data.names[total.name]],
      ['slices', (total) => count(total.count)],
      ['total µs', (total) => significant(total.total_ns * 1e-3)],
      ['mean µs', (total) => significant(total.total_ns * 1e-3 / total.count)],
      ['longest µs', (total) => significant(total.longest_ns * 1e-3)],
      ['of all tracks’ time', (total) => `${fixed(100 * total.total_ns / Math.max(data.span_ns, 1) / view.tracks.length, 1)} %`],
    ];
    const note = `${count(view.tracks.length)} tracks; time in µs after the pass began`;
    return figure(view.title, note, view.canvas, numbers(columns, view.totals));
  }

  zoom(factor, centre = (this.from + this.to) / 2) {
    const width = Math.min(Math.max((this.to - this.from) * factor, 10), this.whole);
    const share = (centre - this.from) / (this.to - this.from);
    this.show(centre - share * width, width);
  }
  move(share) { this.show(this.from + share * (this.to - this.from), this.to - this.from); }
  show(from, width) {
    this.from = Math.min(Math.max(from, 0), this.whole - width);
    this.to = this.from + width;
    this.draw();
  }
  reset() {
    for (const view of this.ranks) [view.first, view.last] = [0, view.tracks.length];
    this.show(0, this.whole);
  }

  // `width`: px of a canvas, if not what it has on the screen.
  draw(width) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const theme = { ink: colour('--ink'), dim: colour('--dim'), grid: colour('--grid'), wait: colour('--wait'), ours: colour('--ours') };
    for (const view of this.ranks) this.drawRank(view, theme, width || view.canvas.clientWidth);
    this.range.textContent = `${fixed(this.from * 1e-3, 1)} to ${fixed(this.to * 1e-3, 1)} µs`;
  }

  drawRank(view, theme, width) {
    const { canvas, tracks, left, height } = view;
    const density = Math.max(devicePixelRatio || 1, 2);  // for paper, too
    canvas.width = Math.round(width * density);
    canvas.height = Math.round((kTop + height + 36) * density);
    const pen = canvas.getContext('2d');
    pen.scale(density, density);
    pen.translate(0, kTop);
    pen.font = '11px system-ui, sans-serif';
    const right = width - 8;
    const scale = (right - left) / (this.to - this.from);
    const x = (time) => left + (time - this.from) * scale;
    const line = height / (view.last - view.first);
    Object.assign(view, { width, line, scale });
    for (const time of linearTicks(this.from * 1e-3, this.to * 1e-3, Math.max(width / 110, 2))) {
      const at = Math.round(x(time * 1e3)) + 0.5;
      pen.fillStyle = theme.grid;
      pen.fillRect(at, 0, 1, height + 4);
      pen.fillStyle = theme.dim;
      pen.textAlign = at > right - 20 ? 'right' : 'center';
      pen.fillText(time.toLocaleString('en-US'), at, height + 16);
    }
    pen.fillStyle = theme.ink;
    pen.textAlign = 'center';
    pen.fillText('time (µs)', (left + right) / 2, height + 32);
    let labelled = -Infinity;
    for (let i = view.first; i < view.last; ++i) {
      const top = (i - view.first) * line;
      if (top + line / 2 - labelled >= 12) {
        labelled = top + line / 2;
        pen.fillStyle = theme.dim;
        pen.textAlign = 'right';
        pen.fillText(this.trackName(tracks[i]), left - 6, labelled + 4, left - 8);
      }
      pen.save();
      pen.beginPath();
      pen.rect(left, 0, right - left, height);
      pen.clip();
      const inset = line > 4 ? 1 : 0;
      for (const slice of tracks[i].slices) {
        if (slice.start + slice.extent < this.from || slice.start > this.to) continue;
        pen.fillStyle = this.colours[slice.name] || theme.wait;
        // Together with others, as dense as they are.
        pen.globalAlpha = slice.count > 1 ? Math.max(0.3, Math.min(1, slice.busy / slice.extent)) : 1;
        pen.fillRect(x(slice.start), top + inset, Math.max(slice.extent * scale, 0.6), line - 2 * inset);
      }
      pen.restore();
    }
    pen.globalAlpha = 1;
    pen.fillStyle = theme.dim;
    pen.fillRect(left - 0.5, 0, 1, height);
    pen.fillRect(left, height, right - left, 1);
    if (view.drag) {
      const { x0, y0, x1, y1, tall } = view.drag;
      pen.strokeStyle = theme.ink;
      pen.fillStyle = theme.ours;
      pen.globalAlpha = 0.15;
      const box = [Math.min(x0, x1), tall ? Math.min(y0, y1) : 0, Math.abs(x1 - x0), tall ? Math.abs(y1 - y0) : height];
      pen.fillRect(...box);
      pen.globalAlpha = 1;
      pen.strokeRect(...box);
    }
  }

  listen(view) {
    const { canvas } = view;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top - kTop];
    };
    const time = (x) => this.from + (x - view.left) / view.scale;
    const track = (y) => view.first + Math.floor(y / view.line);
    canvas.addEventListener('pointerdown', (event) => {
      const [x0, y0] = at(event);
      if (event.button !== 0 || event.pointerType === 'touch') return;
      view.drag = { x0, y0, x1: x0, y1: y0, tall: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener('pointermove', (event) => {
      const [x1, y1] = at(event);
      if (view.drag) {
        Object.assign(view.drag, { x1, y1, tall: Math.abs(y1 - view.drag.y0) > Math.max(24, view.line) });
        hideTip();
        this.draw();
        return;
      }
      const text = this.sliceText(view, time(x1), track(y1));
      if (text) showTip(text, event.clientX, event.clientY); else hideTip();
    });
    canvas.addEventListener('pointerup', () => {
      const { drag } = view;
      view.drag = null;
      if (!drag) return;
      if (drag.tall) {
        const [low, high] = [track(Math.min(drag.y0, drag.y1)), track(Math.max(drag.y0, drag.y1))];
        [view.first, view.last] = [Math.max(low, view.first), Math.min(high + 1, view.last)];
      }
      if (Math.abs(drag.x1 - drag.x0) > 4) {
        const [low, high] = [time(Math.min(drag.x0, drag.x1)), time(Math.max(drag.x0, drag.x1))];
        this.show(low, Math.min(Math.max(high - low, 10), this.whole));
      } else {
        this.draw();
      }
    });
    canvas.addEventListener('pointercancel', () => { view.drag = null; this.draw(); });
    canvas.addEventListener('pointerleave', hideTip);
    canvas.addEventListener('dblclick', () => this.reset());
    canvas.addEventListener('keydown', (event) => {
      const act = {
        '+': () => this.zoom(0.5), '=': () => this.zoom(0.5), '-': () => this.zoom(2),
        ArrowLeft: () => this.move(-0.25), ArrowRight: () => this.move(0.25), 0: () => this.reset(),
      }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
  }

  sliceText(view, time, index) {
    if (index < view.first || index >= view.last) return '';
    const { slices } = view.tracks[index];
    const near = 1.5 / view.scale;
    let low = 0, high = slices.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (slices[middle].start <= time + near) low = middle + 1; else high = middle;
    }
    // The last that has begun; longer ones around it, not far before.
    for (let i = low - 1; i >= Math.max(low - 64, 0); --i) {
      const slice = slices[i];
      if (slice.start + slice.extent < time - near) continue;
      const lines = [
        `${this.data.names[slice.name]}${slice.count > 1 ? `, ${count(slice.count)} slices` : ''}`,
        `${this.trackName(view.tracks[index])}`,
        `${fixed(slice.start * 1e-3, 2)} µs, for ${fixed(slice.busy * 1e-3, 2)} µs`,
      ];
      const more = ['tile', 'block', 'expert', 'rows', 'peer'].filter((field) => slice[field] >= 0);
      if (more.length > 0) lines.push(more.map((field) => `${field} ${slice[field]}`).join(', '));
      return lines.join('\n');
    }
    return '';
  }
}
