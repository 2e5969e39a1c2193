import type { Moment } from "../history";
import { percent, seconds } from "../parts";

const WIDTH = 600;
const HEIGHT = 140;
/** Least number of moments, one a second, that a chart is wide. */
const SHORTEST = 60;

interface Line {
  label: string;
  of: (moment: Moment) => number | undefined;
  dashed?: boolean;
}

export function ChartsView({ moments, seesAll }: { moments: readonly Moment[]; seesAll: boolean }) {
  const whole = (value: number) => value.toFixed(0);
  return (
    <>
      <h1>Charts</h1>
      <p class="note">The last five minutes at most, since this page was opened. Times to a second, as often as the page is updated.</p>
      <div class="charts">
        <Chart
          title="Requests"
          moments={moments}
          show={whole}
          lines={[
            { label: "running", of: (moment) => moment.running },
            { label: "waiting", of: (moment) => moment.waiting, dashed: true },
          ]}
        />
        <Chart
          title="Time from acceptance to end, of the last 200 requests"
          moments={moments}
          show={seconds}
          lines={[
            { label: "median", of: (moment) => moment.medianS },
            { label: "slowest tenth", of: (moment) => moment.slowestTenthS, dashed: true },
          ]}
        />
        {seesAll && (
          <>
            <Chart
              title="Tokens per second"
              moments={moments}
              show={whole}
              lines={[{ label: "all workers", of: (moment) => moment.tokensPerS }]}
            />
            <Chart
              title="Acceptance"
              moments={moments}
              show={percent}
              most={1}
              lines={[{ label: "all workers", of: (moment) => moment.acceptance }]}
            />
          </>
        )}
      </div>
    </>
  );
}

function Chart(props: {
  title: string;
  moments: readonly Moment[];
  lines: Line[];
  show: (value: number) => string;
  most?: number;
}) {
  const values = props.lines.flatMap((line) => props.moments.map(line.of)).filter((value) => value !== undefined);
  const most = props.most ?? Math.max(1e-9, ...values) * 1.05;
  const width = Math.max(SHORTEST, props.moments.length);
  const last = props.moments.at(-1);
  const shown = (line: Line, moment: Moment | undefined) => {
    const value = moment && line.of(moment);
    return value === undefined ? "unknown" : props.show(value);
  };
  const now = props.lines.map((line) => `${line.label} ${shown(line, last)}`).join(", ");
  const every = Math.max(1, Math.ceil(props.moments.length / 10));
  return (
    <figure>
      <figcaption>{props.title}</figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`${props.title}: now ${now}`}>
        {[0, 0.5, 1].map((share) => (
          <line key={share} class="grid" x1="0" x2={WIDTH} y1={HEIGHT * (1 - share)} y2={HEIGHT * (1 - share)} />
        ))}
        {props.lines.map((line) => (
          <path key={line.label} class={line.dashed ? "line dashed" : "line"} d={pathOf(props.moments, line, most, width)} />
        ))}
        <text x="4" y="14">{values.length ? props.show(most) : ""}</text>
        <text x="4" y={HEIGHT - 5}>{width} s ago</text>
      </svg>
      <p class="now">
        {props.lines.map((line) => (
          <span key={line.label}>
            <span class={line.dashed ? "key dashed" : "key"} aria-hidden="true" /> {line.label}: <b>{shown(line, last)}</b>
          </span>
        ))}
      </p>
      <details>
        <summary>As a table</summary>
        <table>
          <thead>
            <tr>
              <th scope="col" class="number">Seconds ago</th>
              {props.lines.map((line) => (
                <th scope="col" class="number" key={line.label}>{line.label}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {props.moments
              .map((moment, place) => ({ moment, ago: props.moments.length - 1 - place }))
              .filter(({ ago }) => ago % every === 0)
              .map(({ moment, ago }) => (
                <tr key={ago}>
                  <th scope="row" class="number">{ago}</th>
                  {props.lines.map((line) => (
                    <td class="number" key={line.label}>{shown(line, moment)}</td>
                  ))}
                </tr>
              ))}
          </tbody>
        </table>
      </details>
    </figure>
  );
}

function pathOf(moments: readonly Moment[], line: Line, most: number, width: number): string {
  const step = WIDTH / (width - 1);
  let path = "";
  let drawing = false;
  moments.forEach((moment, place) => {
    const value = line.of(moment);
    if (value === undefined) {
      drawing = false;
      return;
    }
    const x = WIDTH - (moments.length - 1 - place) * step;
    path += `${drawing ? "L" : "M"}${x.toFixed(1)} ${(HEIGHT * (1 - value / most)).toFixed(1)}`;
    drawing = true;
  });
  return path;
}
