// The picture of a queue: one dot for each request, in rows by level. Waiting requests stand left, running ones right; a
// request that ends falls out below. Pure layout first, then the animation.

import { type Phase, type Request, phaseOf } from "./model";

export interface Spot {
  x: number;
  y: number;
}

export interface Row {
  label: string;
  level: number | null;
  top: number;
  height: number;
}

export interface Layout {
  rows: Row[];
  /** Where the running part begins. */
  middle: number;
  /** Top of the strip of requests that ended. */
  floor: number;
  spots: Map<string, Spot>;
  radius: number;
}

const LABEL_WIDTH = 64;
const HEAD_HEIGHT = 22;
const FLOOR_HEIGHT = 26;
const RUNNING_SHARE = 0.32;
const LARGEST_SPACING = 20;
const SMALLEST_ROW = 26;

/** Places each request in the cell of its level and state, by rank from the middle outwards. */
export function layOut(requests: readonly Request[], levels: readonly (number | null)[], width: number, height: number): Layout {
  const floor = height - FLOOR_HEIGHT;
  const middle = Math.round(LABEL_WIDTH + (width - LABEL_WIDTH) * (1 - RUNNING_SHARE));
  const cells = new Map<string, Request[]>();
  for (const request of requests) {
    const cell = `${request.level ?? ""}:${request.state === "running"}`;
    const inside = cells.get(cell);
    if (inside) inside.push(request);
    else cells.set(cell, [request]);
  }
  const rowHeight = (floor - HEAD_HEIGHT) / Math.max(1, levels.length);
  const rows = levels.map((level, place) => ({
    label: level === null ? "Queue" : `Level ${level}`,
    level,
    top: HEAD_HEIGHT + place * rowHeight,
    height: rowHeight,
  }));
  let spacing = LARGEST_SPACING;
  const inner = Math.max(4, rowHeight - 6);
  for (const [cell, inside] of cells) {
    const cellWidth = (cell.endsWith("true") ? width - middle : middle - LABEL_WIDTH) - 12;
    spacing = Math.min(spacing, spacingFor(inside.length, cellWidth, inner));
  }
  const spots = new Map<string, Spot>();
  for (const row of rows) {
    for (const running of [false, true]) {
      const inside = cells.get(`${row.level ?? ""}:${running}`) ?? [];
      const perColumn = Math.max(1, Math.floor(inner / spacing));
      const top = row.top + (row.height - perColumn * spacing) / 2 + spacing / 2;
      inside.forEach((request, place) => {
        const column = Math.floor(place / perColumn) + 0.5;
        spots.set(request.id, {
          // The request that runs next stands nearest to those that run.
          x: running ? middle + 6 + column * spacing : middle - 6 - column * spacing,
          y: top + (place % perColumn) * spacing,
        });
      });
    }
  }
  return { rows, middle, floor, spots, radius: Math.max(1.5, spacing * 0.36) };
}

/** The largest distance at which `count` dots fit into a cell. */
export function spacingFor(count: number, width: number, height: number): number {
  let spacing = LARGEST_SPACING;
  while (spacing > 2 && Math.floor(width / spacing) * Math.max(1, Math.floor(height / spacing)) < count) spacing -= 0.5;
  return Math.min(spacing, height);
}

/** The levels of a picture, highest first: all that were ever used, so that rows do not jump. */
export class Levels {
  private highest = -1;

  of(requests: readonly Request[]): (number | null)[] {
    let has = false;
    for (const request of requests) {
      if (request.level !== null) {
        has = true;
        this.highest = Math.max(this.highest, request.level);
      }
    }
    if (!has && this.highest < 0) return [null];
    const levels: number[] = [];
    for (let level = this.highest; level >= 0; level--) levels.push(level);
    return levels;
  }
}

interface Dot {
  x: number;
  y: number;
  target: Spot;
  phase: Phase | "ended";
  /** 1: whole; an ended one fades to 0. */
  opacity: number;
}

/** Requests that have ended, first end first, of `total`. */
export interface Pile {
  ended: readonly string[];
  total: number;
}

/** What became of requests that are missing: they fall down and fade, they fade (they may be beyond what is shown), or they
 * are kept. */
export type Missing = "ended" | "unknown" | Pile;

const EASE_PER_S = 7;
const FADE_PER_S = 1.4;
const SETTLED = 0.3;

/** Draws a queue on a canvas and moves the dots to where they belong. */
export class Field {
  private readonly dots = new Map<string, Dot>();
  private readonly levels = new Levels();
  private layout: Layout = layOut([], [null], 300, 200);
  private requests: readonly Request[] = [];
  private missing: Missing = "ended";
  private width = 300;
  private height = 200;
  private frame = 0;
  private lastMs = 0;
  private readonly still = matchMedia("(prefers-reduced-motion: reduce)");
  private readonly observer = new ResizeObserver(() => this.resize());
  private colours = readColours();
  private readonly dark = matchMedia("(prefers-color-scheme: dark)");
  private readonly recolour = () => {
    this.colours = readColours();
    this.wake();
  };
  /** Frames drawn so far; tests count them. */
  frames = 0;

  constructor(private readonly canvas: HTMLCanvasElement) {
    this.observer.observe(canvas);
    this.dark.addEventListener("change", this.recolour);
    this.resize();
  }

  close(): void {
    cancelAnimationFrame(this.frame);
    this.observer.disconnect();
    this.dark.removeEventListener("change", this.recolour);
  }

  /** Shows these requests, best rank first, and what became of those that are missing now. */
  show(requests: readonly Request[], missing: Missing = "ended"): void {
    this.requests = requests;
    this.missing = missing;
    this.layout = layOut(requests, this.levels.of(requests), this.width, this.height);
    for (const request of requests) {
      const target = this.layout.spots.get(request.id)!;
      const dot = this.dots.get(request.id);
      if (dot) Object.assign(dot, { target, phase: phaseOf(request), opacity: 1 });
      else this.dots.set(request.id, { x: LABEL_WIDTH, y: target.y, target, phase: phaseOf(request), opacity: 1 });
    }
    const y = this.layout.floor + FLOOR_HEIGHT / 2;
    for (const [id, dot] of this.dots) {
      if (dot.phase === "ended" || this.layout.spots.has(id)) continue;
      dot.phase = "ended";
      dot.target = missing === "unknown" ? { x: dot.x, y: dot.y } : { x: dot.x, y };
    }
    if (typeof missing === "object") this.pile(missing, y);
    else if (document.hidden) this.forgetEnded();
    this.wake();
  }

  /** Frames remove the dots of ended requests, and a hidden page draws none. */
  private forgetEnded(): void {
    for (const [id, dot] of this.dots) if (dot.phase === "ended") this.dots.delete(id);
  }

  /** Lines up the requests that ended on the floor, in the order of their ends. */
  private pile({ ended, total }: Pile, y: number): void {
    const spacing = (this.width - LABEL_WIDTH - 12) / total;
    ended.forEach((id, place) => {
      const target = { x: LABEL_WIDTH + (place + 0.5) * spacing, y };
      const dot = this.dots.get(id);
      if (dot) Object.assign(dot, { target, phase: "ended", opacity: 1 });
      else this.dots.set(id, { x: target.x, y, target, phase: "ended", opacity: 1 });
    });
  }

  /** The request under a point of the canvas, in CSS pixels. */
  at(x: number, y: number): string | undefined {
    let found: string | undefined;
    let nearest = Math.max(8, this.layout.radius * 2) ** 2;
    for (const [id, dot] of this.dots) {
      const distance = (dot.x - x) ** 2 + (dot.y - y) ** 2;
      if (dot.phase !== "ended" && distance < nearest) [found, nearest] = [id, distance];
    }
    return found;
  }

  private resize(): void {
    const { clientWidth, clientHeight } = this.canvas;
    if (!clientWidth || !clientHeight) return;
    const scale = Math.min(2, devicePixelRatio || 1);
    [this.width, this.height] = [clientWidth, clientHeight];
    [this.canvas.width, this.canvas.height] = [clientWidth * scale, clientHeight * scale];
    this.canvas.getContext("2d")!.setTransform(scale, 0, 0, scale, 0, 0);
    this.show(this.requests, this.missing);
    for (const dot of this.dots.values()) [dot.x, dot.y] = [dot.target.x, dot.target.y];
  }

  private wake(): void {
    if (this.frame) return;
    this.lastMs = performance.now();
    this.frame = requestAnimationFrame((nowMs) => this.draw(nowMs));
  }

  private draw(nowMs: number): void {
    const passedS = Math.min(0.1, Math.max(0, (nowMs - this.lastMs) / 1000));
    this.lastMs = nowMs;
    this.frame = this.move(passedS) ? requestAnimationFrame((next) => this.draw(next)) : 0;
    this.paint();
    this.frames++;
  }

  /** Moves the dots; returns whether any is still on its way. */
  private move(passedS: number): boolean {
    const share = 1 - Math.exp(-EASE_PER_S * passedS);
    let moving = false;
    for (const [id, dot] of this.dots) {
      if (this.still.matches) [dot.x, dot.y] = [dot.target.x, dot.target.y];
      dot.x += (dot.target.x - dot.x) * share;
      dot.y += (dot.target.y - dot.y) * share;
      if (dot.phase === "ended" && typeof this.missing === "string") {
        dot.opacity -= this.still.matches ? 1 : FADE_PER_S * passedS;
        if (dot.opacity <= 0) this.dots.delete(id);
        moving = true;
      } else if (Math.abs(dot.target.x - dot.x) + Math.abs(dot.target.y - dot.y) > SETTLED) {
        moving = true;
      }
    }
    return moving;
  }

  private paint(): void {
    const context = this.canvas.getContext("2d")!;
    const { rows, middle, floor, radius } = this.layout;
    const { colours, width, height } = this;
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    rows.forEach((row, place) => {
      context.fillStyle = place % 2 ? colours.row : colours.rowOdd;
      context.fillRect(0, row.top, width, row.height);
      context.fillStyle = colours.text;
      if (row.height >= 11) context.fillText(row.label, 8, row.top + Math.min(row.height, 2 * SMALLEST_ROW) / 2);
    });
    context.fillStyle = colours.text;
    context.fillText("Waiting", LABEL_WIDTH + 4, HEAD_HEIGHT / 2);
    context.fillText("Running", middle + 6, HEAD_HEIGHT / 2);
    context.fillText("Ended", 8, floor + FLOOR_HEIGHT / 2);
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(middle, 0);
    context.lineTo(middle, floor);
    context.moveTo(0, floor);
    context.lineTo(width, floor);
    context.stroke();
    for (const phase of ["waiting", "ready", "paused", "running"] as const) {
      context.beginPath();
      for (const dot of this.dots.values()) if (dot.phase === phase) trace(context, phase, dot.x, dot.y, radius);
      if (phase === "paused") {
        context.strokeStyle = colours.paused;
        context.lineWidth = Math.max(1.2, radius * 0.5);
        context.stroke();
      } else {
        context.fillStyle = colours[phase];
        context.fill();
      }
    }
    context.fillStyle = colours.ended;
    for (const dot of this.dots.values()) {
      if (dot.phase !== "ended") continue;
      context.globalAlpha = Math.max(0, dot.opacity);
      context.beginPath();
      trace(context, "running", dot.x, dot.y, typeof this.missing === "object" ? Math.min(radius, 3) : radius);
      context.fill();
    }
    context.globalAlpha = 1;
  }
}

/** Each phase has its own shape, so that it can be told without colours. */
function trace(context: CanvasRenderingContext2D, phase: Phase, x: number, y: number, radius: number): void {
  if (phase === "ready") {
    const half = radius * 1.15;
    context.moveTo(x, y - half);
    context.lineTo(x + half, y);
    context.lineTo(x, y + half);
    context.lineTo(x - half, y);
    context.closePath();
    return;
  }
  const size = phase === "waiting" ? radius * 0.85 : phase === "paused" ? radius * 0.75 : radius * 1.1;
  context.moveTo(x + size, y);
  context.arc(x, y, size, 0, 2 * Math.PI);
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name: string) => style.getPropertyValue(`--${name}`).trim();
  return {
    text: read("muted"),
    line: read("line"),
    row: read("surface"),
    rowOdd: read("surface-2"),
    waiting: read("waiting"),
    ready: read("ready"),
    paused: read("paused"),
    running: read("running"),
    ended: read("running"),
  };
}
