import { useEffect, useMemo, useState } from "preact/hooks";
import { type Recording, durationOf, sceneAt } from "../demo/replay";
import { Legend, Numbers, Picture, Problem, count, seconds } from "../parts";

const SPEED = 4;
const TICK_MS = 50;
const NAMES: Record<string, string> = { fcfs: "fcfs: first come, first served", "laps-sd": "laps-sd" };

/** Replays a recorded burst under two policies side by side. It needs no key and no gateway's data. */
export function DemoView() {
  const [recording, setRecording] = useState<Recording>();
  const [problem, setProblem] = useState("");
  useEffect(() => {
    fetch("/console/assets/recording.json")
      .then((response) => response.json() as Promise<Recording>)
      .then(setRecording)
      .catch(() => setProblem("The recording cannot be loaded."));
  }, []);
  return (
    <>
      <h1>One burst, two policies</h1>
      {problem && <Problem>{problem}</Problem>}
      {recording && <Replay recording={recording} />}
    </>
  );
}

function Replay({ recording }: { recording: Recording }) {
  const duration = durationOf(recording);
  const [atS, setAtS] = useState(0);
  const [playing, setPlaying] = useState(true);
  useEffect(() => {
    if (!playing) return;
    let last = performance.now();
    const timer = setInterval(() => {
      const now = performance.now();
      const passedS = (SPEED * (now - last)) / 1000;
      last = now;
      setAtS((before) => Math.min(duration, before + passedS));
    }, TICK_MS);
    return () => clearInterval(timer);
  }, [playing]);
  useEffect(() => {
    if (atS >= duration) setPlaying(false);
  }, [atS >= duration]);
  const scenes = useMemo(() => recording.runs.map((run) => sceneAt(recording, run, atS)), [atS]);
  const over = atS >= duration;
  return (
    <>
      <div class="inline">
        <button
          type="button"
          onClick={() => {
            if (over) setAtS(0);
            setPlaying(over || !playing);
          }}
        >
          {over ? "Replay" : playing ? "Pause" : "Play"}
        </button>
        <label class="scrubber">
          Time: {atS.toFixed(1)} s
          <input type="range" min={0} max={duration} step={0.1} value={atS} onInput={(event) => setAtS(event.currentTarget.valueAsNumber)} />
        </label>
      </div>
      <Verdict recording={recording} over={over} />
      <div class="pair">
        {recording.runs.map((run, place) => {
          const scene = scenes[place]!;
          return (
            <section key={run.policy} aria-label={run.policy}>
              <h2>{NAMES[run.policy] ?? run.policy}</h2>
              <Numbers
                of={[
                  ["Ended", `${scene.pile.ended.length} of ${recording.requests.length}`],
                  ["Median", scene.pile.ended.length ? seconds(scene.medianS) : "–"],
                  ["Mean", scene.pile.ended.length ? seconds(scene.meanS) : "–"],
                  ["Pauses", count(scene.preemptions)],
                ]}
              />
              <Picture label={`Requests under ${run.policy}`} requests={scene.requests} missing={scene.pile} />
            </section>
          );
        })}
      </div>
      <Legend />
      <p class="note">
        {count(recording.requests.length)} requests arrive in {seconds(lastArrival(recording))} at {recording.workers} workers with {recording.slots} slots each.
        Only the order differs. The scheduler's code is the one that serves; the workers are simulated, and shown at {SPEED} times their speed.
      </p>
    </>
  );
}

/** What the whole replay shows; until its end, that it goes on. */
function Verdict({ recording, over }: { recording: Recording; over: boolean }) {
  const [before, after] = recording.runs.map((run) => sceneAt(recording, run, Infinity));
  const [lastBefore, lastAfter] = recording.runs.map((run) => Math.max(...run.ended_s));
  return (
    <p class="verdict" role="status">
      {over
        ? `Half of the requests took at most ${seconds(after!.medianS)} instead of ${seconds(before!.medianS)}; the mean is ${seconds(after!.meanS)} instead of ${seconds(before!.meanS)}. The last one ended at ${seconds(lastAfter!)} instead of ${seconds(lastBefore!)}.`
        : "Which requests end first?"}
    </p>
  );
}

function lastArrival(recording: Recording): number {
  return Math.max(...recording.requests.map((request) => request.arrival_s));
}
