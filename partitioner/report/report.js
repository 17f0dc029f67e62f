// Pointing, zooming and keys for the report page. Everything it shows is read from the drawings that are already there:
// a Gantt chart's strokes ("M x y h w m gap 0 h w") are its actions, in millionths of `data-end` seconds.
"use strict";
(() => {
  const LEFT = 64, INNER = 928, TICKS = 1e6;
  const NAMES = {F: "forward", B: "backward", I: "backward for inputs", W: "backward for weights",
    recv: "waits for tensors", sync: "gradient sync", optimizer: "optimizer"};
  const create = (tag, set = {}) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(set)) made.setAttribute(name, value);
    return made;
  };
  const seconds = (value) => {
    if (!value) return "0 s";
    const [unit, scale] = Math.abs(value) >= 0.9995 ? ["s", 1] : Math.abs(value) >= 0.9995e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
    const amount = value / scale, size = Math.abs(amount);
    return `${amount.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0)} ${unit}`;
  };

  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip"; tip.hidden = true; tip.setAttribute("role", "status");
  const show = (text, x, y) => {
    if (tip.textContent !== text) tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 6))}px`;
    tip.style.top = `${y + box.height + 22 > innerHeight ? y - box.height - 12 : y + 16}px`;
  };
  const hide = () => { tip.hidden = true; };
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  addEventListener("scroll", hide, {passive: true});

  // Words that a browser would show after a second, at once.
  for (const svg of document.querySelectorAll("svg:not(.window)")) {
    for (const title of svg.querySelectorAll("title")) {
      title.parentNode.dataset.said = title.textContent;
      title.parentNode.setAttribute("aria-label", title.textContent);
      title.remove();
    }
    if (svg.classList.contains("pt-gantt")) continue;
    svg.addEventListener("pointermove", (event) => {
      const said = event.target.closest("[data-said]");
      said ? show(said.dataset.said, event.clientX, event.clientY) : hide();
    });
    svg.addEventListener("pointerleave", hide);
  }
  for (const bar of document.querySelectorAll(".pt-bar[title]")) {
    const said = bar.title;
    bar.removeAttribute("title");
    bar.addEventListener("pointermove", (event) => show(said, event.clientX, event.clientY));
    bar.addEventListener("pointerleave", hide);
  }

  const numbersOf = (runs) => runs.split(",").flatMap((run) => {
    const [first, step = 0, many = 1] = run.split(/\+|\*/).map(Number);
    return Array.from({length: many}, (_, k) => first + step * k);
  });

  class Gantt {
    constructor(svg) {
      this.svg = svg;
      this.end = Number(svg.dataset.end);
      this.pitch = Number(svg.dataset.pitch);
      this.lane = Number(svg.dataset.lane);
      this.ranks = Number(svg.dataset.ranks);
      this.lanes = svg.querySelector(".lanes");
      this.numbers = svg.querySelector(".numbers");
      this.axis = svg.querySelector(".time");
      this.still = [this.axis.innerHTML, this.numbers ? this.numbers.innerHTML : ""];
      this.limit = svg.querySelector(":scope > .limit");
      this.from = 0; this.to = TICKS; this.at = null;
      this.mark = svg.querySelector(".window").appendChild(create("rect", {class: "here", visibility: "hidden"}));
      svg.tabIndex = 0;
      svg.setAttribute("aria-description", "Arrow keys go from action to action, plus and minus zoom, 0 shows all");
      svg.addEventListener("pointermove", (event) => this.pointed(event));
      svg.addEventListener("pointerleave", () => { hide(); this.unmark(); });
      svg.addEventListener("keydown", (event) => this.pressed(event));
      svg.addEventListener("dblclick", (event) => this.zoom(3, this.tick(event)));
      svg.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoom(event.deltaY < 0 ? 1.5 : 1 / 1.5, this.tick(event));
      }, {passive: false});
      svg.addEventListener("pointerdown", (event) => { this.held = this.to - this.from < TICKS ? this.tick(event) : null; });
      addEventListener("pointerup", () => { this.held = null; });
      this.tools();
    }

    tools() {
      const row = document.createElement("div");
      row.className = "tools";
      for (const [text, label, act] of [["+", "Zoom in", () => this.zoom(2)], ["−", "Zoom out", () => this.zoom(0.5)],
        ["All", "Show the whole step", () => this.window(0, TICKS)]]) {
        const button = document.createElement("button");
        button.type = "button"; button.textContent = text; button.setAttribute("aria-label", label);
        button.addEventListener("click", act);
        row.append(button);
      }
      row.append("Drag to move when zoomed; arrow keys go from action to action.");
      this.svg.parentNode.before(row);
    }

    // Actions of each rank in order of time: read from the strokes when first needed.
    get actions() {
      if (this.read) return this.read;
      this.read = Array.from({length: this.ranks}, () => []);
      for (const path of this.lanes.children) {
        const {r, k, s, m} = path.dataset, lane = this.read[Number(r)];
        const numbers = numbersOf(m);
        let at = 0, count = 0;
        for (const [, move, width] of path.getAttribute("d").matchAll(/[Mm](-?\d+) [\d.]+h(\d+)/g)) {
          const start = at + Number(move);
          at = start + Number(width);
          lane.push({start, end: at, kind: k, stage: s, microbatch: numbers[count++]});
        }
      }
      for (const lane of this.read) lane.sort((a, b) => a.start - b.start);
      return this.read;
    }

    say(rank, action) {
      const which = action.microbatch >= 0 ? `, micro-batch ${action.microbatch}` : "";
      const time = (ticks) => seconds(ticks / TICKS * this.end);
      return `rank ${rank}, stage ${action.stage}: ${NAMES[action.kind]}${which}\n` +
        `${time(action.end - action.start)}, from ${time(action.start)} to ${time(action.end)}`;
    }

    place(event) {
      const box = this.svg.getBoundingClientRect(), scale = 1000 / box.width;
      return {x: (event.clientX - box.left) * scale, y: (event.clientY - box.top) * scale};
    }

    tick(event) {
      return this.from + (this.place(event).x - LEFT) / INNER * (this.to - this.from);
    }

    pointed(event) {
      const {x, y} = this.place(event), rank = Math.floor(y / this.pitch);
      if (this.held != null) {
        const move = this.held - this.tick(event);
        this.window(this.from + move, this.to + move);
        return;
      }
      if (x < LEFT || x > LEFT + INNER || rank < 0 || rank >= this.ranks) { hide(); this.unmark(); return; }
      const lane = this.actions[rank], tick = this.tick(event);
      let low = 0, high = lane.length;
      while (low < high) { const mid = (low + high) >> 1; lane[mid].start <= tick ? low = mid + 1 : high = mid; }
      const action = lane[low - 1];
      if (action && tick <= action.end) {
        this.marked(rank, low - 1);
        show(this.say(rank, action), event.clientX, event.clientY);
      } else {
        this.unmark();
        const start = action ? action.end : 0, end = lane[low] ? lane[low].start : TICKS;
        show(`rank ${rank}: idle for ${seconds((end - start) / TICKS * this.end)}`, event.clientX, event.clientY);
      }
    }

    marked(rank, k) {
      this.at = [rank, k];
      const action = this.actions[rank][k], scale = INNER / (this.to - this.from);
      for (const [name, value] of Object.entries({x: (action.start - this.from) * scale, y: rank * this.pitch,
        width: Math.max(1, (action.end - action.start) * scale), height: this.lane, visibility: "visible"}))
        this.mark.setAttribute(name, value);
    }

    unmark() { this.mark.setAttribute("visibility", "hidden"); }

    pressed(event) {
      const [rank, k] = this.at || [0, -1], lanes = this.actions;
      const nearest = (other) => {
        const middle = k < 0 ? 0 : (lanes[rank][k].start + lanes[rank][k].end) / 2;
        let best = 0;
        lanes[other].forEach((one, i) => { if (one.start <= middle) best = i; });
        return [other, best];
      };
      let to = null;
      switch (event.key) {
        case "ArrowRight": to = [rank, Math.min(k + 1, lanes[rank].length - 1)]; break;
        case "ArrowLeft": to = [rank, Math.max(k - 1, 0)]; break;
        case "ArrowDown": to = nearest(Math.min(rank + 1, this.ranks - 1)); break;
        case "ArrowUp": to = nearest(Math.max(rank - 1, 0)); break;
        case "+": case "=": this.zoom(2); break;
        case "-": this.zoom(0.5); break;
        case "0": this.window(0, TICKS); break;
        default: return;
      }
      event.preventDefault();
      if (!to || !lanes[to[0]].length) return;
      const action = lanes[to[0]][to[1]];
      if (action.start < this.from || action.end > this.to) {
        const half = (this.to - this.from) / 2, middle = (action.start + action.end) / 2;
        this.window(middle - half, middle + half);
      }
      this.marked(...to);
      const box = this.mark.getBoundingClientRect();
      show(this.say(to[0], action), box.left, box.bottom - 10);
    }

    zoom(factor, around = (this.from + this.to) / 2) {
      if (this.at && arguments.length < 2) {
        const action = this.actions[this.at[0]][this.at[1]];
        if (action) around = (action.start + action.end) / 2;
      }
      const width = Math.max(200, (this.to - this.from) / factor), share = (around - this.from) / (this.to - this.from);
      this.window(around - share * width, around + (1 - share) * width);
    }

    window(from, to) {
      const width = Math.min(TICKS, to - from);
      this.from = Math.max(0, Math.min(from, TICKS - width));
      this.to = this.from + width;
      const scale = INNER / width, whole = width >= TICKS;
      this.lanes.setAttribute("transform", `scale(${scale} 1) translate(${-this.from} 0)`);
      this.svg.classList.toggle("zoomed", !whole);
      this.limit.setAttribute("visibility", whole ? "visible" : "hidden");
      this.unmark();
      if (whole) {
        this.axis.innerHTML = this.still[0];
        if (this.numbers) this.numbers.innerHTML = this.still[1];
        return;
      }
      this.drawAxis(scale);
      if (this.lane >= 8) this.drawNumbers(scale);
    }

    drawAxis(scale) {
      const bottom = this.ranks * this.pitch, span = (this.to - this.from) / TICKS * this.end;
      const power = 10 ** Math.floor(Math.log10(span / 8));
      const step = [1, 2, 5, 10].map((k) => k * power).find((one) => span / one <= 8);
      this.axis.replaceChildren();
      for (let k = Math.ceil(this.from / TICKS * this.end / step); k * step <= this.to / TICKS * this.end; k++) {
        const x = LEFT + (k * step / this.end * TICKS - this.from) * scale;
        this.axis.append(create("path", {class: "axis", d: `M${x} 0V${bottom + 4}`}));
        const text = create("text", {x, y: bottom + 16, "text-anchor": x > 980 ? "end" : "middle"});
        text.textContent = seconds(k * step);
        this.axis.append(text);
      }
    }

    drawNumbers(scale) {
      if (!this.numbers) this.numbers = this.svg.appendChild(create("g", {class: "numbers", "aria-hidden": "true"}));
      this.numbers.replaceChildren();
      let left = 1500;
      this.actions.forEach((lane, rank) => {
        for (const one of lane) {
          if (one.end < this.from || one.microbatch < 0 || one.kind === "recv") continue;
          if (one.start > this.to || left <= 0) break;
          const text = String(one.microbatch), middle = LEFT + ((one.start + one.end) / 2 - this.from) * scale;
          if ((one.end - one.start) * scale < 6 * text.length + 5 || middle < LEFT || middle > LEFT + INNER) continue;
          const made = create("text", {class: "on", x: middle, y: rank * this.pitch + this.lane / 2 + 3.5});
          made.textContent = text;
          if (this.lane < 12) made.setAttribute("style", "font-size:7.5px");
          this.numbers.append(made);
          left--;
        }
      });
    }
  }

  for (const svg of document.querySelectorAll("svg.pt-gantt")) new Gantt(svg);
})();
