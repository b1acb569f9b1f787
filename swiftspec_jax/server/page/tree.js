'use strict';
// The drafts of the last steps, drawn as trees: the accepted path on top. Lines
// are as thick as what follows them is probable.

const Drafts = (() => {
  const MOST_ROUNDS = 20;
  const MOST_LETTERS = 9;  // in a box
  const PAUSE = 250;  // milliseconds between two drawings of a live answer
  const NAMES = {draft: 'draft model', lookup: 'lookup', target: 'target'};
  const calm = matchMedia('(prefers-reduced-motion: reduce)');
  const at = id => document.getElementById(id);
  let rounds = [], shown = -1, isPaused = false, drawn = 0;

  const visible = text => text === '' ? '(no text)' : text
    .replace(/ /g, '\u00b7').replace(/\n/g, '\u23ce').replace(/\t/g, '\u21e5');

  function short(text) {
    const letters = [...visible(text)];
    return letters.length <= MOST_LETTERS ? letters.join('') :
      letters.slice(0, MOST_LETTERS - 1).join('') + '\u2026';
  }

  const percent = prob =>
    prob === null ? '' : `${prob < 0.01 ? '<1' : Math.round(100 * prob)} %`;

  // The root, the drafted tokens after it, and what the target chose itself.
  function boxesOf({before, nodes, own}) {
    const box = (text, source, parent, isPassed, prob, about) => ({
      name: short(text), weight: percent(prob), about, parent, isPassed, prob: prob ?? 0,
      share: prob ?? 0, classes: isPassed ? `${source} taken` : source});
    const boxes = [box(before, 'root', null, true, null, quote(before)),
      ...nodes.map(node => box(node.text, node.source, node.parent + 1, node.is_accepted,
        node.prob, named(node)))];
    if (own !== undefined)
      boxes.push(box(own, 'target', boxes.findLastIndex(b => b.isPassed), true, null,
        named({text: own, source: 'target', prob: null})));
    return boxes;
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
    return `${summary(round)} After ${quote(round.before)}.${drafts}${own}`;
  }

  function show(index) {
    shown = index;
    const round = rounds[shown];
    drawn = performance.now();
    Tree.draw(at('picture'), boxesOf(round));
    at('picture').setAttribute('aria-label', summary(round));
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
