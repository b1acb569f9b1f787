'use strict';
// Draws a tree of tokens: a column for each depth, lines to the parents.

const Tree = (() => {
  const HEIGHT = 30, ROW = 36, GAP = 34;  // of a box; of rows; between columns
  const MARGIN = 10, HALO = 5, PADDING = 16;
  const NAME = '13px ui-monospace, "DejaVu Sans Mono", monospace';
  const WEIGHT = '10px system-ui, "DejaVu Sans", sans-serif';

  // Sets `column` and `row` of all boxes. What is passed comes first, then what
  // is most probable. The first child is in its parent's row, so the passed path
  // is a straight line. A later one is as high up as its subtree has room below
  // those before it.
  function place(boxes) {
    const below = boxes.map(() => []);
    boxes.forEach((box, i) => below[box.parent]?.push(i));
    for (const children of below)
      children.sort((i, j) => boxes[j].isPassed - boxes[i].isPassed
        || boxes[j].prob - boxes[i].prob);
    // The rows of a subtree, the first one 0.
    function spread(i, column) {
      boxes[i].column = column;
      const rows = new Map([[i, 0]]), ends = [];  // of each column, exclusive
      for (const child of below[i]) {
        const own = [...spread(child, column + 1)];
        const room = own.map(([j, row]) => (ends[boxes[j].column] ?? 0) - row);
        const shift = Math.max(0, ...room);
        for (const [j, row] of own) {
          rows.set(j, row + shift);
          const end = ends[boxes[j].column] ?? 0;
          ends[boxes[j].column] = Math.max(end, row + shift + 1);
        }
      }
      return rows;
    }
    for (const [i, row] of spread(0, 0)) boxes[i].row = row;
  }

  function widthsOf(boxes) {
    const pen = document.createElement('canvas').getContext('2d');
    const measure = (font, text) => {
      pen.font = font;
      return pen.measureText(text).width;
    };
    const widths = [];
    for (const {column, name, weight} of boxes)
      widths[column] = Math.max(widths[column] ?? 0,
        PADDING + measure(NAME, name), PADDING + measure(WEIGHT, weight));
    return widths;
  }

  // Boxes have `parent` (an index, null for the root), the texts `name`, `weight`
  // and `about`, `classes`, `prob` of the path to them, `isPassed` by the verdict,
  // `isKept` after it, and `share`, which makes the line to the parent thick.
  function draw(svg, boxes) {
    function shape(tag, attributes, ...children) {
      const element = document.createElementNS(svg.namespaceURI, tag);
      for (const [name, value] of Object.entries(attributes))
        element.setAttribute(name, value);
      element.append(...children);
      return element;
    }
    place(boxes);
    const widths = widthsOf(boxes), lefts = [MARGIN];
    for (const width of widths) lefts.push(lefts.at(-1) + width + GAP);
    const middle = box => MARGIN + box.row * ROW + HEIGHT / 2;
    const [bands, halos, edges, nodes] = [[], [], [], []];
    for (const box of boxes) {
      const above = boxes[box.parent];
      const x = lefts[box.column], y = MARGIN + box.row * ROW;
      const width = widths[box.column], center = x + width / 2;
      if (box.isKept)
        halos.push(shape('rect', {class: 'halo', x: x - HALO, y: y - HALO, rx: 9,
          width: width + 2 * HALO, height: HEIGHT + 2 * HALO}));
      if (above) {
        const bend = x - GAP / 2;
        const d = `M${x - GAP} ${middle(above)}C${bend} ${middle(above)} `
          + `${bend} ${middle(box)} ${x} ${middle(box)}`;
        edges.push(shape('path', {class: `edge ${box.classes}`, d,
          'stroke-width': 0.8 + 2.7 * box.share}));
        if (box.isKept && above.isKept) bands.push(shape('path', {class: 'band', d}));
      }
      nodes.push(shape('g', {class: box.classes},
        shape('title', {}, box.about),
        shape('rect', {class: 'box', x, y, width, height: HEIGHT, rx: 5}),
        shape('text', {class: 'name', x: center, y: y + (box.weight ? 13 : 20)},
          box.name),
        shape('text', {class: 'weight', x: center, y: y + 25}, box.weight)));
    }
    svg.setAttribute('width', lefts.at(-1) - GAP + MARGIN);
    svg.setAttribute('height', Math.max(...boxes.map(middle)) + HEIGHT / 2 + MARGIN);
    svg.replaceChildren(...bands, ...halos, ...edges, ...nodes);
  }

  return {place, draw};
})();
