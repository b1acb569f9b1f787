'use strict';
// The drafts of the last steps, drawn as trees: a column for each token, the
// accepted path on top. Lines are as thick as what is below them is probable.

const Drafts = (() => {
  const MOST_ROUNDS = 20;
  const BOX = {width: 82, height: 26, gapX: 26, gapY: 14, edge: 6};
  const MOST_LETTERS = 9;  // in a box
  const PAUSE = 250;  // milliseconds between two drawings of a live answer
  const NAMES = {draft: 'draft model', lookup: 'lookup', target: 'target'};
  const calm = matchMedia('(prefers-reduced-motion: reduce)');
  const at = id => document.getElementById(id);
  let rounds = [], shown = -1, isPaused = false, drawn = 0;

  function shape(tag, attributes, ...children) {
    const element = document.createElementNS(at('picture').namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes))
      element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  const visible = text => text === '' ? '(no text)' : text
    .replace(/ /g, '\u00b7').replace(/\n/g, '\u23ce').replace(/\t/g, '\u21e5');

  function short(text) {
    const letters = [...visible(text)];
    return letters.length <= MOST_LETTERS ? letters.join('') :
      letters.slice(0, MOST_LETTERS - 1).join('') + '\u2026';
  }

  const percent = prob =>
    prob === null ? '' : `${prob < 0.01 ? '<1' : Math.round(100 * prob)} %`;

  // The root, the drafted tokens behind it, and what the target chose itself.
  function boxesOf({before, nodes, own}) {
    const boxes = [{text: before, source: 'root', parent: null, isTaken: true, prob: null},
      ...nodes.map(node => ({...node, parent: node.parent + 1, isTaken: node.is_accepted}))];
    if (own !== undefined)
      boxes.push({text: own, source: 'target', isTaken: true, prob: null,
        parent: boxes.findLastIndex(box => box.isTaken)});
    boxes.forEach(box => { box.below = []; });
    for (const box of boxes) boxes[box.parent]?.below.push(box);
    return boxes;
  }

  // The first child of a box stands in its row, others get rows below.
  function place(box, column, row) {
    Object.assign(box, {column, row});
    box.below.sort((a, b) => b.isTaken - a.isTaken || b.prob - a.prob);
    let next = row;
    for (const child of box.below) next = place(child, column + 1, next);
    return Math.max(next, row + 1);
  }

  function edgeOf(box, above) {
    const x = above.column * (BOX.width + BOX.gapX) + BOX.width;
    const y = row => row * (BOX.height + BOX.gapY) + BOX.height / 2;
    const [from, to, end] = [y(above.row), y(box.row), x + BOX.gapX];
    const bend = `C${x + BOX.gapX / 2} ${from} ${x + BOX.gapX / 2} ${to} ${end} ${to}`;
    return shape('path', {class: box.isTaken ? 'taken' : '', d: `M${x} ${from}${bend}`,
      'stroke-width': 1 + (BOX.edge - 1) * (box.prob ?? 0)});
  }

  function nodeOf(box) {
    const x = box.column * (BOX.width + BOX.gapX), y = box.row * (BOX.height + BOX.gapY);
    const {width, height} = BOX;
    return shape('g', {class: `${box.source}${box.isTaken ? ' taken' : ''}`},
      shape('rect', {x, y, width, height, rx: 5}),
      shape('text', {x: x + width / 2, y: y + 18}, short(box.text)),
      shape('text', {x: x + width / 2, y: y + height + 11, class: 'prob'}, percent(box.prob)));
  }

  function draw(round) {
    const boxes = boxesOf(round);
    const rows = place(boxes[0], 0, 0);
    const columns = 1 + Math.max(...boxes.map(box => box.column));
    const width = columns * (BOX.width + BOX.gapX) - BOX.gapX + 4;
    const height = rows * (BOX.height + BOX.gapY) + 4;
    const edges = boxes.slice(1).map(box => edgeOf(box, boxes[box.parent]));
    const picture = at('picture');
    const view = {width, height, viewBox: `-2 -2 ${width} ${height}`};
    for (const [name, value] of Object.entries(view)) picture.setAttribute(name, value);
    picture.setAttribute('aria-label', summary(round));
    picture.replaceChildren(...edges, ...boxes.map(nodeOf));
  }

  const quote = text => `\u201c${visible(text)}\u201d`;

  function named({text, source, prob}) {
    const told = prob === null ? '' : `, ${percent(prob)}`;
    return `${quote(text)} (${NAMES[source]}${told})`;
  }

  function summary({number, nodes}) {
    const accepted = nodes.filter(node => node.is_accepted).length;
    return `Step ${number}: ${nodes.length} drafted, ${accepted} accepted.`;
  }

  function words(round) {
    const list = taken =>
      round.nodes.filter(n => n.is_accepted === taken).map(named).join(', ') || 'none';
    const own = round.own === undefined ? '' : ` The target adds ${quote(round.own)}.`;
    const drafts = round.nodes.length ?
      ` Accepted: ${list(true)}. Refused: ${list(false)}.` : '';
    return `${summary(round)} Behind ${quote(round.before)}.${drafts}${own}`;
  }

  function show(index) {
    shown = index;
    const round = rounds[shown];
    drawn = performance.now();
    draw(round);
    at('which').textContent = summary(round);
    at('words').textContent = words(round);
    update();
  }

  function update() {
    at('back').disabled = shown <= 0;
    at('forward').disabled = shown >= rounds.length - 1;
    at('pause').setAttribute('aria-pressed', isPaused);
    at('pause').textContent = isPaused ? 'Go on' : 'Pause';
  }

  function pause(value) {
    isPaused = value;
    update();
    if (!isPaused && rounds.length) show(rounds.length - 1);
  }

  // What the user asks for is said, too.
  function step(change) {
    const index = shown + change;
    if (index < 0 || index >= rounds.length) return;
    isPaused = true;
    const focused = document.activeElement;
    show(index);
    if (focused.disabled) at('pause').focus();  // at either end
    at('said').textContent = words(rounds[index]);
  }

  at('pause').addEventListener('click', () => pause(!isPaused));
  at('back').addEventListener('click', () => step(-1));
  at('forward').addEventListener('click', () => step(1));
  at('tree').addEventListener('keydown', event => {
    const change = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!change || event.target.id === 'drawing') return;
    event.preventDefault();
    step(change);
  });
  update();

  return {
    get isOpen() { return at('tree').open; },
    start() {
      rounds = [];
      shown = -1;
      pause(false);
      if (calm.matches) at('which').textContent = 'Drawn at the end of the answer.';
    },
    // A step: `before` is the last token that was known, `own` the target's.
    add(round) {
      rounds.push({...round, number: (rounds.at(-1)?.number ?? 0) + 1});
      if (rounds.length > MOST_ROUNDS) { rounds.shift(); shown--; }
      if (isPaused) update();
      else if (!calm.matches && performance.now() - drawn > PAUSE) show(rounds.length - 1);
    },
    end() { if (!isPaused && rounds.length) show(rounds.length - 1); },
  };
})();
