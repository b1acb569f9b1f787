'use strict';
const at = id => document.getElementById(id);
const MOST_STEPS = 100;  // columns of the picture below an answer
const MOST_BOXES = 8;  // of a column
let model, key = '', messages = [], stopper = null;

function make(tag, name, text = '') {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.textContent = text;  // never HTML: models write anything
  return element;
}

async function ask(path, body, signal) {
  const headers = {'Content-Type': 'application/json'};
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch(path, body === undefined ? {headers} :
    {method: 'POST', headers, body: JSON.stringify(body), signal});
  if (answer.ok) return answer;
  if (answer.status === 401) askForKey();
  const {error} = await answer.json().catch(
    () => ({error: {message: `status ${answer.status}`}}));
  throw new Error(error.message);
}

function askForKey() {
  at('unlock').hidden = false;
  at('key').focus();
}

async function start() {
  at('wrong').textContent = '';
  try {
    model = (await (await ask('v1/models')).json()).data[0];
  } catch (error) {
    at('wrong').textContent = error.message;
    return;
  }
  at('unlock').hidden = true;
  at('model').textContent = model.id;
  document.title = `${model.id}: chat`;
  at('tokens').max = model.max_model_len;
  offerLimits(model.speculation);
  at('text').focus();
}

// Only where the engine can speculate differently for single requests.
function offerLimits({max_tokens}) {
  at('limit').hidden = !max_tokens;
  at('drafts').length = 2;
  for (let n = 1; n < max_tokens; n *= 2)
    at('drafts').add(new Option(`at most ${n}`, n));
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {done, value} = await reader.read();
    if (done) throw new Error('the server has ended the answer early');
    const parts = (rest + value).split('\n\n');
    rest = parts.pop();
    for (const part of parts) {
      if (part === 'data: [DONE]') return;
      yield JSON.parse(part.slice('data: '.length));
    }
  }
}

class Answer {
  constructor() {
    this.text = '';
    this.steps = this.drafted = this.accepted = this.late = 0;
    this.counts = {draft: 0, lookup: 0, target: 0};
    this.first = this.last = NaN;
    this.before = '\u2026';  // the last token: at first that of the prompt
    Drafts.start();
    this.box = make('article', 'model');
    this.body = make('p');
    this.picture = make('div', 'steps');
    this.picture.setAttribute('aria-hidden', 'true');
    this.note = make('footer');
    this.box.setAttribute('aria-busy', 'true');
    this.box.append(make('h2', '', model.id), this.body, this.picture, this.note);
    at('talk').append(this.box);
  }

  add({delta, speculation}) {
    const now = performance.now();
    this.text += delta.content;
    let told = 0;
    for (const {text, source} of speculation?.pieces ?? []) {
      told += text.length;
      this.counts[source]++;
      if (text) this.body.append(make('span', source, text));
    }
    this.body.append(delta.content.slice(told));
    if (!speculation) return;
    this.steps++;
    this.drafted += speculation.num_drafted;
    this.accepted += speculation.pieces.filter(p => p.source !== 'target').length;
    if (this.steps === 1) this.first = now;
    else this.late += speculation.pieces.length;
    this.last = now;
    this.draw(speculation);
    this.drawDrafts(speculation);
    this.show();
  }

  // A column for a step: what was taken, and above it what was guessed wrong.
  draw({num_drafted, pieces}) {
    const column = make('span');
    const names = [...pieces.map(piece => piece.source).reverse()];
    const wrong = num_drafted - names.filter(name => name !== 'target').length;
    for (const name of [...names, ...Array(Math.max(wrong, 0)).fill('')]
        .slice(0, MOST_BOXES))
      column.append(make('i', name));
    this.picture.append(column);
    if (this.picture.children.length > MOST_STEPS)
      this.picture.firstChild.remove();
  }

  drawDrafts({pieces, draft_nodes}) {
    const last = pieces.at(-1);
    if (draft_nodes)
      Drafts.add({before: this.before, nodes: draft_nodes,
        own: last.source === 'target' ? last.text : undefined});
    this.before = last.text;
  }

  get figures() {
    const {draft, lookup, target} = this.counts;
    const percent = Math.round(100 * this.accepted / this.drafted);
    return {
      // The first step has waited for the prompt.
      speed: this.late ?
        (1000 * this.late / (this.last - this.first)).toFixed(1) : '-',
      length: this.steps ? ((draft + lookup + target) / this.steps).toFixed(2) : '-',
      rate: this.drafted ? `${percent} %` : 'none drafted',
      counts: `${draft} / ${lookup} / ${target}`,
    };
  }

  show() {
    for (const [name, value] of Object.entries(this.figures))
      at(name).textContent = value;
  }

  end(reason) {
    const {draft, lookup, target} = this.counts, {speed, length, rate} = this.figures;
    this.box.setAttribute('aria-busy', 'false');
    Drafts.end();
    const drafts = at('limit').hidden ? '' :
      `speculation ${at('drafts').selectedOptions[0].text}; `;
    this.note.textContent = `${drafts}${draft + lookup + target} tokens ` +
      `(draft model ${draft}, lookup ${lookup}, target ${target}), ${speed} ` +
      `tokens a second, ${length} tokens a step, accepted: ${rate}; ${reason}`;
    at('said').textContent = `${this.text} (${this.note.textContent})`;
  }
}

async function send() {
  const text = at('text').value.trim();
  if (!model || stopper || !text) return;
  at('wrong').textContent = '';
  stopper = new AbortController();
  update();
  const user = make('article', 'user');
  user.append(make('h2', '', 'You'), make('p', '', text));
  at('talk').append(user);
  messages.push({role: 'user', content: text});
  const body = {
    model: model.id, messages, stream: true,
    stream_options: {include_speculation: true, include_draft_nodes: Drafts.isOpen},
    temperature: Number(at('temperature').value),
    max_completion_tokens: Number(at('tokens').value),
  };
  if (!at('limit').hidden && at('drafts').value)
    body.max_speculative_tokens = Number(at('drafts').value);
  let answer, reason = 'stopped';
  try {
    const stream = await ask('v1/chat/completions', body, stopper.signal);
    at('text').value = '';
    answer = new Answer();
    for await (const {choices} of events(stream)) {
      answer.add(choices[0]);
      reason = {stop: 'complete', length: 'cut off: most tokens'}[
        choices[0].finish_reason] ?? reason;
      scrollTo(0, document.body.scrollHeight);
    }
  } catch (error) {
    if (error.name !== 'AbortError') at('wrong').textContent = error.message;
  }
  answer?.end(reason);
  // What has no answer is not part of the conversation.
  if (answer?.text) messages.push({role: 'assistant', content: answer.text});
  else { messages.pop(); answer?.box.remove(); user.remove(); at('text').value ||= text; }
  stopper = null;
  update();
}

function update() {
  at('send').disabled = at('clear').disabled = stopper !== null;
  at('stop').disabled = stopper === null;
}

at('ask').addEventListener('submit', event => { event.preventDefault(); send(); });
at('unlock').addEventListener('submit', event => {
  event.preventDefault();
  key = at('key').value;
  at('key').value = '';
  start();
});
at('text').addEventListener('keydown', event => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at('ask').requestSubmit();
});
document.addEventListener('keydown', event => {
  if (event.key === 'Escape') stopper?.abort();
});
at('stop').addEventListener('click', () => { stopper?.abort(); at('text').focus(); });
at('clear').addEventListener('click', () => {
  messages = [];
  at('talk').replaceChildren();
  at('wrong').textContent = at('said').textContent = '';
  at('text').focus();
});
start();
